"""Read and write CTranslate2 folders, as faster-whisper uses them: config.json and model.bin.

model.bin: uint32 version, string spec, uint32 revision, uint32 count; then each variable: string
name, uint8 rank, uint32 dims…, uint8 dtype, uint32 bytes, data; then uint32 count of aliases, each
a pair of strings. A string is a uint16 length, which includes its final NUL, and the bytes.
"""

import json
import os
import re
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from asrmask.checkpoints import huggingface_tokenizer
from asrmask.checkpoints.checkpoint import Checkpoint, read_alignment_heads, reading
from asrmask.checkpoints.huggingface_tokenizer import printable
from asrmask.errors import CheckpointError, brief
from asrmask.files import atomic_write
from asrmask.model.dimensions import ModelDimensions
from asrmask.tokenizer.tokenizer import get_tokenizer

VERSION, SPEC, REVISION = 6, "WhisperSpec", 3
# by their codes in the file
DTYPES = [torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16]

# CTranslate2's modules in a layer → openai-whisper's; several if fused into one matrix by rows
ENCODER_LAYER = {
    "self_attention/linear_0": ("attn.query", "attn.key", "attn.value"),
    "self_attention/linear_1": ("attn.out",),
    "self_attention/layer_norm": ("attn_ln",),
    "ffn/linear_0": ("mlp.0",),
    "ffn/linear_1": ("mlp.2",),
    "ffn/layer_norm": ("mlp_ln",),
}
DECODER_LAYER = ENCODER_LAYER | {
    "attention/linear_0": ("cross_attn.query",),
    "attention/linear_1": ("cross_attn.key", "cross_attn.value"),
    "attention/linear_2": ("cross_attn.out",),
    "attention/layer_norm": ("cross_attn_ln",),
}
# modules outside of layers
MODULES: dict[str, tuple[str, ...]] = {
    "encoder/conv1": ("encoder.conv1",),
    "encoder/conv2": ("encoder.conv2",),
    "encoder/layer_norm": ("encoder.ln_post",),
    "decoder/layer_norm": ("decoder.ln",),
}
# weights outside of modules
EMBEDDINGS: dict[str, tuple[str, ...]] = {
    "encoder/position_encodings/encodings": ("encoder.positional_embedding",),
    "decoder/position_encodings/encodings": ("decoder.positional_embedding",),
    "decoder/embeddings/weight": ("decoder.token_embedding.weight",),
}
PROJECTION = "decoder/projection/weight"  # output projection, tied to the token embedding
GELU = 3


