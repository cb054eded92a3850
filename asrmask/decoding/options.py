"""Options and result of decoding a window."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import TypedDict

from torch import Tensor

from asrmask.errors import OptionError
from asrmask.model.encoding import FULL
from asrmask.model.policy import Policy

MAX_TEMPERATURE = 1000.0  # sampling is uniform long before this


def check_temperature(temperature: float) -> None:
    """Raise OptionError unless the temperature is valid."""
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise OptionError(f"temperature must be in 0..{MAX_TEMPERATURE:g}, got {temperature}")


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
        if self.task not in {"transcribe", "translate", "lang_id"}:
            raise OptionError(f"task must be transcribe, translate or lang_id, got {self.task!r}")
        check_temperature(self.temperature)
        for name in ("beam_size", "best_of", "sample_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} must be 1 or more, got {value}")
        if self.beam_size is not None and self.best_of is not None:
            raise OptionError("beam_size and best_of exclude each other, got both")
        if self.beam_size is not None and self.temperature > 0:
            raise OptionError(
                f"beam_size needs temperature 0, got {self.temperature}: use best_of to sample"
            )
        if self.best_of is not None and self.temperature == 0:
            raise OptionError("best_of needs a temperature above 0, got 0")
        if self.patience is not None and self.beam_size is None:
            raise OptionError("patience needs beam_size, got none")
        if self.patience is not None and not (
            0 <= self.patience < inf and round((self.beam_size or 0) * self.patience) >= 1
        ):
            raise OptionError(f"patience × beam_size must be 1 or more, got {self.patience}")
        if not 0 < self.repetition_penalty < inf:
            raise OptionError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")
        if not self.no_repeat_ngram_size >= 0:
            raise OptionError(
                f"no_repeat_ngram_size must be 0 or more, got {self.no_repeat_ngram_size}"
            )
        if self.length_penalty is not None and not 0 <= self.length_penalty <= 1:
            raise OptionError(f"length_penalty must be in 0..1, got {self.length_penalty}")


class SharedKeywords(TypedDict, total=False):
    """Fields of DecodingOptions except temperature as keywords, for type checkers."""

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


class DecodeKeywords(SharedKeywords, total=False):
    """All fields of DecodingOptions as keywords."""

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
    policy: Policy = FULL  # how much padding the model saw
    fallback: str | None = None  # why the requested policy was not used
