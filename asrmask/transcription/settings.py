"""Settings of the window loop, and the decoding options of one attempt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from asrmask.audio.constants import CHUNK_LENGTH, FRAMES_PER_SECOND, N_FRAMES
from asrmask.audio.vad import VadOptions
from asrmask.decoding.options import DecodingOptions, SharedKeywords, check_temperature
from asrmask.errors import OptionError, check_names
from asrmask.model.policy import Policy
from asrmask.transcription.punctuation import APPEND_PUNCTUATIONS, PREPEND_PUNCTUATIONS

# option aliases: faster-whisper's name → openai-whisper's
ALIASES = {"log_prob_threshold": "logprob_threshold", "max_new_tokens": "sample_len"}
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Settings:
    """Settings of the window loop. Names, meanings and defaults are openai-whisper's."""

    temperature: float | Sequence[float] = TEMPERATURES  # tried in turn
    compression_ratio_threshold: float | None = 2.4  # above: repetitive, try the next temperature
    logprob_threshold: float | None = -1.0  # below: uncertain, try the next temperature
    no_speech_threshold: float | None = 0.6  # above, if also uncertain: silence
    condition_on_previous_text: bool = True
    initial_prompt: str | None = None
    carry_initial_prompt: bool = False  # prepend the initial prompt to every window's prompt
    word_timestamps: bool = False
    prepend_punctuations: str = PREPEND_PUNCTUATIONS
    append_punctuations: str = APPEND_PUNCTUATIONS
    clip_timestamps: str | Sequence[float] = "0"  # start, end, start, end, … in seconds
    hallucination_silence_threshold: float | None = None  # seconds; needs word_timestamps

    # additions, with faster-whisper's names
    vad_filter: bool = False  # skip audio without speech
    vad_parameters: VadOptions | Mapping[str, Any] | None = None
    hotwords: str | None = None  # names and terms to add to every window's prompt
    multilingual: bool = False  # detect the language of every window
    chunk_length: float | None = None  # seconds of audio per window; None: 30, the maximum

    # only in asrmask
    padding: Policy | str | None = None  # how much of it is visible; None: all, as upstream
    policy_fallback: bool = True  # decode unreliable texts again with all padding
    cut_at_pauses: bool = False  # independent parts of at most 30 seconds

    @property
    def policy(self) -> Policy:
        return Policy() if self.padding is None else Policy.parse(self.padding)

    @property
    def temperatures(self) -> list[float]:
        given = self.temperature
        return [given] if isinstance(given, (int, float)) else list(given)

    @property
    def window_frames(self) -> int:
        """The maximum number of audio frames in a window."""
        if self.chunk_length is None:
            return N_FRAMES
        if not 1 <= self.chunk_length <= CHUNK_LENGTH:
            raise OptionError(
                f"chunk_length must be in 1..{CHUNK_LENGTH} seconds, got {self.chunk_length}"
            )
        return round(self.chunk_length * FRAMES_PER_SECOND)

    def clips(self, n_frames: int) -> list[tuple[int, int]]:
        """Return the parts to transcribe as (start, end) pairs, in frames."""
        listed = self.clip_timestamps
        try:
            parts = listed.split(",") if isinstance(listed, str) else listed
            seconds = [float(part) for part in parts if part != ""]
        except (TypeError, ValueError):
            raise OptionError(f"clip_timestamps must be seconds, got {listed!r}") from None
        if any(not 0 <= second < inf for second in seconds):
            raise OptionError(f"clip_timestamps must be 0 or more, got {listed!r}")
        points = [round(second * FRAMES_PER_SECOND) for second in seconds] or [0]
        if len(points) % 2 == 1:
            points.append(n_frames)
        return list(zip(points[::2], points[1::2], strict=True))

    def check(self) -> None:
        """Raise OptionError unless every value is valid."""
        if not self.temperatures:
            raise OptionError("temperature must be a number or several, got none")
        for temperature in self.temperatures:
            check_temperature(temperature)
        self.clips(0)
        _ = self.vad_options, self.policy, self.window_frames

    @property
    def vad_options(self) -> VadOptions:
        given = self.vad_parameters or {}
        if isinstance(given, VadOptions):
            return given
        try:
            return VadOptions(**given)
        except TypeError:
            known = ", ".join(field.name for field in fields(VadOptions))
            raise OptionError(f"vad_parameters must be of {known}, got {sorted(given)}") from None


class TranscribeKeywords(SharedKeywords, total=False):
    """Fields of Settings and DecodingOptions as keywords, for editors and type checkers."""

    temperature: float | Sequence[float]
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    log_prob_threshold: float | None
    no_speech_threshold: float | None
    condition_on_previous_text: bool
    initial_prompt: str | None
    carry_initial_prompt: bool
    word_timestamps: bool
    prepend_punctuations: str
    append_punctuations: str
    clip_timestamps: str | Sequence[float]
    hallucination_silence_threshold: float | None
    vad_filter: bool
    vad_parameters: VadOptions | Mapping[str, Any] | None
    hotwords: str | None
    multilingual: bool
    chunk_length: float | None
    max_new_tokens: int | None
    cut_at_pauses: bool


def at_temperature(options: DecodingOptions, temperature: float) -> DecodingOptions:
    """Return the options for one temperature: beam search at 0, sampling above."""
    if temperature > 0:
        return replace(options, temperature=temperature, beam_size=None, patience=None)
    return replace(options, temperature=0.0, best_of=None)


def split_options(options: Mapping[str, Any]) -> tuple[Settings, DecodingOptions]:
    """Split options into those of the window loop and those of decoding."""
    settings = {field.name for field in fields(Settings)}
    decoding = {field.name for field in fields(DecodingOptions)}
    check_names(options, settings | decoding | set(ALIASES))
    for other, name in ALIASES.items():
        if other in options and name in options:
            raise OptionError(f"{other} is another name of {name}, got both")
    options = {ALIASES.get(name, name): value for name, value in options.items()}
    loop = {name: options.pop(name) for name in settings & options.keys()}
    return Settings(**loop), DecodingOptions(**options)
