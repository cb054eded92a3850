"""Convert text to token ids and back."""

import string
from binascii import a2b_base64
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from asrmask import assets
from asrmask.errors import OptionError
from asrmask.tokenizer.languages import LANGUAGES, UNSPACED, language_code

if TYPE_CHECKING:
    import tiktoken

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


@cache
def vocabulary(name: str, n_languages: int) -> Vocabulary:
    """Load openai-whisper's vocabulary file of that name and add the special tokens."""
    lines = assets.path(f"{name}.tiktoken").read_bytes().splitlines()
    tokens = [a2b_base64(line.split()[0]) for line in lines if line]  # in the order of ids
    specials = [
        *("endoftext", "startoftranscript"),
        *list(LANGUAGES)[:n_languages],
        *("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"),
        *(f"{0.02 * i:.2f}" for i in range(N_TIMESTAMPS)),
    ]
    ids = {f"<|{special}|>": len(tokens) + i for i, special in enumerate(specials)}
    return Vocabulary(name, (*tokens, *(special.encode() for special in ids)), ids)


def _special(name: str) -> "cached_property[int]":
    """A property of Tokenizer: the id of a special token."""
    return cached_property(lambda tokenizer: tokenizer.special(name))


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary with the language and task that define the start-of-transcript sequence."""

    vocabulary: Vocabulary
    n_languages: int
    language: str | None = None  # None: an English-only model, which has no language tokens
    task: str | None = None

    def encode(self, text: str) -> list[int]:
        try:
            return self.vocabulary.encoding.encode(text)
        except ValueError:
            specials = ", ".join(sorted(t for t in self.vocabulary.specials if t in text))
            raise OptionError(f"text must not spell special tokens, got {specials}") from None

    def decode(self, ids: Iterable[int]) -> str:
        """Decode to text without timestamps. Other special tokens appear as text."""
        return self.decode_with_timestamps(i for i in ids if i < self.timestamp_begin)

    def decode_with_timestamps(self, ids: Iterable[int]) -> str:
        """Decode all tokens. Incomplete characters become U+FFFD."""
        return b"".join(map(self.vocabulary.tokens.__getitem__, ids)).decode(errors="replace")

    def special(self, name: str) -> int:
        """Return the id of a special token, given its name without "<|" and "|>"."""
        return self.vocabulary.specials[f"<|{name}|>"]

    eot = _special("endoftext")
    sot = _special("startoftranscript")
    sot_prev = _special("startofprev")
    sot_lm = _special("startoflm")
    transcribe = _special("transcribe")
    translate = _special("translate")
    no_speech = _special("nospeech")
    no_timestamps = _special("notimestamps")
    timestamp_begin = _special("0.00")

    @cached_property
    def sot_sequence(self) -> tuple[int, ...]:
        """The start-of-transcript token, and in multilingual models the language and task."""
        if self.language is None:
            return (self.sot,)
        task = self.transcribe if self.task == "transcribe" else self.translate
        return self.sot, self.special(self.language), task

    @cached_property
    def language_tokens(self) -> dict[str, int]:
        """Language code → token id, in the order of the ids."""
        return {code: self.special(code) for code in list(LANGUAGES)[: self.n_languages]}

    @property
    def all_language_codes(self) -> tuple[str, ...]:
        return tuple(self.language_tokens)

    @property
    def all_language_tokens(self) -> tuple[int, ...]:
        return tuple(self.language_tokens.values())

    @cached_property
    def blank(self) -> int:
        """The token id of a single space."""
        return self.vocabulary.tokens.index(b" ")

    @cached_property
    def non_speech_tokens(self) -> tuple[int, ...]:
        """Tokens that are not spoken, such as ♪ and [, for sounds and annotations."""
        ids = {token: i for i, token in enumerate(self.vocabulary.tokens)}
        symbols = [
            *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
            *"<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split(),  # noqa: SIM905
        ]
        # "-" and "'" are allowed within a word, but not at its start
        spellings = [" -", " '", *symbols, *(f" {symbol}" for symbol in symbols)]
        tokens = {ids[s.encode()] for s in spellings if s.encode() in ids}
        notes = "♩♪♫♬♭♮♯"  # the first token of each starts only symbols, U+2640 to U+267F
        for note in (*notes, *(f" {note}" for note in notes)):
            prefixes = (note.encode()[:n] for n in (4, 3, 2, 1))
            tokens.add(next(ids[prefix] for prefix in prefixes if prefix in ids))
        return tuple(sorted(tokens))

    def split_to_word_tokens(self, tokens: list[int]) -> tuple[list[str], list[list[int]]]:
        """Split into words and their tokens; into characters in languages without spaces."""
        if self.language in UNSPACED:
            return self.split_tokens_on_unicode(tokens)
        return self.split_tokens_on_spaces(tokens)

    def split_tokens_on_spaces(self, tokens: list[int]) -> tuple[list[str], list[list[int]]]:
        """Split at spaces and punctuation into words and their tokens."""
        words: list[str] = []
        groups: list[list[int]] = []
        for text, group in zip(*self.split_tokens_on_unicode(tokens), strict=True):
            starts = group[0] >= self.eot or text.startswith(" ")
            if starts or text.strip() in string.punctuation or not words:
                words.append(text)
                groups.append(group)
            else:
                words[-1] += text
                groups[-1] = groups[-1] + group
        return words, groups

    def split_tokens_on_unicode(self, tokens: list[int]) -> tuple[list[str], list[list[int]]]:
        """Split into the shortest token groups that decode to complete characters.

        A character may need several tokens. Returns the texts and the groups.
        """
        full_text = self.decode_with_timestamps(tokens)
        texts: list[str] = []
        groups: list[list[int]] = []
        group: list[int] = []
        offset = 0
        for token in tokens:
            group.append(token)
            text = self.decode_with_timestamps(group)
            # U+FFFD that is also in the full text is part of it. Several in a row may be a single
            # one in the full text, so `at` may be past its end (an error in openai-whisper).
            at = offset + text.find("\ufffd")
            if at < offset or full_text[at : at + 1] in {"", "\ufffd"}:
                texts.append(text)
                groups.append(group)
                offset += len(text)
                group = []
        return texts, groups


@cache
def get_tokenizer(
    multilingual: bool,
    *,
    num_languages: int = 99,
    language: str | None = None,
    task: str | None = None,
) -> Tokenizer:
    """Return the tokenizer of an English-only or multilingual model."""
    if language is not None:
        language = language_code(language)
    if task not in {None, "transcribe", "translate", "lang_id"}:
        raise OptionError(f"task must be transcribe or translate, got {task}")
    if not multilingual:
        return Tokenizer(vocabulary("gpt2", num_languages), num_languages)
    if language == "yue" and num_languages < len(LANGUAGES):
        raise OptionError("language yue needs a model of 100 languages (large-v3, turbo), got 99")
    multilingual_vocabulary = vocabulary("multilingual", num_languages)
    return Tokenizer(multilingual_vocabulary, num_languages, language or "en", task or "transcribe")
