"""Read CTranslate2 folders, as faster-whisper uses them: config.json and model.bin.

model.bin: uint32 version, string spec, uint32 revision, uint32 count; then each variable: string
name, uint8 rank, uint32 dims…, uint8 dtype, uint32 bytes, data; then uint32 count of aliases, each
a pair of strings. A string is a uint16 length, which includes its final NUL, and the bytes.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from asrmask.checkpoints.checkpoint import Checkpoint, dimensions_from, heads_from, json_object
from asrmask.errors import CheckpointError, brief, one_line
from asrmask.model.dimensions import ModelDimensions

VERSION, SPEC = 6, "WhisperSpec"
DTYPES = {i: np.dtype(code) for i, code in enumerate(["<f4", "i1", "<i2", "<i4", "<f2"])}
BFLOAT16 = 5

# CTranslate2's modules in a layer → openai-whisper's; several if fused into one matrix by rows
LAYER = {
    "self_attention/linear_0": ("attn.query", "attn.key", "attn.value"),
    "self_attention/linear_1": ("attn.out",),
    "self_attention/layer_norm": ("attn_ln",),
    "attention/linear_0": ("cross_attn.query",),
    "attention/linear_1": ("cross_attn.key", "cross_attn.value"),
    "attention/linear_2": ("cross_attn.out",),
    "attention/layer_norm": ("cross_attn_ln",),
    "ffn/linear_0": ("mlp.0",),
    "ffn/linear_1": ("mlp.2",),
    "ffn/layer_norm": ("mlp_ln",),
}
# modules outside of layers
OUTSIDE = {
    "encoder/conv1": "encoder.conv1",
    "encoder/conv2": "encoder.conv2",
    "encoder/layer_norm": "encoder.ln_post",
    "decoder/layer_norm": "decoder.ln",
}
# weights outside of modules
TABLES = {
    "encoder/position_encodings/encodings": "encoder.positional_embedding",
    "decoder/position_encodings/encodings": "decoder.positional_embedding",
    "decoder/embeddings/weight": "decoder.token_embedding.weight",
}
PROJECTION = "decoder/projection/weight"  # output projection, tied to the token embedding


def modules(dims: ModelDimensions) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield CTranslate2's name of every module and openai-whisper's names of its parts."""
    for part, n_layer in (("encoder", dims.n_audio_layer), ("decoder", dims.n_text_layer)):
        for i in range(n_layer):
            for theirs, ours in LAYER.items():
                if part == "decoder" or not theirs.startswith("attention/"):
                    yield (
                        f"{part}/layer_{i}/{theirs}",
                        tuple(f"{part}.blocks.{i}.{name}" for name in ours),
                    )
    for theirs, name in OUTSIDE.items():
        yield theirs, (name,)


def parameters(module: str) -> tuple[str, str]:
    """Return the names of a module's weight and bias.

    >>> parameters("encoder/layer_norm")
    ('encoder/layer_norm/gamma', 'encoder/layer_norm/beta')
    """
    names = ("gamma", "beta") if module.endswith("layer_norm") else ("weight", "bias")
    return f"{module}/{names[0]}", f"{module}/{names[1]}"


