"""How the window loop works: its settings, and their values for one attempt at a window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from asrmask.audio import CHUNK_LENGTH, FRAMES_PER_SECOND, N_FRAMES
from asrmask.decoding import DecodingOptions, check_temperature
from asrmask.errors import OptionError, check_names
from asrmask.policy import Policy
from asrmask.vad import VadOptions
from asrmask.words import APPEND_PUNCTUATIONS, PREPEND_PUNCTUATIONS

# other names of options: faster-whisper's → openai-whisper's
ALIASES = {"log_prob_threshold": "logprob_threshold", "max_new_tokens": "sample_len"}
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Settings:
    """How the window loop works; names, meanings and defaults are openai-whisper's."""

    temperature: float | Sequence[float] = TEMPERATURES  # tried in turn
    compression_ratio_threshold: float | None = 2.4  # above: too repetitive, next temperature
    logprob_threshold: float | None = -1.0  # below: too unsure, next temperature
    no_speech_threshold: float | None = 0.6  # above, and unsure too: silence
    condition_on_previous_text: bool = True
    initial_prompt: str | None = None
    carry_initial_prompt: bool = False  # the initial prompt in front of every window
    word_timestamps: bool = False
    prepend_punctuations: str = PREPEND_PUNCTUATIONS
    append_punctuations: str = APPEND_PUNCTUATIONS
    clip_timestamps: str | Sequence[float] = "0"  # start, end, start, end, … in seconds
    hallucination_silence_threshold: float | None = None  # seconds; needs word_timestamps

    # in addition, under faster-whisper's names
    vad_filter: bool = False  # only where there is speech
    vad_parameters: VadOptions | Mapping[str, Any] | None = None
    hotwords: str | None = None  # names and terms that every window is told
    multilingual: bool = False  # the language is detected in every window
    chunk_length: float | None = None  # seconds of audio in a window; None: 30, the most

    # asrmask's own
    padding: Policy | str | None = None  # what the model may see of it; None: all, as upstream
    policy_fallback: bool = True  # decode again with all the padding where a text runs away
    cut_at_pauses: bool = False  # parts of half a minute or less, independent of each other

    @property
    def policy(self) -> Policy:
        return Policy() if self.padding is None else Policy.parse(self.padding)

    @property
    def temperatures(self) -> tuple[float, ...]:
        several = self.temperature
        found = (several,) if isinstance(several, (int, float)) else tuple(several)
        if not found:
            raise OptionError("temperature must be a number or several, got none")
        return found

    @property
    def window_frames(self) -> int:
        """Frames of audio in a window, at the most."""
        if self.chunk_length is None:
            return N_FRAMES
        if not 1 <= self.chunk_length <= CHUNK_LENGTH:
            raise OptionError(
                f"chunk_length must be in 1..{CHUNK_LENGTH} seconds, got {self.chunk_length}"
            )
        return round(self.chunk_length * FRAMES_PER_SECOND)

    def clips(self, n_frames: int) -> list[tuple[int, int]]:
        """The parts to transcribe, in frames: (start, end) pairs."""
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
        """Raise OptionError unless every value is allowed."""
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


def at_temperature(options: DecodingOptions, temperature: float) -> DecodingOptions:
    """The options for one temperature: beams at 0, drawn texts above."""
    if temperature > 0:
        return replace(options, temperature=temperature, beam_size=None, patience=None)
    return replace(options, temperature=0.0, best_of=None)


def sorted_out(options: Mapping[str, Any]) -> tuple[Settings, DecodingOptions]:
    """Options by name, as those of the window loop and those of decoding."""
    settings = {field.name for field in fields(Settings)}
    decoding = {field.name for field in fields(DecodingOptions)}
    check_names(options, settings | decoding | set(ALIASES))
    for other, name in ALIASES.items():
        if other in options and name in options:
            raise OptionError(f"{other} is another name of {name}, got both")
    options = {ALIASES.get(name, name): value for name, value in options.items()}
    loop = {name: value for name, value in options.items() if name in settings}
    rest = {name: value for name, value in options.items() if name not in settings}
    return Settings(**loop), DecodingOptions(**rest)
