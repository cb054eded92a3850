"""CTranslate2 folders, as faster-whisper keeps them: config.json and model.bin.

model.bin: uint32 version, string spec, uint32 revision, uint32 count; then each variable: string
name, uint8 rank, uint32 dims…, uint8 dtype, uint32 bytes, data; then uint32 aliases, each a pair
of strings. A string is a uint16 length, its final NUL included, and the bytes.
"""

import os
import struct
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from asrmask.checkpoints.checkpoint import (
    Checkpoint,
    dimensions_from,
    heads_from,
    json_object,
)
from asrmask.errors import CheckpointError, brief, one_line
from asrmask.model import ModelDimensions

DTYPES = {i: np.dtype(code) for i, code in enumerate(["<f4", "i1", "<i2", "<i4", "<f2"])}
BFLOAT16 = 5


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a CTranslate2 folder; quantised weights are brought back to floats."""
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
    """Read piece by piece: the whole file beside its tensors would be twice the memory."""
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
    if version != 6:
        raise CheckpointError(f"{path}: CTranslate2 version must be 6, got {version}")
    spec = text()
    if spec != "WhisperSpec":
        raise CheckpointError(f"{path}: expected a WhisperSpec, got {spec[:40]!r}")
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
    if n_elements > 2 * n_all:  # each element is a byte or more, and the embedding is there twice
        raise ValueError(f"{n_elements} elements in {n_all} bytes")
    return {name: _dequantised(name, variables) for name in variables}


def _dequantised(name: str, variables: dict[str, Tensor]) -> Tensor:
    """Integers over the scale that stands beside them: one a row for int8, one in all for int16."""
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
        "n_audio_layer": _count(variables, "encoder/layer_") - 1,  # less the final layer_norm
        "n_vocab": variables["decoder/embeddings/weight"].shape[0],
        "n_text_ctx": n_text_ctx,
        "n_text_state": n_text_state,
        "n_text_head": int(variables["decoder/num_heads"]),
        "n_text_layer": _count(variables, "decoder/layer_") - 1,
    }


def _renamed(variables: dict[str, Tensor], dims: ModelDimensions) -> dict[str, Tensor]:
    """openai-whisper's names; queries, keys and values are taken apart."""
    rest = dict(variables)
    out: dict[str, Tensor] = {}

    def norm(ours: str, theirs: str) -> None:
        out[f"{ours}.weight"] = rest.pop(f"{theirs}/gamma")
        out[f"{ours}.bias"] = rest.pop(f"{theirs}/beta")

    def linear(ours: list[str], theirs: str) -> None:
        weights = rest.pop(f"{theirs}/weight").chunk(len(ours))
        biases = rest.pop(f"{theirs}/bias").chunk(len(ours))
        for name, weight, bias in zip(ours, weights, biases, strict=True):
            out[f"{name}.weight"] = weight
            if not name.endswith(".key"):  # keys have no bias: the softmax would not see it
                out[f"{name}.bias"] = bias

    for part in ("encoder", "decoder"):
        n_layer = dims.n_audio_layer if part == "encoder" else dims.n_text_layer
        for i in range(n_layer):
            ours, theirs = f"{part}.blocks.{i}", f"{part}/layer_{i}"
            own = [f"{ours}.attn.{name}" for name in ("query", "key", "value")]
            linear(own, f"{theirs}/self_attention/linear_0")
            linear([f"{ours}.attn.out"], f"{theirs}/self_attention/linear_1")
            norm(f"{ours}.attn_ln", f"{theirs}/self_attention/layer_norm")
            if part == "decoder":
                cross = f"{ours}.cross_attn"
                linear([f"{cross}.query"], f"{theirs}/attention/linear_0")
                linear([f"{cross}.key", f"{cross}.value"], f"{theirs}/attention/linear_1")
                linear([f"{cross}.out"], f"{theirs}/attention/linear_2")
                norm(f"{ours}.cross_attn_ln", f"{theirs}/attention/layer_norm")
            linear([f"{ours}.mlp.0"], f"{theirs}/ffn/linear_0")
            linear([f"{ours}.mlp.2"], f"{theirs}/ffn/linear_1")
            norm(f"{ours}.mlp_ln", f"{theirs}/ffn/layer_norm")
    linear(["encoder.conv1"], "encoder/conv1")
    linear(["encoder.conv2"], "encoder/conv2")
    out["encoder.positional_embedding"] = rest.pop("encoder/position_encodings/encodings")
    out["decoder.positional_embedding"] = rest.pop("decoder/position_encodings/encodings")
    out["decoder.token_embedding.weight"] = rest.pop("decoder/embeddings/weight")
    norm("encoder.ln_post", "encoder/layer_norm")
    norm("decoder.ln", "decoder/layer_norm")
    rest.pop("decoder/projection/weight", None)  # the embedding again
    if extra := sorted(n for n in rest if n.endswith(("/weight", "/bias", "/gamma", "/beta"))):
        raise ValueError(f"{brief(extra[0])}, which no Whisper has")
    return out
