"""What the machine can do, and what share of it the model's parts reach.

Rates are measured, not looked up: the best of several large products, and of several readings of
as many bytes as a decoder step reads. From the model's shapes follow the operations and bytes of an
encoder pass and of a decoder step, and so the least time that each could take here.
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

from asrmask import cost
from asrmask.audio import N_FRAMES, Features
from asrmask.encoding import encode, plan
from asrmask.model import Whisper
from asrmask.policy import Policy

N_WIDE = 2048  # of the matrices that are multiplied
ROUNDS = 7


@dataclass(frozen=True)
class Limits:
    """The best that was seen, in units of 1e9 a second."""

    float32_operations: float
    int8_operations: float
    float32_bytes: float  # read by a product of a matrix with a vector
    int8_bytes: float


def fastest(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of the quickest call."""
    call()
    return min(_seconds(call) for _ in range(rounds))


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


@torch.inference_mode()
def measure(n_bytes: int) -> Limits:
    """The limits of this machine, with the threads that PyTorch has now.

    n_bytes: read at once: of many the memory is the limit, of few the caches
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
        warnings.simplefilter("ignore")  # PyTorch is about to move its quantised tensors
        numbers = torch.quantize_per_tensor(weights, 1 / 254, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(numbers, None)


@dataclass(frozen=True)
class Share:
    """A part of the model, the least time that it could take, and the time it takes."""

    part: str
    least_s: float
    taken_s: float

    @property
    def reached(self) -> float:
        return self.least_s / self.taken_s


@torch.inference_mode()
def shares(model: Whisper, limits: Limits, compute_type: str) -> list[Share]:
    """Encoder passes and decoder steps of this project's model, beside their least times.

    The least is with all products at the rate of the compute type; in int8 those of attention and
    of the convolutions are still float32, so that it cannot be reached.
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
    memory = encode(model, [window], Policy())
    for n_clips in (1, 8):
        several = memory.select([0] * n_clips)
        found.append(
            Share(
                f"{compute_type}: decoder, a token of {n_clips} clip{'s' * (n_clips > 1)}",
                decoder_least_s(model, several.keys[0].shape[2], n_clips, limits, is_int8),
                _step_s(model, several),
            )
        )
    return found


def decoder_least_s(
    model: Whisper, n_keys: int, n_clips: int, limits: Limits, is_int8: bool = False
) -> float:
    """Of one step for n_clips texts: reading, or the products, whatever takes longer.

    Read are the weights, and keys and values, or in int8 the features, which are attended to as
    they are by every head.
    """
    dims = model.dims
    n_weights, n_crossed = step_cost(model, n_keys, n_clips)
    if is_int8:
        weights_s = max(
            n_weights / limits.int8_bytes, 2 * n_clips * n_weights / limits.int8_operations
        )
        n_features, operations = n_crossed // 2, 2 * dims.n_text_head * n_crossed
        crossed_s = max(
            4 * n_features / limits.float32_bytes, operations / limits.float32_operations
        )
        return (weights_s + crossed_s) / 1e9
    # the vocabulary is read as float16 where that loses nothing (packed.py)
    n_bytes = 4 * n_weights - 2 * dims.n_vocab * dims.n_text_state
    operations = 2 * n_clips * n_weights + 2 * n_crossed
    read_s = (n_bytes + 4 * n_crossed) / limits.float32_bytes
    return max(read_s, operations / limits.float32_operations) / 1e9


def step_cost(model: Whisper, n_keys: int, n_clips: int) -> tuple[int, int]:
    """Numbers that a decoder step for n_clips texts reads: of weights, and of keys and values."""
    dims = model.dims
    width = dims.n_text_state
    # self-attention, cross-attention (without its keys and values, or in int8 with them in two
    # digits), and the feed-forward part
    block = (4 + (6 if model.decoder.attends_to_features else 2) + 8) * width * width
    n_weights = dims.n_text_layer * block + dims.n_vocab * width
    return n_weights, 2 * n_keys * width * dims.n_text_layer * n_clips


def _step_s(model: Whisper, memory: Any, n_tokens: int = 20) -> float:
    token = torch.full((memory.n_clips, 1), 1000)

    def steps() -> None:
        cache = model.decoder.cache(memory.n_clips, n_tokens)
        for _ in range(n_tokens):
            x, cache = model.decoder(token, memory, cache)
            model.decoder.logits(x[:, 0])

    return _median(steps) / n_tokens


def _median(call: Callable[[], object]) -> float:
    call()
    return statistics.median(_seconds(call) for _ in range(ROUNDS))


def report(model_name: str, model_dir: str | None, threads: int) -> dict[str, Any]:
    """Limits and shares, as plain data."""
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


if __name__ == "__main__":  # in a process of its own, as the systems are
    job = json.load(sys.stdin)
    print(json.dumps(report(job["model"], job["model_dir"], job["threads"])))
