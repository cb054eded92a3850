"""Peak rates of the machine, and the share of them that parts of the model reach.

Rates are measured: the best of several large matrix products, and of several reads of as many bytes
as a decoder step reads. The model's shapes give the operations and bytes of an encoder pass and of
a decoder step. Together they give the least time that each could take on this machine.
"""

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from asrmask.audio.constants import N_FRAMES, N_POSITIONS
from asrmask.audio.spectrogram import Features
from asrmask.model import cost
from asrmask.model.encoding import encode, plan
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper

N_WIDE = 2048  # rows and columns of the matrices that are multiplied
ROUNDS = 7


@dataclass(frozen=True)
class Limits:
    """The best rates measured, in units of 1e9 per second."""

    float32_operations: float
    int8_operations: float
    float32_bytes: float  # read by a matrix-vector product
    int8_bytes: float


def fastest(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the seconds of the fastest call, after one warm-up call."""
    call()
    return min(_seconds(call) for _ in range(rounds))


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


@torch.inference_mode()
def measure(n_bytes: int) -> Limits:
    """Measure the limits of this machine, with PyTorch's present number of threads.

    n_bytes: read by one product; if large, memory is the limit, if small, the caches
    """
    a, b = torch.rand(N_WIDE, N_WIDE), torch.rand(N_WIDE, N_WIDE)
    operations = 2 * N_WIDE**3
    out = torch.empty(N_WIDE, N_WIDE)
    matrix = _quantised(b - 0.5)
    n_rows = n_bytes // 4 // N_WIDE
    tall, vector = torch.rand(n_rows, N_WIDE), torch.rand(N_WIDE)
    numbers = _quantised(torch.rand(4 * n_rows, N_WIDE) - 0.5)
    dynamic = torch.ops.quantized.linear_dynamic
    return Limits(
        operations / fastest(lambda: torch.mm(a, b, out=out)) / 1e9,
        operations / fastest(lambda: dynamic(a, matrix)) / 1e9,
        4 * n_rows * N_WIDE / fastest(lambda: torch.mv(tall, vector)) / 1e9,
        4 * n_rows * N_WIDE / fastest(lambda: dynamic(vector[None], numbers)) / 1e9,
    )


def _quantised(weights: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that quantised tensors will move
        numbers = torch.quantize_per_tensor(weights, 1 / 254, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(numbers, None)


@dataclass(frozen=True)
class Share:
    """A part of the model, the least time it could take, and the time it takes."""

    part: str
    least_s: float
    taken_s: float

    @property
    def reached(self) -> float:
        return self.least_s / self.taken_s


@torch.inference_mode()
def shares(model: Whisper, limits: Limits, compute_type: str) -> list[Share]:
    """Time encoder passes and decoder steps of asrmask, and compute their least times.

    The least time assumes all products at the rate of the compute type. In int8 it cannot be
    reached: attention and convolutions are still float32.
    """
    found = []
    is_int8 = compute_type == "int8"
    rate = limits.int8_operations if is_int8 else limits.float32_operations
    for name, policy, seconds in (
        ("encoder, 30 s window", Policy(), 30.0),
        ("encoder, 7.5 s, virtual padding", Policy("virtual"), 7.5),
        ("encoder, 0.5 s, virtual padding", Policy("virtual"), 0.5),
    ):
        n_frames = int(100 * seconds)
        mel = torch.zeros(model.dims.n_mels, N_FRAMES)
        mel[:, :n_frames] = torch.randn(model.dims.n_mels, n_frames)
        window = Features(mel, n_frames, "zero")
        operations = cost.encoder_operations(
            model.dims, plan(policy, [policy.visible(window.n_positions)])
        )
        taken = _median(lambda w=window, p=policy: encode(model, [w], p))  # type: ignore[misc]
        found.append(Share(f"{compute_type}: {name}", operations / rate / 1e9, taken))
    for n_clips in (1, 8):
        several = encode(model, [window] * n_clips)
        found.append(
            Share(
                f"{compute_type}: decoder, a token of {n_clips} clip{'s' * (n_clips > 1)}",
                decoder_least_s(model, N_POSITIONS, n_clips, limits, is_int8),
                _step_s(model, several),
            )
        )
    return found


def decoder_least_s(
    model: Whisper, n_keys: int, n_clips: int, limits: Limits, is_int8: bool = False
) -> float:
    """Return the least seconds of one decoder step for n_clips texts.

    It is the time to read or the time to multiply, whichever is longer. A step reads the weights
    and the cross-attention keys and values. In int8 it reads the encoder features instead: every
    head attends to them directly.
    """
    dims = model.dims
    n_weights, n_crossed = step_cost(model, n_keys, n_clips, is_int8)
    if is_int8:
        weights_s = max(
            n_weights / limits.int8_bytes, 2 * n_clips * n_weights / limits.int8_operations
        )
        n_features, operations = n_crossed // 2, 2 * dims.n_text_head * n_crossed
        crossed_s = max(
            4 * n_features / limits.float32_bytes, operations / limits.float32_operations
        )
        return (weights_s + crossed_s) / 1e9
    # the token embedding is read as float16 where that is exact (model/packed.py)
    n_bytes = 4 * n_weights - 2 * dims.n_vocab * dims.n_text_state
    operations = 2 * n_clips * n_weights + 2 * n_crossed
    read_s = (n_bytes + 4 * n_crossed) / limits.float32_bytes
    return max(read_s, operations / limits.float32_operations) / 1e9


def step_cost(model: Whisper, n_keys: int, n_clips: int, is_int8: bool = False) -> tuple[int, int]:
    """Count the numbers that a decoder step for n_clips texts reads: weights, keys and values."""
    dims = model.dims
    width = dims.n_text_state
    # self-attention; cross-attention (without key and value projections; in int8 with them, each
    # as two int8 matrices); feed-forward
    block = (4 + (6 if is_int8 else 2) + 8) * width * width
    n_weights = dims.n_text_layer * block + dims.n_vocab * width
    return n_weights, 2 * n_keys * width * dims.n_text_layer * n_clips


def _step_s(model: Whisper, encoded: Any, n_tokens: int = 20) -> float:
    token = torch.full((encoded.n_clips, 1), 1000)

    def steps() -> None:
        cache = model.decoder.cache(encoded.n_clips, n_tokens)
        for _ in range(n_tokens):
            x, cache = model.decoder(token, encoded, cache)
            model.decoder.logits(x[:, 0])

    return _median(steps) / n_tokens


def _median(call: Callable[[], object]) -> float:
    call()
    return statistics.median(_seconds(call) for _ in range(ROUNDS))


def report(model_name: str, model_dir: str | None, threads: int) -> dict[str, Any]:
    """Measure limits and shares; return them as JSON data."""
    from asrmask.checkpoints import load_model

    torch.set_num_threads(threads)
    model = load_model(model_name, "cpu", model_dir)
    limits = measure(4 * sum(step_cost(model, model.dims.n_audio_ctx, 1)))
    found = shares(model, limits, "float32")
    found += shares(load_model(model_name, "cpu", model_dir, compute_type="int8"), limits, "int8")
    return {
        "limits": asdict(limits),
        "shares": [{**asdict(share), "reached": share.reached} for share in found],
    }


if __name__ == "__main__":  # run in a separate process, like the systems
    job = json.load(sys.stdin)
    print(json.dumps(report(job["model"], job["model_dir"], job["threads"])))
