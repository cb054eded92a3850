"""Options and result of decoding a window."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TypedDict

from torch import Tensor

from asrmask.errors import OptionError
from asrmask.model.policy import Policy

MAX_TEMPERATURE = 1000.0  # sampling is uniform long before this


def check_option(is_valid: bool, rule: str, got: object) -> None:
    """Raise OptionError unless an option is valid."""
    if not is_valid:
        raise OptionError(f"{rule}, got {got}")


def check_temperature(temperature: float) -> None:
    """Raise OptionError unless the temperature is valid."""
    is_valid = 0 <= temperature <= MAX_TEMPERATURE
    check_option(is_valid, f"temperature must be in 0..{MAX_TEMPERATURE:g}", temperature)


@dataclass(frozen=True)
class DecodingOptions:
    """How to decode a window. Names, meanings and defaults are openai-whisper's."""

    task: str = "transcribe"  # or "translate" (to English), or "lang_id"
    language: str | None = None  # None: detect it

    temperature: float = 0.0
    sample_len: int | None = None  # maximum tokens per window; default: half the context
    best_of: int | None = None  # texts to sample, if temperature > 0
    beam_size: int | None = None  # number of beams, if temperature is 0
    patience: float | None = None  # of beam search (arXiv:2204.05424), default 1
    length_penalty: float | None = None  # α of arXiv:1609.08144; None: divide by the length

    prompt: str | list[int] | None = None  # text before this window
    prefix: str | list[int] | None = None  # start of this window's text, included in the result

    suppress_tokens: str | Iterable[int] | None = "-1"  # ids; -1: all non-speech symbols
    suppress_blank: bool = True

    # additions, with faster-whisper's names
    repetition_penalty: float = 1.0  # above 1: repeated tokens are less likely
    no_repeat_ngram_size: int = 0  # no n-gram of this size occurs twice; 0: off

    without_timestamps: bool = False
    max_initial_timestamp: float | None = 1.0  # seconds

    fp16: bool = True  # half precision on a GPU; no effect on a CPU

    def check(self) -> None:
        """Raise OptionError unless the options are valid together."""
        tasks = ("transcribe", "translate", "lang_id")
        check_option(self.task in tasks, "task must be transcribe, translate or lang_id", self.task)
        check_temperature(self.temperature)
        for name in ("beam_size", "best_of", "sample_len"):
            value = getattr(self, name)
            check_option(value is None or value >= 1, f"{name} must be 1 or more", value)
        if self.beam_size is not None:
            check_option(self.best_of is None, "beam_size and best_of exclude each other", "both")
            rule = "beam_size needs temperature 0 (use best_of to sample)"
            check_option(self.temperature == 0, rule, self.temperature)
        is_valid = self.best_of is None or self.temperature > 0
        check_option(is_valid, "best_of needs a temperature above 0", 0)
        if self.patience is not None:
            check_option(self.beam_size is not None, "patience needs beam_size", "none")
            is_valid = 0 <= self.patience < inf and round((self.beam_size or 0) * self.patience) > 0
            check_option(is_valid, "patience × beam_size must be 1 or more", self.patience)
        penalty, size = self.repetition_penalty, self.no_repeat_ngram_size
        check_option(0 < penalty < inf, "repetition_penalty must be above 0", penalty)
        check_option(size >= 0, "no_repeat_ngram_size must be 0 or more", size)
        alpha = self.length_penalty
        check_option(alpha is None or 0 <= alpha <= 1, "length_penalty must be in 0..1", alpha)


class SharedKeywords(TypedDict, total=False):
    """Keywords of `decode` and `transcribe`, for type checkers: fields of DecodingOptions."""

    task: str
    language: str | None
    sample_len: int | None
    best_of: int | None
    beam_size: int | None
    patience: float | None
    length_penalty: float | None
    prompt: str | list[int] | None
    prefix: str | list[int] | None
    suppress_tokens: str | Iterable[int] | None
    suppress_blank: bool
    repetition_penalty: float
    no_repeat_ngram_size: int
    without_timestamps: bool
    max_initial_timestamp: float | None
    fp16: bool
    padding: Policy | str | None
    policy_fallback: bool


class DecodeKeywords(SharedKeywords, total=False):
    temperature: float


@dataclass(frozen=True)
class DecodingResult:
    """The text of one window, with confidence measures."""

    audio_features: Tensor  # (T, D); T = 0: discarded
    language: str
    language_probs: dict[str, float] | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    avg_logprob: float = float("nan")
    no_speech_prob: float = float("nan")
    temperature: float = float("nan")
    compression_ratio: float = float("nan")
    ended: bool = True  # False: the text was cut off at the token limit
    last_start: float | None = None  # seconds: the last timestamp followed by text
    policy: Policy = field(default_factory=Policy)  # how much padding the model saw
    fallback: str | None = None  # why the requested policy was not used
