"""Read and write whisper.cpp's weight files (ggml).

A file holds a magic number and eleven int32; the Mel filters; the vocabulary's bytes; then each
weight: int32 rank, length of its name, type, dimensions from last to first, name, data. Names are
openai-whisper's. Types are ggml's; the gguf package of its authors converts them.
"""

import os
import struct
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from asrmask import assets
from asrmask.checkpoints.checkpoint import Checkpoint, reading
from asrmask.errors import CheckpointError, brief
from asrmask.model.dimensions import ModelDimensions
from asrmask.tokenizer.tokenizer import get_tokenizer

MAGIC = 0x67676D6C
MAX_RANK = 4
# dimensions in the order of the header; the file type follows
DIMENSIONS = (
    *("n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer"),
    *("n_text_ctx", "n_text_state", "n_text_head", "n_text_layer", "n_mels"),
)
# name → (ggml's file type, ggml's tensor type of matrices)
FORMATS = {
    "f16": (1, 1),
    "q8_0": (2007, 8),
    "q5_0": (2008, 6),
    "q5_1": (2009, 7),
    "q4_0": (2002, 2),
    "q4_1": (2003, 3),
}
IN_FLOAT32 = {"encoder.positional_embedding", "decoder.positional_embedding"}
COLUMNS = {"encoder.conv1.bias", "encoder.conv2.bias"}  # (channels, 1): broadcast over time


def is_ggml(path: Path) -> bool:
    """True if a file begins with ggml's magic number."""
    with path.open("rb") as file:
        return file.read(4) == struct.pack("<i", MAGIC)


def read(path: Path) -> Checkpoint:
    """Read a checkpoint from a ggml file. Quantised weights are converted to floats."""
    with reading(path, "whisper.cpp's layout"), path.open("rb") as file:
        n_file = os.fstat(file.fileno()).st_size
        name = "header"  # the last name read, for errors

        def read_bytes(n: int) -> bytes:
            end = file.tell() + n
            if n < 0 or end > n_file:
                raise CheckpointError(f"expected {end} bytes at {brief(name)}, got {n_file}")
            return file.read(n)

        def numbers(n: int) -> tuple[int, ...]:
            return struct.unpack(f"<{n}i", read_bytes(4 * n))

        _, *sizes, _ = numbers(2 + len(DIMENSIONS))
        dims = ModelDimensions.of(dict(zip(DIMENSIONS, sizes, strict=True)))
        name = "Mel filters"
        read_bytes(4 * prod(numbers(2)))
        name = "vocabulary"
        for _ in range(numbers(1)[0]):
            read_bytes(numbers(1)[0])
        weights = {}
        while file.tell() < n_file:
            name = "next weight"
            rank, n_name, tensor_type = numbers(3)
            if not 1 <= rank <= MAX_RANK:
                raise CheckpointError(f"rank must be 1..{MAX_RANK}, got {rank}")
            shape = numbers(rank)[::-1]
            name = read_bytes(n_name).decode()
            data = read_bytes(_n_bytes(shape, tensor_type))
            weights[name] = _dequantize(data, shape, tensor_type)
        for name in COLUMNS & set(weights):
            weights[name] = weights[name].flatten()
        return Checkpoint(dims, weights)


def _n_bytes(shape: tuple[int, ...], tensor_type: int) -> int:
    """The size of a tensor's data. Each row is in blocks of its own."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    n_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor_type)]
    if min(shape) < 1 or shape[-1] % n_block:
        raise CheckpointError(f"rows must be multiples of {n_block}, got {brief(shape)}")
    return prod(shape) // n_block * block_bytes


def _dequantize(data: bytes, shape: tuple[int, ...], tensor_type: int) -> torch.Tensor:
    from gguf.quants import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor_type)
    if kind == GGMLQuantizationType.F16:  # as it is: float32 would take twice the memory
        return torch.frombuffer(bytearray(data), dtype=torch.float16).view(shape)
    rows = np.frombuffer(bytearray(data), np.uint8).reshape(*shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, kind)).view(shape)


def write(file: BinaryIO, checkpoint: Checkpoint, weight_format: str) -> None:
    """Write a checkpoint in whisper.cpp's format.

    Vectors and positional embeddings are float32, convolutions float16, matrices in weight_format.
    """
    from gguf.quants import GGMLQuantizationType, quantize

    dims = checkpoint.dims
    file_type, matrix_type = FORMATS[weight_format]
    numbers = [getattr(dims, name) for name in DIMENSIONS]
    file.write(struct.pack("<12i", MAGIC, *numbers, file_type))
    with np.load(assets.path("mel_filters.npz")) as filters:
        bank = filters[f"mel_{dims.n_mels}"].astype("<f4")
    file.write(struct.pack("<2i", *bank.shape) + bank.tobytes())
    words = get_tokenizer(dims.is_multilingual).vocabulary.text
    file.write(struct.pack("<i", len(words)))
    for word in words:
        file.write(struct.pack("<i", len(word)) + word)
    for name, weight in checkpoint.weights.items():
        values = weight.float().numpy()
        if values.ndim == 1 or name in IN_FLOAT32:
            tensor_type = 0
        else:
            tensor_type = matrix_type if values.ndim == 2 else 1
        if name in COLUMNS:
            values = values[:, None]
        encoded = name.encode()
        file.write(struct.pack("<3i", values.ndim, len(encoded), tensor_type))
        file.write(struct.pack(f"<{values.ndim}i", *reversed(values.shape)) + encoded)
        file.write(quantize(values, GGMLQuantizationType(tensor_type)).tobytes())
