"""Recordings of any length: windows of 30 s, one after the other, to segments.

The loop is openai-whisper's, step by step, so that its output is the same: the timestamps of one
window say where the next begins, a doubtful window is decoded again at a higher temperature, and
the text so far is the prompt of what follows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from asrmask.audio import (
    FRAMES_PER_POSITION,
    FRAMES_PER_SECOND,
    N_FRAMES,
    Features,
    Recording,
    Spectrogram,
)
from asrmask.decoding import (
    LEAST_LOGPROB,
    DecodingOptions,
    DecodingResult,
    decode_memory,
    language_of,
    runaway,
    use_precision,
)
from asrmask.encoding import encode
from asrmask.errors import OptionError
from asrmask.hallucination import judge
from asrmask.model import Memory, Whisper
from asrmask.policy import Policy
from asrmask.tokenizer import get_tokenizer, language_code
from asrmask.transcription import PaddingUse, Segment, Transcription
from asrmask.vad import VadOptions, speech_spans
from asrmask.words import APPEND_PUNCTUATIONS, PREPEND_PUNCTUATIONS, add_words, end_of

POSITION_S = FRAMES_PER_POSITION / FRAMES_PER_SECOND  # seconds from timestamp to timestamp: 0.02
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
PROMPT_RESET_TEMPERATURE = 0.5  # text found above it is not trusted as the next window's prompt


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

    # asrmask's own
    padding: Policy | str | None = None  # what the model may see of it; None: all, as upstream
    policy_fallback: bool = True  # decode again with all the padding where a text runs away

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

    def clips(self, n_frames: int) -> list[tuple[int, int]]:
        """The parts to transcribe, in frames: (start, end) pairs."""
        listed = self.clip_timestamps
        try:
            parts = listed.split(",") if isinstance(listed, str) else listed
            seconds = [float(part) for part in parts if part != ""]
        except ValueError:
            raise OptionError(f"clip_timestamps must be seconds, got {listed!r}") from None
        if any(not 0 <= second < inf for second in seconds):
            raise OptionError(f"clip_timestamps must be 0 or more, got {listed!r}")
        points = [round(second * FRAMES_PER_SECOND) for second in seconds] or [0]
        if len(points) % 2 == 1:
            points.append(n_frames)
        return list(zip(points[::2], points[1::2], strict=True))

    def check(self) -> None:
        """Raise OptionError unless every value is allowed."""
        if any(not 0 <= t < inf for t in self.temperatures):
            raise OptionError(f"temperature must be 0 or more, got {self.temperature}")
        self.clips(0)
        _ = self.vad_options, self.policy

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


@dataclass(frozen=True)
class Heard:
    """A window that has been decoded, with all that its text came from.

    seek:     frame of the recording that it begins at
    memory:   what the text was read from
    options:  what it was decoded with: the prompt is this window's
    segments: what was made of it; they may still be changed
    """

    spectrogram: Spectrogram
    seek: int
    window: Features
    memory: Memory
    options: DecodingOptions
    result: DecodingResult
    segments: list[Segment]


@dataclass(frozen=True)
class Watcher:
    """Looks on while a recording is transcribed.

    attempt: called each time that a window has been decoded; more attempts on it may follow
    heard:   called when a window has become segments, before they are given out
    """

    attempt: Callable[[Features, DecodingOptions, DecodingResult], None] | None = None
    heard: Callable[[Heard], None] | None = None


class Stream:
    """A transcription under way: iterate it for segments as they are found.

    language: of the recording, given or detected
    n_frames, seek: how long it is and how far the work has come, in frames of 10 ms
    watch:    who looks on
    """

    def __init__(
        self,
        model: Whisper,
        recording: Recording,
        settings: Settings,
        options: DecodingOptions,
        watch: Watcher | None = None,
    ):
        settings.check()
        use_precision(model, options.fp16)
        self.model = model
        self.settings = settings
        self.spectrogram = Spectrogram(recording, model.dims.n_mels)
        self.n_frames = self.spectrogram.n_frames
        self.clips = settings.clips(self.n_frames)
        if settings.vad_filter:
            self.clips = overlap(self.clips, speech_spans(recording, settings.vad_options))
        self.seek = 0
        self.policy = settings.policy
        self.use = PaddingUse(str(self.policy))
        self.language = self._language(options.language)
        self.options = replace(options, language=self.language)
        self.tokenizer = get_tokenizer(
            model.is_multilingual,
            num_languages=model.num_languages,
            language=self.language,
            task=options.task,
        )
        self.segments: list[Segment] = []
        self.watch = watch or Watcher()
        self._running = self._run()

    def __iter__(self) -> Iterator[Segment]:
        return self._running

    def result(self) -> Transcription:
        """The whole transcription, once the rest is done."""
        for _ in self._running:
            pass
        text = self.tokenizer.decode(t for segment in self.segments for t in segment.tokens)
        use = None if self.settings.padding is None else self.use
        return Transcription(text, self.segments, self.language, use)

    def _language(self, given: str | None) -> str:
        if given is not None:
            return language_code(given)
        if not self.model.is_multilingual:
            return "en"
        # upstream reads the language from the first half minute with *silence* behind it
        policy = self.policy.with_fill("silence") if self.policy == Policy() else self.policy
        start = self.clips[0][0] if self.settings.vad_filter and self.clips else 0
        n_frames = min(self.n_frames - start, N_FRAMES)
        window = self.spectrogram.window(start, n_frames, fill=policy.fill)
        tokenizer = get_tokenizer(True, num_languages=self.model.num_languages)
        return language_of(self.model, encode(self.model, [window], policy), tokenizer)[0][0]

    def _run(self) -> Iterator[Segment]:
        settings, tokenizer = self.settings, self.tokenizer
        initial: list[int] = []
        if settings.initial_prompt is not None:
            initial = tokenizer.encode(" " + settings.initial_prompt.strip())
        hotwords: list[int] = []
        if settings.hotwords is not None and not self.options.prefix:
            hotwords = tokenizer.encode(" " + settings.hotwords.strip())
        room = self.model.dims.n_text_ctx // 2 - 1
        prompt = Prompt(initial, settings.carry_initial_prompt, room, hotwords)
        last_speech_s = 0.0
        for clip_start, clip_end in self.clips:
            self.seek = clip_start
            while self.seek < min(clip_end, self.n_frames):
                seek, offset_s = self.seek, self.seek / FRAMES_PER_SECOND
                size = min(N_FRAMES, self.n_frames - seek, clip_end - seek)
                window = self.spectrogram.window(seek, size, fill=self.policy.fill)
                told = self._told(prompt.tokens)
                memory, result = self._decode(window, told)
                if self._is_silence(result):
                    self.seek = seek + size
                    continue
                found, self.seek, settled = self._cut(result, seek, size)
                if settings.word_timestamps:
                    add_words(
                        found,
                        self.model,
                        tokenizer,
                        memory,
                        size,
                        prepended=settings.prepend_punctuations,
                        appended=settings.append_punctuations,
                        last_speech_s=last_speech_s,
                    )
                    last_word_s = end_of(found)
                    if not settled and last_word_s is not None and last_word_s > offset_s:
                        self.seek = round(last_word_s * FRAMES_PER_SECOND)
                    if settings.hallucination_silence_threshold is not None:
                        self.seek, n_kept = judge(
                            found,
                            settings.hallucination_silence_threshold,
                            start=seek,
                            size=size,
                            n_frames=self.n_frames,
                            seek=self.seek,
                            settled=settled,
                            last_speech_s=last_speech_s,
                        )
                        if n_kept is None:
                            continue
                        del found[n_kept:]
                    last_word_s = end_of(found)
                    if last_word_s is not None:
                        last_speech_s = last_word_s
                if self.watch.heard is not None:
                    self.watch.heard(
                        Heard(self.spectrogram, seek, window, memory, told, result, found)
                    )
                for segment in found:
                    if segment.start == segment.end or not segment.text.strip():
                        segment.text, segment.tokens, segment.words = "", [], []
                    segment.id = len(self.segments)
                    self.segments.append(segment)
                    prompt.tokens_so_far.extend(segment.tokens)
                if (
                    not settings.condition_on_previous_text
                    or result.temperature > PROMPT_RESET_TEMPERATURE
                ):
                    prompt.reset()
                yield from found

    def _told(self, prompt: list[int]) -> DecodingOptions:
        """The options of the next window."""
        options = replace(self.options, prompt=prompt)
        # a prefix was the beginning of the first text
        return replace(options, prefix=None) if self.segments else options

    def _decode(self, window: Features, options: DecodingOptions) -> tuple[Memory, DecodingResult]:
        """The window's text, and the memory that it was read from.

        Under a policy that hides padding a text that runs away is decoded again with all of it.
        """
        settings, policy = self.settings, self.policy
        memory = encode(self.model, [window], policy)
        computed_s, avoided_s = policy.padding_s(window.n_positions)
        if policy.kind == "full" or not settings.policy_fallback:
            self.use.add(computed_s, avoided_s)
            return memory, replace(self._read(window, memory, options), policy=policy)
        result = self._read(window, memory, options, settings.temperatures[:1])
        thresholds = [settings.logprob_threshold, LEAST_LOGPROB]
        reason = runaway(
            result,
            window.n_positions,
            most_compression=settings.compression_ratio_threshold,
            least_logprob=max(t for t in thresholds if t is not None),
        )
        if reason is None:
            self.use.add(computed_s, avoided_s)
            return memory, replace(result, policy=policy)
        memory = encode(self.model, [window], policy.fallback)
        again_s, _ = policy.fallback.padding_s(window.n_positions)
        self.use.add(computed_s + again_s, 0.0, reason)
        result = self._read(window, memory, options)
        return memory, replace(result, policy=policy.fallback, fallback=reason)

    def _read(
        self,
        window: Features,
        memory: Memory,
        options: DecodingOptions,
        temperatures: Sequence[float] | None = None,
    ) -> DecodingResult:
        """The window's text, at the first temperature that gives a credible one."""
        settings = self.settings
        for temperature in temperatures or settings.temperatures:
            attempt = at_temperature(options, temperature)
            (result,) = decode_memory(self.model, memory, attempt)
            if self.watch.attempt is not None:
                self.watch.attempt(window, attempt, result)
            repetitive = (
                settings.compression_ratio_threshold is not None
                and result.compression_ratio > settings.compression_ratio_threshold
            )
            unsure = (
                settings.logprob_threshold is not None
                and result.avg_logprob < settings.logprob_threshold
            )
            silent = (
                settings.no_speech_threshold is not None
                and result.no_speech_prob > settings.no_speech_threshold
                and unsure
            )
            if silent or not (repetitive or unsure):
                break
        return result

    def _is_silence(self, result: DecodingResult) -> bool:
        settings = self.settings
        if settings.no_speech_threshold is None:
            return False
        sure = (
            settings.logprob_threshold is not None
            and result.avg_logprob > settings.logprob_threshold
        )
        return result.no_speech_prob > settings.no_speech_threshold and not sure

    def _cut(self, result: DecodingResult, seek: int, size: int) -> tuple[list[Segment], int, bool]:
        """A window's segments, where the next window begins, and whether that is settled.

        Two timestamps in a row are a cut. A single one at the end says that no speech follows, so
        the window is done with; otherwise what follows the last cut is read again.
        """
        begin = self.tokenizer.timestamp_begin
        tokens = result.tokens
        is_time = [token >= begin for token in tokens]
        settled = is_time[-2:] == [False, True]
        cuts = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
        offset_s = seek / FRAMES_PER_SECOND
        if cuts:
            ends = [*cuts, len(tokens)] if settled else cuts
            segments = []
            for a, b in zip([0, *ends], ends, strict=False):
                start = offset_s + (tokens[a] - begin) * POSITION_S
                end = offset_s + (tokens[b - 1] - begin) * POSITION_S
                segments.append(self._segment(result, seek, start, end, tokens[a:b]))
            if settled:
                return segments, seek + size, settled
            last = tokens[ends[-1] - 1] - begin
            return segments, seek + last * FRAMES_PER_POSITION, settled
        duration = size / FRAMES_PER_SECOND
        times = [token for token in tokens if token >= begin]
        if times and times[-1] != begin:
            duration = (times[-1] - begin) * POSITION_S
        segment = self._segment(result, seek, offset_s, offset_s + duration, tokens)
        return [segment], seek + size, settled

    def _segment(
        self, result: DecodingResult, seek: int, start: float, end: float, tokens: list[int]
    ) -> Segment:
        return Segment(
            id=-1,  # given when it is known to stay
            seek=seek,
            start=start,
            end=end,
            text=self.tokenizer.decode(t for t in tokens if t < self.tokenizer.eot),
            tokens=tokens,
            temperature=result.temperature,
            avg_logprob=result.avg_logprob,
            compression_ratio=result.compression_ratio,
            no_speech_prob=result.no_speech_prob,
            policy=None if self.settings.padding is None else str(result.policy),
        )


