"""Peak rates of the machine, and the share of them that parts of the model reach.

Rates are the best that are seen: of large matrix products by several libraries, and of several ways
to read as many bytes as a decoder step reads. The model's shapes give the operations and bytes of
an encoder pass and of a decoder step. Together they give the least time that each could take on
this machine.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asrmask.audio.constants import N_POSITIONS
from asrmask.benchmark.asrmask_engine import AsrmaskEngine, virtual_plans
from asrmask.benchmark.parts import (
    COMPUTE_TYPES,
    ENCODER,
    N_CALLS,
    N_CLIPS,
    time_parts,
    time_virtual_parts,
    times_s,
    token_part,
)
from asrmask.benchmark.worker import run_job
from asrmask.model import cost
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.encoding import Plan

WIDTH = 2048  # rows and columns of the matrices that are multiplied
MAX_BYTES = 1 << 28  # read at a time: more takes memory and is not in any cache either
Call = Callable[[], object]
# prepares rows (M, K) and weights (N, K) of about -0.5..0.5; returns a call that multiplies them
Product = Callable[[Tensor, Tensor], Call]
# the best rates measured, in units of 1e9 per second: of operations in matrix products, and of
# bytes read
Limits = dict[str, float]


def multiply_float32(rows: Tensor, weights: Tensor) -> Call:
    """A product with float32 weights, by PyTorch."""
    out = torch.empty(len(rows), len(weights))
    return partial(torch.mm, rows, weights.t(), out=out)


def multiply_vector(rows: Tensor, weights: Tensor) -> Call:
    """The first row's product, by PyTorch's function for one row."""
    return partial(torch.mv, weights, rows[0])


def sum_up(rows: Tensor, weights: Tensor) -> Call:
    """No product: the weights are read."""
    return weights.sum


def multiply_fbgemm(rows: Tensor, weights: Tensor) -> Call:
    """An int8 product by FBGEMM, from and to float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that quantised tensors will move
        quantized = torch.quantize_per_tensor(weights, 1 / 254, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantized, None)
    return partial(torch.ops.quantized.linear_dynamic, rows, packed)


def multiply_onednn(rows: Tensor, weights: Tensor) -> Call:
    """An int8 product by oneDNN (on x86), from int8 to int32."""
    first, second = ((x * 127).to(torch.int8) for x in (rows, weights))
    return partial(torch._int_mm, first, second.t())


# The best counts. A new way to multiply is one more function here.
FLOAT32_PRODUCTS: tuple[Product, ...] = (multiply_float32,)
INT8_PRODUCTS: tuple[Product, ...] = (multiply_fbgemm, multiply_onednn)
FLOAT32_READS: tuple[Product, ...] = (multiply_vector, sum_up)  # of float32 weights


def measure_limits(dims: ModelDimensions, repeats: int) -> Limits:
    """Measure the limits of this machine, with PyTorch's present number of threads.

    Memory is read in the amounts of a decoder step: if large, memory is the limit, if small, the
    caches. Any way to read it counts for both compute types.
    """
    limits = {}
    for kind, products in (("float32", FLOAT32_PRODUCTS), ("int8", INT8_PRODUCTS)):
        limits[f"{kind}_operations"] = operation_rate(products, repeats)
        n_bytes = min(step_bytes(dims, 1, kind == "int8"), MAX_BYTES)
        limits[f"{kind}_bytes"] = read_rate(n_bytes, repeats)
    return limits


def operation_rate(products: Sequence[Product], repeats: int) -> float:
    """Return the best rate of products of large square matrices."""
    rows, weights = (torch.rand(WIDTH, WIDTH) - 0.5 for _ in range(2))
    return max(best_rate(2 * WIDTH**3, product(rows, weights), repeats) for product in products)


