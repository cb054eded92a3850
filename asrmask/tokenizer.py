"""Text ↔ token ids: vocabulary, special tokens, languages."""

import base64
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import tiktoken

from asrmask import assets
from asrmask.errors import OptionError

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


@cache
def _encoding(name: str, n_languages: int) -> tiktoken.Encoding:
    lines = assets.path(f"{name}.tiktoken").read_bytes().splitlines()
    ranks = {
        base64.b64decode(token): int(rank) for token, rank in (ln.split() for ln in lines if ln)
    }
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
    return tiktoken.Encoding(
        name=name,
        explicit_n_vocab=len(ranks) + len(specials),
        # GPT-2's rule for cutting text before the merges
        pat_str=r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        mergeable_ranks=ranks,
        special_tokens={token: len(ranks) + i for i, token in enumerate(specials)},
    )


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary, and the tokens that open a transcript in its language and task."""

    encoding: tiktoken.Encoding
    n_languages: int
    language: str | None = None  # None: an English-only model, which has no language tokens
    task: str | None = None

    def encode(self, text: str) -> list[int]:
        try:
            return self.encoding.encode(text)
        except ValueError:
            found = sorted(t for t in self.encoding.special_tokens_set if t in text)
            raise OptionError(
                f"text must not spell special tokens, got {', '.join(found)}"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text without its timestamps; other special tokens are spelled out."""
        return self.encoding.decode([i for i in ids if i < self.timestamp_begin])

    def decode_with_timestamps(self, ids: Sequence[int]) -> str:
        return self.encoding.decode(list(ids))

    def special(self, name: str) -> int:
        """The id of a special token, by its name without the brackets."""
        return self.encoding.encode_single_token(f"<|{name}|>")

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

    @cached_property
    def non_speech_tokens(self) -> tuple[int, ...]:
        """Tokens of sounds and annotations, like ♪ and [, that nobody speaks."""
        symbols = [
            *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
            *"<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split(),  # noqa: SIM905
        ]
        # "-" and "'" are fine within a word, not at its beginning
        found = {self.encode(" -")[0], self.encode(" '")[0]}
        for symbol in symbols:
            for ids in (self.encode(symbol), self.encode(" " + symbol)):
                if len(ids) == 1:
                    found.add(ids[0])
        for note in "♩♪♫♬♭♮♯":  # several bytes each; the first token is theirs alone
            found.add(self.encode(note)[0])
            found.add(self.encode(" " + note)[0])
        return tuple(sorted(found))

    def split_to_word_tokens(self, ids: list[int]) -> tuple[list[str], list[list[int]]]:
        """Words and the tokens of each; single characters in languages without spaces."""
        pieces = self._whole_characters(ids)
        if self.language in UNSPACED:
            return [text for text, _ in pieces], [group for _, group in pieces]
        words: list[str] = []
        groups: list[list[int]] = []
        for text, group in pieces:
            starts = group[0] >= self.eot or text.startswith(" ")
            if starts or text.strip() in string.punctuation or not words:
                words.append(text)
                groups.append(group)
            else:
                words[-1] += text
                groups[-1] = groups[-1] + group
        return words, groups

    def _whole_characters(self, ids: list[int]) -> list[tuple[str, list[int]]]:
        """Shortest runs of tokens that are whole characters: a character may need several."""
        whole = self.decode_with_timestamps(ids)
        pieces: list[tuple[str, list[int]]] = []
        group: list[int] = []
        offset = 0
        for token in ids:
            group.append(token)
            text = self.decode_with_timestamps(group)
            broken = text.find("\ufffd")
            # a replacement character in the whole text is really there; several in a row may be
            # one there, so that the end comes too soon (upstream fails on that)
            at = offset + broken
            if broken < 0 or at >= len(whole) or whole[at] == "\ufffd":
                pieces.append((text, group))
                offset += len(text)
                group = []
        return pieces


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
        return Tokenizer(_encoding("gpt2", num_languages), num_languages)
    if language == "yue" and num_languages < len(LANGUAGES):
        raise OptionError("language yue needs a model of 100 languages (large-v3, turbo), got 99")
    encoding = _encoding("multilingual", num_languages)
    return Tokenizer(encoding, num_languages, language or "en", task or "transcribe")
