"""Write whisper.cpp's weight files (ggml)."""

import struct
from typing import BinaryIO

import numpy as np

from asrmask import assets
from asrmask.checkpoints.checkpoint import Checkpoint
from asrmask.tokenizer.tokenizer import get_tokenizer

# name → (ggml's file type, ggml's tensor type)
FORMS = {"f16": (1, 1), "q8_0": (2007, 8), "q5_0": (2008, 6)}
MAGIC = 0x67676D6C
BLOCK = 32  # weights that share a scale
IN_FLOAT32 = {"encoder.positional_embedding", "decoder.positional_embedding"}


def write(file: BinaryIO, checkpoint: Checkpoint, form: str) -> None:
    """Write a checkpoint in whisper.cpp's format.

    The file holds a magic number and eleven int32; the Mel filters; the vocabulary's bytes; then
    each weight: int32 rank, length of its name, type, dimensions from last to first, name, data.
    Vectors and positional embeddings are float32, convolutions float16, matrices are in `form`.
    """
    dims = checkpoint.dims
    file_type, matrix_type = FORMS[form]
    names = (
        *("n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer"),
        *("n_text_ctx", "n_text_state", "n_text_head", "n_text_layer", "n_mels"),
    )
    file.write(struct.pack("<12i", MAGIC, *(getattr(dims, n) for n in names), file_type))
    with np.load(assets.path("mel_filters.npz")) as filters:
        bank = filters[f"mel_{dims.n_mels}"].astype("<f4")
    file.write(struct.pack("<2i", *bank.shape) + bank.tobytes())
    words = get_tokenizer(dims.is_multilingual).vocabulary.text
    file.write(struct.pack("<i", len(words)))
    for word in words:
        file.write(struct.pack("<i", len(word)) + word)
    for name, weight in checkpoint.weights.items():
        values = weight.float().numpy()
        if name in {"encoder.conv1.bias", "encoder.conv2.bias"}:
            values = values[:, None]  # broadcasts over (channels, time)
        kind = 0 if values.ndim == 1 or name in IN_FLOAT32 or ".bias" in name else 1
        if kind == 1 and values.ndim == 2:
            kind = matrix_type
        encoded = name.encode()
        file.write(struct.pack("<3i", values.ndim, len(encoded), kind))
        file.write(struct.pack(f"<{values.ndim}i", *reversed(values.shape)) + encoded)
        file.write(ENCODERS[kind](values))


def _q8_0(values: np.ndarray) -> bytes:
    """Quantise to blocks of a float16 scale and 32 int8."""
    blocks = values.reshape(-1, BLOCK)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    out = np.empty(len(blocks), dtype=[("scale", "<f2"), ("numbers", "i1", BLOCK)])
    out["scale"] = scales[:, 0]
    out["numbers"] = np.round(np.divide(blocks, scales, where=scales > 0, out=blocks * 0))
    return out.tobytes()


def _q5_0(values: np.ndarray) -> bytes:
    """Quantise to blocks of a float16 scale, 32 high bits and 32 × 4 low bits; 16 stands for 0."""
    blocks = values.reshape(-1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scales = largest / -16  # the value of largest magnitude is stored as 0, its negative as 31
    numbers = np.divide(blocks, scales, where=scales != 0, out=blocks * 0)
    numbers = np.clip(np.trunc(numbers + 16.5), 0, 31).astype(np.uint32)
    out = np.empty(
        len(blocks), dtype=[("scale", "<f2"), ("high", "<u4"), ("low", "u1", BLOCK // 2)]
    )
    out["scale"] = scales[:, 0]
    out["high"] = ((numbers >> 4) << np.arange(BLOCK, dtype=np.uint32)).sum(axis=1)
    low = numbers & 15
    out["low"] = low[:, : BLOCK // 2] | (low[:, BLOCK // 2 :] << 4)
    return out.tobytes()


ENCODERS = {
    0: lambda values: values.astype("<f4").tobytes(),
    1: lambda values: values.astype("<f2").tobytes(),
    8: _q8_0,
    6: _q5_0,
}
