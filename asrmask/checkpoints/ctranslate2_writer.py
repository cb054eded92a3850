"""Write CTranslate2 folders that ctranslate2.py can read.

Besides model.bin they contain the vocabulary and tokenizer that faster-whisper needs.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from asrmask.checkpoints.checkpoint import Checkpoint
from asrmask.checkpoints.ctranslate2 import (
    PROJECTION,
    SPEC,
    TABLES,
    VERSION,
    has_bias,
    modules,
    parameters,
)
from asrmask.files import atomic_write
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer

REVISION = 3
TYPES = {"<f4": 0, "|i1": 1, "<i2": 2, "<f2": 4}
GELU = 3


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a folder. model.bin is written last, so if it exists, the rest does."""
    dims = checkpoint.dims
    tokenizer = get_tokenizer(dims.is_multilingual, num_languages=dims.num_languages)
    special = list(tokenizer.vocabulary.specials)
    words = [printable(word) for word in tokenizer.vocabulary.text]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "alignment_heads": [list(pair) for pair in checkpoint.alignment_heads or []],
        "lang_ids": list(tokenizer.language_tokens.values()),
        "suppress_ids": list(tokenizer.non_speech_tokens),
        "suppress_ids_begin": [tokenizer.blank, tokenizer.eot],
    }
    for name, content in (
        ("config.json", config),
        ("preprocessor_config.json", {"feature_size": dims.n_mels}),
        ("vocabulary.json", words + special),
    ):
        with atomic_write(folder / name) as file:
            json.dump(content, file, ensure_ascii=False)
    write_tokenizer(folder / "tokenizer.json", tokenizer, special)
    with atomic_write(folder / "model.bin", binary=True) as file:
        write_model(file, checkpoint)


def write_model(file: BinaryIO, checkpoint: Checkpoint) -> None:
    def text(value: str) -> bytes:
        encoded = value.encode() + b"\0"
        return struct.pack("<H", len(encoded)) + encoded

    found = dict(variables(checkpoint))
    file.write(struct.pack("<I", VERSION) + text(SPEC) + struct.pack("<2I", REVISION, len(found)))
    for name, values in found.items():
        file.write(text(name) + struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape))
        file.write(struct.pack("<BI", TYPES[values.dtype.str], values.nbytes) + values.tobytes())
    file.write(struct.pack("<I", 1) + text(PROJECTION) + text("decoder/embeddings/weight"))


def variables(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """Yield CTranslate2's names and values, in float16 if that is lossless."""
    dims, weights = checkpoint.dims, checkpoint.weights

    def array(name: str) -> np.ndarray:
        return np.ascontiguousarray(weights[name].float().numpy())

    def bias(name: str) -> np.ndarray:
        if has_bias(name):
            return array(f"{name}.bias")
        return np.zeros(len(weights[f"{name}.weight"]), np.float32)

    for theirs, ours in modules(dims):
        weight_name, bias_name = parameters(theirs)
        yield weight_name, _halved(np.concatenate([array(f"{name}.weight") for name in ours]))
        yield bias_name, _halved(np.concatenate([bias(name) for name in ours]))
    for theirs, name in TABLES.items():
        yield theirs, _halved(array(name))
    yield "encoder/num_heads", np.array(dims.n_audio_head, "<i2")
    yield "decoder/num_heads", np.array(dims.n_text_head, "<i2")
    yield "decoder/activation", np.array(GELU, "i1")
    yield "decoder/pre_norm", np.array(1, "i1")
    for name in ("alibi", "scale_embeddings", "start_from_zero_embedding"):
        yield f"decoder/{name}", np.array(0, "i1")
    yield "decoder/alignment_heads", np.array(1, "<i2")
    yield "decoder/alignment_layer", np.array(-1, "<i2")


def _halved(values: np.ndarray) -> np.ndarray:
    """Convert to float16 if that is lossless."""
    with np.errstate(over="ignore"):
        half = values.astype("<f2")
    return half if np.array_equal(half.astype("<f4"), values) else values


# ---------------------------------------------------------------- vocabulary


def printable(word: bytes) -> str:
    """Encode bytes as the printable characters used in GPT-2's vocabulary files: a space is Ġ.

    >>> printable(b" t"), printable(b"\\n")
    ('Ġt', 'Ċ')
    """
    return "".join(LETTERS[byte] for byte in word)


def _letters() -> list[str]:
    """A printable character per byte: itself if printable, else the next from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(0x100)]


LETTERS = _letters()


def merges(words: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Recover the BPE merges from a vocabulary: the two parts of each multi-byte word, in order.

    A vocabulary lists only the words. Applying all merges of lower rank to a word's bytes leaves
    its two parts.
    """
    ranks = {word: i for i, word in enumerate(words)}
    for rank, word in enumerate(words):
        parts = [word[i : i + 1] for i in range(len(word))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            at = min(range(len(joined)), key=joined.__getitem__)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def write_tokenizer(path: Path, tokenizer: Tokenizer, special: list[str]) -> None:
    """Write a tokenizer.json with the same tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    words = tokenizer.vocabulary.text
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab={printable(word): i for i, word in enumerate(words)},
            merges=[(printable(a), printable(b)) for a, b in merges(words)],
        )
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    # all but timestamps
    made.add_special_tokens([name for name in special if not name[2:3].isdigit()])
    with atomic_write(path) as file:
        file.write(made.to_str())
