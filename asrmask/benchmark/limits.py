"""Peak rates of the machine, and the share of them that parts of the model reach.

Rates are measured: the best of several large matrix products, and of several reads of as many bytes
as a decoder step reads. The model's shapes give the operations and bytes of an encoder pass and of
a decoder step. Together they give the least time that each could take on this machine.
"""

import json
import statistics
import sys
import timeit
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from asrmask.audio.constants import FRAMES_PER_SECOND, N_FRAMES, N_POSITIONS
from asrmask.audio.spectrogram import Features
from asrmask.checkpoints import load_model
from asrmask.errors import counted
from asrmask.model import cost
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.encoding import encode, plan
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper

WIDTH = 2048  # rows and columns of the matrices that are multiplied
N_TOKENS = 10  # decoder steps that are timed together
ENCODER_PASSES = (
    ("encoder, 30 s window", Policy(), 30.0),
    ("encoder, 7.5 s, virtual padding", Policy("virtual"), 7.5),
    ("encoder, 0.5 s, virtual padding", Policy("virtual"), 0.5),
)
# the best rates measured, in units of 1e9 per second: of operations in matrix products, and of
# bytes read by matrix-vector products
Limits = dict[str, float]


def time_calls(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each call, after one warm-up call."""
    return timeit.repeat(call, number=1, repeat=repeats + 1)[1:]


def measure_limits(n_bytes: int, repeats: int) -> Limits:
    """Measure the limits of this machine, with PyTorch's present number of threads.

    n_bytes: read by one product; if large, memory is the limit, if small, the caches
    """
    n_rows = n_bytes // 4 // WIDTH
    a, b, out = (torch.rand(WIDTH, WIDTH) for _ in range(3))
    tall, vector = torch.rand(n_rows, WIDTH), torch.rand(WIDTH)
    square_int8, tall_int8 = _quantize(b - 0.5), _quantize(torch.rand(4 * n_rows, WIDTH) - 0.5)
    linear_int8 = torch.ops.quantized.linear_dynamic

    def rate(amount: int, call: Callable[[], object]) -> float:
        return amount / min(time_calls(call, repeats)) / 1e9

    return {
        "float32_operations": rate(2 * WIDTH**3, lambda: torch.mm(a, b, out=out)),
        "int8_operations": rate(2 * WIDTH**3, lambda: linear_int8(a, square_int8)),
        "float32_bytes": rate(4 * n_rows * WIDTH, lambda: torch.mv(tall, vector)),
        "int8_bytes": rate(4 * n_rows * WIDTH, lambda: linear_int8(vector[None], tall_int8)),
    }


def _quantize(weights: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that quantised tensors will move
        quantized = torch.quantize_per_tensor(weights, 1 / 254, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(quantized, None)


def measure_shares(
    model: Whisper, limits: Limits, is_int8: bool, repeats: int
) -> list[dict[str, Any]]:
    """Time encoder passes and decoder steps of asrmask, and compute their least times.

    The least time assumes all products at the rate of the compute type. In int8 it cannot be
    reached: attention and convolutions are still float32.
    """
    dims = model.dims
    kind = "int8" if is_int8 else "float32"
    shares = []

    def add(part: str, least_s: float, call: Callable[[], object], n: int = 1) -> None:
        taken_s = statistics.median(time_calls(call, repeats)) / n
        share = {"part": f"{kind}: {part}", "least_s": least_s, "taken_s": taken_s}
        shares.append({**share, "reached": least_s / taken_s})

    for name, policy, seconds in ENCODER_PASSES:
        n_frames = int(FRAMES_PER_SECOND * seconds)
        mel = torch.zeros(dims.n_mels, N_FRAMES)
        mel[:, :n_frames] = torch.randn(dims.n_mels, n_frames)
        window = Features(mel, n_frames, "zero")
        planned = plan(policy, [policy.visible(window.n_positions)])
        least_s = cost.encoder_operations(dims, planned) / limits[f"{kind}_operations"] / 1e9
        add(name, least_s, partial(encode, model, [window], policy))
    for n_clips in (1, 8):
        features = torch.randn(n_clips, N_POSITIONS, dims.n_audio_state)
        decode = partial(_decode, model, model.decoder.cross_attention_cache(features), n_clips)
        name = f"decoder, a token of {counted(n_clips, 'clip')}"
        add(name, decoder_least_s(dims, n_clips, limits, is_int8), decode, N_TOKENS)
    return shares


def _decode(model: Whisper, encoded: CrossAttentionCache, n_clips: int) -> None:
    tokens = torch.full((n_clips, 1), 1000)
    cache = model.decoder.cache(n_clips, N_TOKENS)
    for _ in range(N_TOKENS):
        x, cache = model.decoder(tokens, encoded, cache)
        model.decoder.logits(x[:, 0])


def decoder_least_s(dims: ModelDimensions, n_clips: int, limits: Limits, is_int8: bool) -> float:
    """Return the least seconds of one decoder step for n_clips texts: to read or to multiply.

    A step reads the weights and the cross-attention keys and values. In int8 it reads the encoder
    features instead: every head attends to them directly.
    """

    def least_s(n_bytes: int, operations: int, kind: str) -> float:
        read_s = n_bytes / limits[f"{kind}_bytes"]
        return max(read_s, operations / limits[f"{kind}_operations"]) / 1e9

    n_weights, n_cross = step_cost(dims, n_clips, is_int8)
    products = 2 * n_clips * n_weights
    if is_int8:
        cross_s = least_s(2 * n_cross, 2 * dims.n_text_head * n_cross, "float32")
        return least_s(n_weights, products, "int8") + cross_s
    # the token embedding is read as float16 where that is exact (model/packed.py)
    n_bytes = 4 * n_weights - 2 * dims.n_vocab * dims.n_text_state + 4 * n_cross
    return least_s(n_bytes, products + 2 * n_cross, "float32")


def step_cost(dims: ModelDimensions, n_clips: int, is_int8: bool = False) -> tuple[int, int]:
    """Count the numbers that a decoder step for n_clips texts reads: weights, keys and values."""
    width = dims.n_text_state
    # self-attention; cross-attention (without key and value projections; in int8 with them, each
    # as two int8 matrices); feed-forward
    block = (4 + (6 if is_int8 else 2) + 8) * width * width
    n_weights = dims.n_text_layer * block + dims.n_vocab * width
    return n_weights, 2 * N_POSITIONS * width * dims.n_text_layer * n_clips


@torch.inference_mode()
def report(model: str, model_dir: str | None, threads: int, repeats: int) -> dict[str, Any]:
    """Measure limits and shares; return them as JSON data."""
    exact = load_model(model, "cpu", model_dir, cpu_threads=threads)
    limits = measure_limits(4 * sum(step_cost(exact.dims, 1)), repeats)
    shares = measure_shares(exact, limits, False, repeats)
    int8 = load_model(model, "cpu", model_dir, compute_type="int8")
    shares += measure_shares(int8, limits, True, repeats)
    return {"limits": limits, "shares": shares}


if __name__ == "__main__":  # run in a separate process, like the systems
    print(json.dumps(report(**json.load(sys.stdin))))