class Prompt:
    """The text before a window, as the decoder is told it."""

    def __init__(
        self, initial: list[int], carry: bool, room: int, hotwords: list[int] | None = None
    ):
        self.initial = initial
        self.carry = carry
        self.hotwords = (hotwords or [])[:room]
        self.room = room - len(self.hotwords)
        self.tokens_so_far = list(initial)
        self._since = 0

    @property
    def tokens(self) -> list[int]:
        if not self.carry:
            told = self.tokens_so_far[self._since :]
        else:
            recent = self.tokens_so_far[max(len(self.initial), self._since) :]
            told = self.initial + recent[-(self.room - len(self.initial)) :]
        return self.hotwords + told[max(0, len(told) - self.room) :] if self.hotwords else told

    def reset(self) -> None:
        """Forget what was said up to now."""
        self._since = len(self.tokens_so_far)


def overlap(
    clips: list[tuple[int, int]], spans: Sequence[tuple[float, float]]
) -> list[tuple[int, int]]:
    """What lies both in a clip (frames) and in a span (seconds), in frames."""
    frames = [(round(a * FRAMES_PER_SECOND), round(b * FRAMES_PER_SECOND)) for a, b in spans]
    pairs = [(max(a, c), min(b, d)) for a, b in clips for c, d in frames]
    return [(start, end) for start, end in pairs if start < end]