def has_bias(name: str) -> bool:
    """Whether a module has a bias in openai-whisper; if not, CTranslate2 stores zeros.

    Keys have none, because softmax would cancel it.
    """
    return not name.endswith(".key")


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint from a CTranslate2 folder. Quantised weights are converted to floats."""
    path = folder / "model.bin"
    try:
        variables = _variables(path)
        dims = dimensions_from(_dimensions(variables), path)
        weights = _renamed(variables, dims)
    except KeyError as error:
        raise CheckpointError(f"{path}: expected {brief(error.args[0])}, got none") from None
    except (OSError, struct.error, ValueError, IndexError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: damaged, expected CTranslate2's layout, got {one_line(error)[:200]}"
        ) from None
    config = folder / "config.json"
    heads = json_object(config).get("alignment_heads") if config.exists() else None
    return Checkpoint(dims, weights, heads_from(heads, config))


def _variables(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        return _variables_in(file, path)


def _variables_in(file: IO[bytes], path: Path) -> dict[str, Tensor]:
    """Read all variables, one at a time: reading the file at once would double the memory."""
    n_all = os.fstat(file.fileno()).st_size

    def read(n: int) -> bytes:
        data = file.read(n)
        if len(data) < n:
            raise ValueError(f"{n_all} bytes, at least {file.tell() - len(data) + n} announced")
        return data

    def number(code: str) -> int:
        (value,) = struct.unpack("<" + code, read(struct.calcsize(code)))
        return value

    def text() -> str:
        return read(number("H"))[:-1].decode()

    variables: dict[str, Tensor] = {}
    version = number("I")
    if version != VERSION:
        raise CheckpointError(f"{path}: CTranslate2 version must be {VERSION}, got {version}")
    spec = text()
    if spec != SPEC:
        raise CheckpointError(f"{path}: expected a {SPEC}, got {spec[:40]!r}")
    number("I")  # revision
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype, n_bytes = number("B"), number("I")
        if file.tell() + n_bytes > n_all:
            raise CheckpointError(
                f"{path}: truncated in {brief(name)}, got {n_all} bytes, "
                f"expected at least {file.tell() + n_bytes}"
            )
        if dtype not in DTYPES and dtype != BFLOAT16:
            raise ValueError(f"type {dtype} of {brief(name)}")
        if dtype == BFLOAT16:
            raw = torch.frombuffer(bytearray(read(n_bytes)), dtype=torch.bfloat16)
            variables[name] = raw.view(shape)
        else:
            array = np.frombuffer(bytearray(read(n_bytes)), DTYPES[dtype])
            variables[name] = torch.from_numpy(array.reshape(shape))
    n_elements = sum(variable.numel() for variable in variables.values())
    for _ in range(number("I")):
        alias, name = text(), text()
        variables[alias] = variables[name]
        n_elements += variables[name].numel()
    if n_elements > 2 * n_all:  # elements have at least 1 byte; the embedding counts twice (alias)
        raise ValueError(f"{n_elements} elements in {n_all} bytes")
    return {name: _dequantised(name, variables) for name in variables}


def _dequantised(name: str, variables: dict[str, Tensor]) -> Tensor:
    """Divide integers by their scale: one per row for int8, one per tensor for int16."""
    value = variables[name]
    scale = variables.get(f"{name}_scale")
    if scale is None:
        return value
    if scale.numel() not in {1, *value.shape[:1]}:
        raise ValueError(
            f"{scale.numel()} scales of {brief(name)}, which is {brief(tuple(value.shape))}"
        )
    return value.float() / scale.float().reshape(-1, *[1] * (value.ndim - 1))


def _count(variables: dict[str, Tensor], prefix: str) -> int:
    return len({name.split("/")[1] for name in variables if name.startswith(prefix)})


def _dimensions(variables: dict[str, Tensor]) -> dict[str, int]:
    n_audio_ctx, n_audio_state = variables["encoder/position_encodings/encodings"].shape
    n_text_ctx, n_text_state = variables["decoder/position_encodings/encodings"].shape
    return {
        "n_mels": variables["encoder/conv1/weight"].shape[1],
        "n_audio_ctx": n_audio_ctx,
        "n_audio_state": n_audio_state,
        "n_audio_head": int(variables["encoder/num_heads"]),
        "n_audio_layer": _count(variables, "encoder/layer_") - 1,  # minus the final layer_norm
        "n_vocab": variables["decoder/embeddings/weight"].shape[0],
        "n_text_ctx": n_text_ctx,
        "n_text_state": n_text_state,
        "n_text_head": int(variables["decoder/num_heads"]),
        "n_text_layer": _count(variables, "decoder/layer_") - 1,
    }


def _renamed(variables: dict[str, Tensor], dims: ModelDimensions) -> dict[str, Tensor]:
    """Rename weights to openai-whisper's names and split fused queries, keys and values."""
    rest = dict(variables)
    out: dict[str, Tensor] = {}
    for theirs, ours in modules(dims):
        weight, bias = parameters(theirs)
        weights, biases = rest.pop(weight).chunk(len(ours)), rest.pop(bias).chunk(len(ours))
        for name, own_weight, own_bias in zip(ours, weights, biases, strict=True):
            out[f"{name}.weight"] = own_weight
            if has_bias(name):
                out[f"{name}.bias"] = own_bias
    for theirs, name in TABLES.items():
        out[name] = rest.pop(theirs)
    rest.pop(PROJECTION, None)
    if extra := sorted(n for n in rest if n.endswith(("/weight", "/bias", "/gamma", "/beta"))):
        raise ValueError(f"{brief(extra[0])}, which no Whisper has")
    return out