def parameter_names(dims: ModelDimensions) -> dict[str, tuple[str, ...]]:
    """Return CTranslate2's name of every weight → openai-whisper's names of its parts.

    Keys have no bias in openai-whisper, but a name here: CTranslate2 stores zeros.
    """
    modules = dict(MODULES)
    for part, n_layer, layer in (
        ("encoder", dims.n_audio_layer, ENCODER_LAYER),
        ("decoder", dims.n_text_layer, DECODER_LAYER),
    ):
        for i in range(n_layer):
            for theirs, ours in layer.items():
                full_names = tuple(f"{part}.blocks.{i}.{name}" for name in ours)
                modules[f"{part}/layer_{i}/{theirs}"] = full_names
    names = dict(EMBEDDINGS)
    for theirs, ours in modules.items():
        weight, bias = ("gamma", "beta") if theirs.endswith("layer_norm") else ("weight", "bias")
        names[f"{theirs}/{weight}"] = tuple(f"{name}.weight" for name in ours)
        names[f"{theirs}/{bias}"] = tuple(f"{name}.bias" for name in ours)
    return names


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint from a CTranslate2 folder. Quantised weights are converted to floats."""
    path = folder / "model.bin"
    with reading(path, "CTranslate2's layout"), path.open("rb") as file:
        variables = _read_variables(file)
        dims = ModelDimensions.of(_dimensions(variables))
        weights = _split(variables, dims)
    return Checkpoint(dims, weights, read_alignment_heads(folder / "config.json", dims))


def _read_variables(file: BinaryIO) -> dict[str, Tensor]:
    """Read all variables, one at a time: reading the file at once would double the memory."""
    n_file = os.fstat(file.fileno()).st_size
    name = "header"  # the last name read, for errors

    def read_bytes(n: int) -> bytes:
        end = file.tell() + n
        if end > n_file:
            raise ValueError(f"{n_file} bytes, at least {end} announced at {brief(name)}")
        return file.read(n)

    def number(code: str) -> int:
        (value,) = struct.unpack("<" + code, read_bytes(struct.calcsize(code)))
        return value

    def text() -> str:
        return read_bytes(number("H"))[:-1].decode()

    version = number("I")
    if version != VERSION:
        raise CheckpointError(f"CTranslate2 version must be {VERSION}, got {version}")
    spec = text()
    if spec != SPEC:
        raise CheckpointError(f"expected a {SPEC}, got {spec[:40]!r}")
    number("I")  # revision
    variables: dict[str, Tensor] = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        code, n_bytes = number("B"), number("I")
        if code >= len(DTYPES) or n_bytes != prod(shape) * DTYPES[code].itemsize:
            raise ValueError(f"{n_bytes} bytes of type {code} for {brief(name)}, {brief(shape)}")
        data = bytearray(read_bytes(n_bytes))
        variables[name] = torch.frombuffer(data, dtype=DTYPES[code]).view(shape)
    name = "aliases"
    aliases = [(text(), text()) for _ in range(number("I"))]
    variables |= {alias: variables[name] for alias, name in aliases}
    n_elements = sum(variable.numel() for variable in variables.values())
    if n_elements > 2 * n_file:  # elements have at least 1 byte; the embedding counts twice (alias)
        raise ValueError(f"{n_elements} elements in {n_file} bytes")
    return {name: _dequantize(name, variables) for name in variables}


def _dequantize(name: str, variables: dict[str, Tensor]) -> Tensor:
    """Divide integers by their scale: one per row for int8, one per tensor for int16."""
    value, scale = variables[name], variables.get(f"{name}_scale")
    if scale is None:
        return value
    if scale.numel() not in {1, *value.shape[:1]}:
        shape = brief(tuple(value.shape))
        raise ValueError(f"{scale.numel()} scales of {brief(name)}, which is {shape}")
    return value.float() / scale.float().reshape(-1, *[1] * (value.ndim - 1))


def _dimensions(variables: dict[str, Tensor]) -> dict[str, int]:
    n_audio_ctx, n_audio_state = variables["encoder/position_encodings/encodings"].shape
    n_text_ctx, n_text_state = variables["decoder/position_encodings/encodings"].shape
    layers = {m[0] for name in variables if (m := re.match(r"(en|de)coder/layer_\d+/", name))}
    return {
        "n_mels": variables["encoder/conv1/weight"].shape[1],
        "n_audio_ctx": n_audio_ctx,
        "n_audio_state": n_audio_state,
        "n_audio_head": int(variables["encoder/num_heads"]),
        "n_audio_layer": sum(layer.startswith("encoder") for layer in layers),
        "n_vocab": variables["decoder/embeddings/weight"].shape[0],
        "n_text_ctx": n_text_ctx,
        "n_text_state": n_text_state,
        "n_text_head": int(variables["decoder/num_heads"]),
        "n_text_layer": sum(layer.startswith("decoder") for layer in layers),
    }


def _split(variables: dict[str, Tensor], dims: ModelDimensions) -> dict[str, Tensor]:
    """Return weights under openai-whisper's names, with fused matrices split into their parts."""
    names = parameter_names(dims)
    weights = {
        name: part
        for theirs, ours in names.items()
        for name, part in zip(ours, variables[theirs].chunk(len(ours)), strict=True)
        if not name.endswith(".key.bias")
    }
    for extra in sorted(variables.keys() - names.keys() - {PROJECTION}):
        if extra.endswith(("/weight", "/bias", "/gamma", "/beta")):
            raise ValueError(f"{brief(extra)}, which no Whisper has")
    return weights


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a folder, with the vocabulary and tokenizer that faster-whisper needs.

    model.bin is written last, so if it exists, the rest does.
    """
    dims = checkpoint.dims
    tokenizer = get_tokenizer(dims.is_multilingual, num_languages=dims.num_languages)
    vocabulary = tokenizer.vocabulary
    folder.mkdir(parents=True, exist_ok=True)
    heads = checkpoint.alignment_heads or dims.default_alignment_heads
    config = {
        "alignment_heads": [list(pair) for pair in heads],  # if empty, CTranslate2 times no words
        "lang_ids": list(tokenizer.language_tokens.values()),
        "suppress_ids": list(tokenizer.non_speech_tokens),
        "suppress_ids_begin": [tokenizer.blank, tokenizer.eot],
    }
    for name, content in (
        ("config.json", config),
        ("preprocessor_config.json", {"feature_size": dims.n_mels}),
        ("vocabulary.json", [*map(printable, vocabulary.text), *vocabulary.specials]),
    ):
        with atomic_write(folder / name) as file:
            json.dump(content, file, ensure_ascii=False)
    huggingface_tokenizer.write(folder / "tokenizer.json", vocabulary)
    with atomic_write(folder / "model.bin", binary=True) as file:
        _write_model(file, checkpoint)


def _write_model(file: BinaryIO, checkpoint: Checkpoint) -> None:
    def text(value: str) -> bytes:
        encoded = value.encode() + b"\0"
        return struct.pack("<H", len(encoded)) + encoded

    variables = dict(_fuse(checkpoint))
    file.write(struct.pack("<I", VERSION) + text(SPEC))
    file.write(struct.pack("<2I", REVISION, len(variables)))
    for name, value in variables.items():
        data = value.numpy().tobytes()
        file.write(text(name) + struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape))
        file.write(struct.pack("<BI", DTYPES.index(value.dtype), len(data)) + data)
    file.write(struct.pack("<I", 1) + text(PROJECTION) + text("decoder/embeddings/weight"))


def _fuse(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield CTranslate2's names and values, in float16 if that is lossless."""
    dims, weights = checkpoint.dims, checkpoint.weights
    key_bias = torch.zeros(dims.n_text_state)
    for theirs, ours in parameter_names(dims).items():
        parts = [key_bias if name.endswith(".key.bias") else weights[name] for name in ours]
        value = torch.cat([part.float() for part in parts])
        half = value.half()
        yield theirs, half if torch.equal(half.float(), value) else value
    int16 = {"encoder/num_heads": dims.n_audio_head, "decoder/num_heads": dims.n_text_head}
    int16 |= {"decoder/alignment_heads": 1, "decoder/alignment_layer": -1}
    int8 = {"activation": GELU, "pre_norm": 1, "alibi": 0}
    int8 |= {"scale_embeddings": 0, "start_from_zero_embedding": 0}
    for name, number in int16.items():
        yield name, torch.tensor(number, dtype=torch.int16)
    for name, number in int8.items():
        yield f"decoder/{name}", torch.tensor(number, dtype=torch.int8)
