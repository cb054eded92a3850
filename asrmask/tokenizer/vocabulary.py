"""The vocabulary: the bytes of each token."""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from asrmask import assets

if TYPE_CHECKING:
    import tiktoken
from asrmask.tokenizer.languages import LANGUAGES

N_TIMESTAMPS = 1501  # 0.00 to 30.00 s in steps of 0.02 s


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of an English-only or multilingual model, in the order of their ids.

    Decoding needs only this table. Encoding needs tiktoken, which takes ten times the memory, so it
    is loaded on first use.
    """

    name: str
    tokens: tuple[bytes, ...]
    specials: dict[str, int]  # special token → id; these ids follow those of text tokens

    @cached_property
    def encoding(self) -> "tiktoken.Encoding":
        import tiktoken

        return tiktoken.Encoding(
            name=self.name,
            # GPT-2's pre-tokenization pattern
            pat_str=r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            mergeable_ranks={token: i for i, token in enumerate(self.text)},
            special_tokens=self.specials,
        )

    @property
    def text(self) -> tuple[bytes, ...]:
        """The text tokens: all but the special ones."""
        return self.tokens[: len(self.tokens) - len(self.specials)]

    def spelled(self, ids: Iterable[int]) -> str:
        """Decode tokens, including special ones. Incomplete characters become U+FFFD."""
        return b"".join(map(self.tokens.__getitem__, ids)).decode(errors="replace")


@cache
def vocabulary(name: str, n_languages: int) -> Vocabulary:
    """Load openai-whisper's vocabulary file of that name and add the special tokens."""
    lines = assets.path(f"{name}.tiktoken").read_bytes().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines if line]  # in the order of ids
    specials = [
        "<|endoftext|>",
        "<|startoftranscript|>",
        *(f"<|{code}|>" for code in list(LANGUAGES)[:n_languages]),
        "<|translate|>",
        "<|transcribe|>",
        "<|startoflm|>",
        "<|startofprev|>",
        "<|nospeech|>",
        "<|notimestamps|>",
        *(f"<|{0.02 * i:.2f}|>" for i in range(N_TIMESTAMPS)),
    ]
    ids = {special: len(tokens) + i for i, special in enumerate(specials)}
    return Vocabulary(name, (*tokens, *(special.encode() for special in specials)), ids)
