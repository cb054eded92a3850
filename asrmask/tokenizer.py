"""Text ↔ token ids: vocabulary, special tokens, languages."""

import base64
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from asrmask import assets
from asrmask.errors import OptionError

if TYPE_CHECKING:
    import tiktoken

# in the order of their tokens; each has one, "yue" only in models of 51,866 tokens
LANGUAGES = dict(
    pair.split(":")
    for pair in (  # noqa: SIM905
        "en:english zh:chinese de:german es:spanish ru:russian ko:korean fr:french ja:japanese "
        "pt:portuguese tr:turkish pl:polish ca:catalan nl:dutch ar:arabic sv:swedish it:italian "
        "id:indonesian hi:hindi fi:finnish vi:vietnamese he:hebrew uk:ukrainian el:greek ms:malay "
        "cs:czech ro:romanian da:danish hu:hungarian ta:tamil no:norwegian th:thai ur:urdu "
        "hr:croatian bg:bulgarian lt:lithuanian la:latin mi:maori ml:malayalam cy:welsh sk:slovak "
        "te:telugu fa:persian lv:latvian bn:bengali sr:serbian az:azerbaijani sl:slovenian "
        "kn:kannada et:estonian mk:macedonian br:breton eu:basque is:icelandic hy:armenian "
        "ne:nepali mn:mongolian bs:bosnian kk:kazakh sq:albanian sw:swahili gl:galician mr:marathi "
        "pa:punjabi si:sinhala km:khmer sn:shona yo:yoruba so:somali af:afrikaans oc:occitan "
        "ka:georgian be:belarusian tg:tajik sd:sindhi gu:gujarati am:amharic yi:yiddish lo:lao "
        "uz:uzbek fo:faroese ht:haitian_creole ps:pashto tk:turkmen nn:nynorsk mt:maltese "
        "sa:sanskrit lb:luxembourgish my:myanmar bo:tibetan tl:tagalog mg:malagasy as:assamese "
        "tt:tatar haw:hawaiian ln:lingala ha:hausa ba:bashkir jw:javanese su:sundanese "
        "yue:cantonese"
    ).split()
)
LANGUAGES["ht"] = "haitian creole"

# other names that people use
ALIASES = {
    "burmese": "my",
    "castilian": "es",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "mandarin": "zh",
    "moldavian": "ro",
    "moldovan": "ro",
    "panjabi": "pa",
    "pushto": "ps",
    "sinhalese": "si",
    "valencian": "ca",
}
TO_LANGUAGE_CODE = {name: code for code, name in LANGUAGES.items()} | ALIASES

# written without spaces between words
UNSPACED = {"zh", "ja", "th", "lo", "my", "yue"}
N_TIMESTAMPS = 1501  # 0.00 to 30.00 s in steps of 0.02 s


def language_code(language: str) -> str:
    """The code of a language given by code or English name, in any case."""
    name = language.lower()
    code = name if name in LANGUAGES else TO_LANGUAGE_CODE.get(name)
    if code is None:
        raise OptionError(
            f"language must be a code or a name that Whisper knows (en, English, …), got {language}"
        )
    return code


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a kind of model, in the order of their ids.

    Reading a text's tokens needs no more than this table. Cutting a text into tokens is tiktoken's
    work, which takes ten times the memory, so it is loaded when there is a text to cut.
    """

    name: str
    tokens: tuple[bytes, ...]
    specials: dict[str, int]  # those behind the tokens of text

    @cached_property
    def encoding(self) -> "tiktoken.Encoding":
        import tiktoken

        return tiktoken.Encoding(
            name=self.name,
            # GPT-2's rule for cutting text before the merges
            pat_str=r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            mergeable_ranks={token: i for i, token in enumerate(self.tokens[: self.n_text])},
            special_tokens=self.specials,
        )

    @property
    def n_text(self) -> int:
        return len(self.tokens) - len(self.specials)

    def spelled(self, ids: Iterable[int]) -> str:
        """The text of tokens, special ones too; what is no whole character becomes U+FFFD."""
        return b"".join(map(self.tokens.__getitem__, ids)).decode(errors="replace")


@cache
def vocabulary(name: str, n_languages: int) -> Vocabulary:
    """The vocabulary in openai-whisper's file of that name, and the special tokens."""
    lines = assets.path(f"{name}.tiktoken").read_bytes().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines if line]  # in order
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


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary, and the tokens that open a transcript in its language and task."""

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
        """Text without its timestamps; other special tokens are spelled out."""
        return self.vocabulary.spelled(i for i in ids if i < self.timestamp_begin)

    def decode_with_timestamps(self, ids: Sequence[int]) -> str:
        return self.vocabulary.spelled(ids)

    def special(self, name: str) -> int:
        """The id of a special token, by its name without the brackets."""
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
        """Start of transcript, and in multilingual models the language and the task."""
        tokens = [self.sot]
        if self.language is not None:
            tokens.append(self.special(self.language))
        if self.task is not None:
            tokens.append(self.transcribe if self.task == "transcribe" else self.translate)
        return tuple(tokens)

    @cached_property
    def language_tokens(self) -> dict[str, int]:
        """Language code → token, in the order of the tokens."""
        return {code: self.special(code) for code in list(LANGUAGES)[: self.n_languages]}

    @property
    def all_language_codes(self) -> tuple[str, ...]:
        return tuple(self.language_tokens)

    @property
    def all_language_tokens(self) -> tuple[int, ...]:
        return tuple(self.language_tokens.values())

    @cached_property
    def blank(self) -> int:
        """The token of a single space."""
        return self.vocabulary.tokens.index(b" ")

    @cached_property
    def non_speech_tokens(self) -> tuple[int, ...]:
        """Tokens of sounds and annotations, like ♪ and [, that nobody speaks."""
        symbols = [
            *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
            *"<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split(),  # noqa: SIM905
        ]
        known = {token: i for i, token in enumerate(self.vocabulary.tokens)}
        # "-" and "'" are fine within a word, not at its beginning
        spellings = [b" -", b" '"]
        for symbol in symbols:
            spellings += [symbol.encode(), b" " + symbol.encode()]
        found = {known[one] for one in spellings if one in known}
        for note in "♩♪♫♬♭♮♯":  # of several tokens; the first is theirs alone
            for spelled in (note.encode(), b" " + note.encode()):
                beginnings = (spelled[:n] for n in range(len(spelled), 0, -1))
                found.add(next(known[one] for one in beginnings if one in known))
        return tuple(sorted(found))

    def split_to_word_tokens(self, tokens: list[int]) -> tuple[list[str], list[list[int]]]:
        """Words and the tokens of each; single characters in languages without spaces."""
        if self.language in UNSPACED:
            return self.split_tokens_on_unicode(tokens)
        return self.split_tokens_on_spaces(tokens)

    def split_tokens_on_spaces(self, tokens: list[int]) -> tuple[list[str], list[list[int]]]:
        """Words that begin at spaces and punctuation, and the tokens of each."""
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
        """The shortest runs of tokens that are whole characters, as texts and as tokens.

        A character may need several tokens.
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
            # a replacement character in the whole text is really there; several in a row may be
            # one there, so that the end comes too soon (upstream fails on that)
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
    """The tokenizer of an English-only or multilingual model."""
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