def read_rate(n_bytes: int, repeats: int) -> float:
    """Return the best rate of reading that many bytes of weights for one row."""
    best = 0.0
    for products, size in ((FLOAT32_READS, 4), (INT8_PRODUCTS, 1)):
        n_rows = max(n_bytes // size // WIDTH, 1)
        row, weights = torch.rand(1, WIDTH) - 0.5, torch.rand(n_rows, WIDTH) - 0.5
        for product in products:
            call = product(row, weights)
            best = max(best, best_rate(size * n_rows * WIDTH, call, repeats))
    return best


def best_rate(amount: int, call: Call, repeats: int) -> float:
    """Return the best rate of a call, after one that warms up: amount per second, in 1e9."""
    return amount / min(times_s(call, repeats)) / 1e9


def measure_shares(engine: AsrmaskEngine, limits: Limits, is_int8: bool) -> list[dict[str, Any]]:
    """Time the parts of asrmask, and compute their least times.

    The least time assumes all products at the rate of the compute type. In int8 it cannot be
    reached: attention and convolutions are still float32.
    """
    dims, kind = engine.dims, "int8" if is_int8 else "float32"
    plans = {ENCODER: Plan()} | {part: planned for part, (_, planned) in virtual_plans().items()}
    least_s = {part: encoder_least_s(dims, p, limits, is_int8) for part, p in plans.items()}
    least_s |= {token_part(n): decoder_least_s(dims, n, limits, is_int8) for n in N_CLIPS}
    taken_s = time_parts(engine, N_CALLS) | time_virtual_parts(engine, N_CALLS)
    shares = []
    for part, least in least_s.items():
        share = {"part": f"{kind}: {part}", "least_s": least, "taken_s": taken_s[part]}
        shares.append({**share, "reached": least / max(taken_s[part], 1e-9)})
    return shares


def encoder_least_s(dims: ModelDimensions, plan: Plan, limits: Limits, is_int8: bool) -> float:
    """Return the least seconds of the encoder, without the decoder's keys and values."""
    operations = cost.encoder_operations(dims, plan) - cost.keys_values_operations(dims, plan)
    return operations / limits["int8_operations" if is_int8 else "float32_operations"] / 1e9


def decoder_least_s(dims: ModelDimensions, n_clips: int, limits: Limits, is_int8: bool) -> float:
    """Return the least seconds of one decoder step for n_clips texts: to read or to multiply.

    A step reads the weights and the cross-attention keys and values. In int8 it reads the encoder
    features instead, as int8 too: every head attends to them directly, with two digits.
    """
    kind = "int8" if is_int8 else "float32"
    n_weights, n_cross = step_cost(dims, n_clips, is_int8)
    n_heads = 2 * dims.n_text_head if is_int8 else 1  # that multiply each number
    operations = 2 * (n_clips * n_weights + n_heads * n_cross)
    read_s = step_bytes(dims, n_clips, is_int8) / limits[f"{kind}_bytes"]
    return max(read_s, operations / limits[f"{kind}_operations"]) / 1e9


def step_bytes(dims: ModelDimensions, n_clips: int, is_int8: bool) -> int:
    """Count the bytes that a decoder step for n_clips texts reads."""
    n_weights, n_cross = step_cost(dims, n_clips, is_int8)
    if is_int8:
        return n_weights + n_cross
    # the token embedding is read as float16 where that is exact (model/packed.py)
    return 4 * n_weights - 2 * dims.n_vocab * dims.n_text_state + 4 * n_cross


def step_cost(dims: ModelDimensions, n_clips: int, is_int8: bool = False) -> tuple[int, int]:
    """Count the numbers that a decoder step for n_clips texts reads: weights, keys and values."""
    width = dims.n_text_state
    # self-attention; cross-attention (without key and value projections; in int8 with them, each
    # as two int8 matrices); feed-forward
    block = (4 + (6 if is_int8 else 2) + 8) * width * width
    n_weights = dims.n_text_layer * block + dims.n_vocab * width
    return n_weights, 2 * N_POSITIONS * width * dims.n_text_layer * n_clips


@torch.inference_mode()
def report(job: dict[str, Any]) -> dict[str, Any]:
    """Measure limits and shares; return them as JSON data.

    job: model, model_dir, threads, and repeats of every product
    """
    repeats, limits, shares = job["repeats"], Limits(), []
    for kind in COMPUTE_TYPES:
        engine = AsrmaskEngine(job["model"], kind, job["threads"], job["model_dir"])
        is_int8 = kind == "int8"
        if not limits:
            limits = measure_limits(engine.dims, repeats)
        shares += measure_shares(engine, limits, is_int8)
        del engine  # before the next one is loaded
    return {"limits": limits, "shares": shares}


if __name__ == "__main__":  # run in a separate process, like the systems
    run_job(report)