def at_temperature(options: DecodingOptions, temperature: float) -> DecodingOptions:
    """The options for one temperature: beams at 0, drawn texts above."""
    if temperature > 0:
        return replace(options, temperature=temperature, beam_size=None, patience=None)
    return replace(options, temperature=0.0, best_of=None)


def stream(
    model: Whisper,
    audio: str | Path | np.ndarray | Tensor | Recording,
    settings: Settings | None = None,
    options: DecodingOptions | None = None,
    watch: Watcher | None = None,
) -> Stream:
    """A transcription to iterate: segments come as they are found."""
    if isinstance(audio, (str, Path)):
        audio = Recording.open(audio)
    elif not isinstance(audio, Recording):
        audio = Recording.of(audio)
    return Stream(model, audio, settings or Settings(), options or DecodingOptions(), watch)


def transcribe(
    model: Whisper,
    audio: str | Path | np.ndarray | Tensor | Recording,
    *,
    verbose: bool | None = None,
    **options: Any,
) -> Transcription:
    """The text, segments and language of a recording of any length.

    audio:   a path ("-": standard input) or 16 kHz mono samples
    verbose: print segments as they are found
    options: fields of Settings and of DecodingOptions, under openai-whisper's names
    """
    from asrmask.writers import line

    loop = {name: options.pop(name) for name in list(options) if name in Settings.__annotations__}
    settings = Settings(**loop)
    running = stream(model, audio, settings, DecodingOptions(**options))
    for segment in running:
        if verbose:
            print(line(segment), flush=True)
    return running.result()
