"""CTranslate2's folder of weights, from a checkpoint of any kind.

What checkpoints/ctranslate2.py reads, written: model.bin, with queries, keys and values in one
matrix, and beside it the vocabulary and a tokenizer as faster-whisper wants them.
"""

import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from asrmask.checkpoints.checkpoint import Checkpoint
from asrmask.files import replacing
from asrmask.tokenizer import Tokenizer, get_tokenizer

VERSION, SPEC, REVISION = 6, "WhisperSpec", 3
TYPES = {"<f4": 0, "|i1": 1, "<i2": 2, "<f2": 4}
GELU = 3


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the folder of a checkpoint; model.bin comes last, so that it is there when all is."""
    dims = checkpoint.dims
    multilingual = dims.n_vocab >= 51_865
    n_languages = dims.n_vocab - 51_765 - int(multilingual)
    tokenizer = get_tokenizer(multilingual, num_languages=n_languages)
    special = list(tokenizer.vocabulary.specials)
    words = [printable(word) for word in plain(tokenizer)]
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
        with replacing(folder / name) as file:
            json.dump(content, file, ensure_ascii=False)
    write_tokenizer(folder / "tokenizer.json", tokenizer, special)
    with replacing(folder / "model.bin", binary=True) as file:
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
    file.write(struct.pack("<I", 1))  # the projection to the vocabulary is the embedding
    file.write(text("decoder/projection/weight") + text("decoder/embeddings/weight"))


def variables(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values as CTranslate2 has them: float16 where that loses nothing."""
    dims, weights = checkpoint.dims, checkpoint.weights

    def array(name: str) -> np.ndarray:
        return np.ascontiguousarray(weights[name].float().numpy())

    def floats(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
        with np.errstate(over="ignore"):
            half = values.astype("<f2")
        return name, half if np.array_equal(half.astype("<f4"), values) else values

    def linear(theirs: str, *ours: str) -> Iterator[tuple[str, np.ndarray]]:
        yield floats(f"{theirs}/weight", np.concatenate([array(f"{n}.weight") for n in ours]))
        biases = [
            # keys have none: the softmax would not see it
            np.zeros(len(array(f"{n}.weight")), np.float32)
            if n.endswith(".key")
            else array(f"{n}.bias")
            for n in ours
        ]
        yield floats(f"{theirs}/bias", np.concatenate(biases))

    def norm(theirs: str, ours: str) -> Iterator[tuple[str, np.ndarray]]:
        yield floats(f"{theirs}/gamma", array(f"{ours}.weight"))
        yield floats(f"{theirs}/beta", array(f"{ours}.bias"))

    for part, n_layer in (("encoder", dims.n_audio_layer), ("decoder", dims.n_text_layer)):
        for i in range(n_layer):
            ours, theirs = f"{part}.blocks.{i}", f"{part}/layer_{i}"
            own = [f"{ours}.attn.{name}" for name in ("query", "key", "value")]
            yield from linear(f"{theirs}/self_attention/linear_0", *own)
            yield from linear(f"{theirs}/self_attention/linear_1", f"{ours}.attn.out")
            yield from norm(f"{theirs}/self_attention/layer_norm", f"{ours}.attn_ln")
            if part == "decoder":
                cross = f"{ours}.cross_attn"
                yield from linear(f"{theirs}/attention/linear_0", f"{cross}.query")
                yield from linear(f"{theirs}/attention/linear_1", f"{cross}.key", f"{cross}.value")
                yield from linear(f"{theirs}/attention/linear_2", f"{cross}.out")
                yield from norm(f"{theirs}/attention/layer_norm", f"{ours}.cross_attn_ln")
            yield from linear(f"{theirs}/ffn/linear_0", f"{ours}.mlp.0")
            yield from linear(f"{theirs}/ffn/linear_1", f"{ours}.mlp.2")
            yield from norm(f"{theirs}/ffn/layer_norm", f"{ours}.mlp_ln")
    yield from linear("encoder/conv1", "encoder.conv1")
    yield from linear("encoder/conv2", "encoder.conv2")
    yield from norm("encoder/layer_norm", "encoder.ln_post")
    yield from norm("decoder/layer_norm", "decoder.ln")
    for part in ("encoder", "decoder"):
        name = f"{part}.positional_embedding"
        yield floats(f"{part}/position_encodings/encodings", array(name))
    yield floats("decoder/embeddings/weight", array("decoder.token_embedding.weight"))
    yield "encoder/num_heads", np.array(dims.n_audio_head, "<i2")
    yield "decoder/num_heads", np.array(dims.n_text_head, "<i2")
    yield "decoder/activation", np.array(GELU, "i1")
    yield "decoder/pre_norm", np.array(1, "i1")
    for name in ("alibi", "scale_embeddings", "start_from_zero_embedding"):
        yield f"decoder/{name}", np.array(0, "i1")
    yield "decoder/alignment_heads", np.array(1, "<i2")
    yield "decoder/alignment_layer", np.array(-1, "<i2")


# ---------------------------------------------------------------- vocabulary


def plain(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of every word of the vocabulary, in order, without the special tokens."""
    return list(tokenizer.vocabulary.tokens[: tokenizer.eot])


def printable(word: bytes) -> str:
    """Bytes as the letters that vocabulary files write for them: a space is Ġ.

    >>> printable(b" t"), printable(b"\\n")
    ('Ġt', 'Ċ')
    """
    return "".join(LETTERS[byte] for byte in word)


def _letters() -> list[str]:
    """A visible letter for each byte: itself where it is one, otherwise the next beyond a byte."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(0x100)]


LETTERS = _letters()


def merges(words: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """The two parts that each word of several bytes is put together from, in order.

    A vocabulary says only which words there are; a word's parts are what is left when those before
    it have been put together.
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
    """A tokenizer.json with the same tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    words = plain(tokenizer)
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab={printable(word): i for i, word in enumerate(words)},
            merges=[(printable(a), printable(b)) for a, b in merges(words)],
        )
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([name for name in special if not name[2:3].isdigit()])  # no times
    with replacing(path) as file:
        file.write(made.to_str())
