"""Write a vocabulary as Hugging Face's tokenizer.json."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from asrmask.files import atomic_write
from asrmask.tokenizer.tokenizer import Vocabulary

# GPT-2's printable character for each byte: itself if printable, else the next from U+0100 on
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
BYTE_TO_CHARACTER = {byte: chr(byte) for byte in _PRINTABLE}
BYTE_TO_CHARACTER |= {byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)}


def printable(token: bytes) -> str:
    """Encode bytes as the printable characters used in GPT-2's vocabulary files: a space is Ġ.

    >>> printable(b" t"), printable(b"\\n")
    ('Ġt', 'Ċ')
    """
    return "".join(BYTE_TO_CHARACTER[byte] for byte in token)


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
            at = joined.index(min(joined))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def write(path: Path, vocabulary: Vocabulary) -> None:
    """Write a tokenizer.json that gives the same tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    words = vocabulary.text
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={printable(word): i for i, word in enumerate(words)},
            merges=[(printable(a), printable(b)) for a, b in merges(words)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # all but timestamps
    tokenizer.add_special_tokens([s for s in vocabulary.specials if not s[2:3].isdigit()])
    with atomic_write(path) as file:
        file.write(tokenizer.to_str())
