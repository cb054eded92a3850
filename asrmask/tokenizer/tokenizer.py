"""Convert text to token ids and back."""

import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from asrmask.errors import OptionError
from asrmask.tokenizer.languages import LANGUAGES, UNSPACED, language_code
from asrmask.tokenizer.vocabulary import Vocabulary, vocabulary


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
            found = sorted(t for t in self.vocabulary.specials if t in text)
            raise OptionError(
                f"text must not spell special tokens, got {', '.join(found)}"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Decode to text without timestamps. Other special tokens appear as text."""
        return self.vocabulary.spelled(i for i in ids if i < self.timestamp_begin)

    def decode_with_timestamps(self, ids: Sequence[int]) -> str:
        return self.vocabulary.spelled(ids)

    def special(self, name: str) -> int:
        """Return the id of a special token, given its name without "<|" and "|>"."""
        return self.vocabulary.specials[f"<|{name}|>"]

    @cached_property
    def eot(self) -> int:
        return self.special("endoftext")

    @cached_property
    def sot(self) -> int:
        return self.special("startoftranscript")

    @cached_property
    def sot_prev(self) -> int:
        return self.special("startofprev")

    @cached_property
    def sot_lm(self) -> int:
        return self.special("startoflm")

    @cached_property
    def transcribe(self) -> int:
        return self.special("transcribe")

    @cached_property
    def translate(self) -> int:
        return self.special("translate")

    @cached_property
    def no_speech(self) -> int:
        return self.special("nospeech")

    @cached_property
    def no_timestamps(self) -> int:
        return self.special("notimestamps")

    @cached_property
    def timestamp_begin(self) -> int:
        return self.special("0.00")

    @cached_property
    def sot_sequence(self) -> tuple[int, ...]:
        """The start-of-transcript token, and in multilingual models the language and task."""
        tokens = [self.sot]
        if self.language is not None:
            tokens.append(self.special(self.language))
        if self.task is not None:
            tokens.append(self.transcribe if self.task == "transcribe" else self.translate)
        return tuple(tokens)

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
        symbols = [
            *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
            *"<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split(),  # noqa: SIM905
        ]
        known = {token: i for i, token in enumerate(self.vocabulary.tokens)}
        # "-" and "'" are allowed within a word, but not at its start
        spellings = [b" -", b" '"]
        for symbol in symbols:
            spellings += [symbol.encode(), b" " + symbol.encode()]
        found = {known[one] for one in spellings if one in known}
        for note in "♩♪♫♬♭♮♯":  # the first token of each starts only symbols, U+2640 to U+267F
            for spelled in (note.encode(), b" " + note.encode()):
                beginnings = (spelled[:n] for n in range(len(spelled), 0, -1))
                found.add(next(known[one] for one in beginnings if one in known))
        return tuple(sorted(found))

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
        whole = self.decode_with_timestamps(tokens)
        texts: list[str] = []
        groups: list[list[int]] = []
        group: list[int] = []
        offset = 0
        for token in tokens:
            group.append(token)
            text = self.decode_with_timestamps(group)
            broken = text.find("\ufffd")
            # U+FFFD that is also in the full text is part of it. Several in a row may be a single
            # one in the full text, so `at` may be past its end (an error in openai-whisper).
            at = offset + broken
            if broken < 0 or at >= len(whole) or whole[at] == "\ufffd":
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
    known = vocabulary("multilingual", num_languages)
    return Tokenizer(known, num_languages, language or "en", task or "transcribe")
