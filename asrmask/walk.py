"""The window loop of a recording, as a walk that asks for texts and is told them.

The loop is openai-whisper's, step by step, so that its output is the same: the timestamps of one
window say where the next begins, a doubtful window is decoded again at a higher temperature, and
the text so far is the prompt of what follows. Whoever walks answers the asks: one by one
(transcriber.py), or those of many walks at a time (batches.py).
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from asrmask.audio import (
    FRAMES_PER_POSITION,
    FRAMES_PER_SECOND,
    Features,
    Spectrogram,
)
from asrmask.decoding import DecodingOptions, DecodingResult, runaway, stops_early
from asrmask.hallucination import judge
from asrmask.model import Memory, Whisper
from asrmask.policy import Policy
from asrmask.settings import Settings, at_temperature
from asrmask.tokenizer import Tokenizer, get_tokenizer
from asrmask.transcription import PaddingUse, Segment
from asrmask.vad import Speech
from asrmask.words import add_words, end_of

POSITION_S = FRAMES_PER_POSITION / FRAMES_PER_SECOND  # seconds from timestamp to timestamp: 0.02
PROMPT_RESET_TEMPERATURE = 0.5  # text found above it is not trusted as the next window's prompt
LEAST_REST = 100  # frames at the end of a part that are worth a window of their own: 1 s


@dataclass(frozen=True)
class Ask:
    """A window whose text is wanted.

    memory:      what an earlier attempt at it was read from; None: it is to be encoded
    keep_memory: what it is read from is needed beside the text
    """

    window: Features
    policy: Policy
    options: DecodingOptions
    memory: Memory | None = None
    keep_memory: bool = False


Answer = tuple[Memory | None, DecodingResult]
Asking = Generator[Ask, Answer, Answer]


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
    moved:   called with the number of frames that are done, each time that a window is
    """

    attempt: Callable[[Features, DecodingOptions, DecodingResult], None] | None = None
    heard: Callable[[Heard], None] | None = None
    moved: Callable[[int], None] | None = None


@dataclass(frozen=True)
class Subject:
    """What the walks through one recording have in common."""

    model: Whisper
    spectrogram: Spectrogram
    settings: Settings
    options: DecodingOptions  # with the language, unless it is detected in every window
    tokenizer: Tokenizer
    use: PaddingUse
    watch: Watcher
    speech: Speech | None = None  # what the spectrogram is of; None: of all there is


class Walk:
    """One window after the other, through some parts of a recording.

    ask:      the text that is wanted next; None: the walk is over
    seek:     the frame that it has come to
    segments: what was found so far
    """

    def __init__(self, subject: Subject, clips: Sequence[tuple[int, int]], *, is_first: bool):
        """clips: parts to go through, (start, end) frames; is_first: they open the recording"""
        self.subject = subject
        self.clips = clips
        self.is_first = is_first
        self.seek = clips[0][0] if clips else 0
        self.segments: list[Segment] = []
        self._keeps_memory = subject.settings.word_timestamps or subject.watch.heard is not None
        self._going = self._run()
        self.ask = next(self._going, None)

    def tell(self, memory: Memory | None, result: DecodingResult) -> list[Segment]:
        """Go on with the text that was asked for; the segments that come of it."""
        n_before, start = len(self.segments), self.seek
        try:
            self.ask = self._going.send((memory, result))
        except StopIteration:
            self.ask = None
        if self.subject.watch.moved is not None and self.seek > start:
            self.subject.watch.moved(self.seek - start)
        found = self.segments[n_before:]
        if self.subject.speech is not None:
            for segment in found:
                self.subject.speech.restore(segment)
        return found

    def _run(self) -> Generator[Ask, Answer, None]:
        subject, settings = self.subject, self.subject.settings
        n_frames = subject.spectrogram.n_frames
        prompt = self._prompt()
        last_speech_s = 0.0
        for clip_start, clip_end in self.clips:
            self.seek = clip_start
            while self.seek < min(clip_end, n_frames):
                seek, offset_s = self.seek, self.seek / FRAMES_PER_SECOND
                size = min(settings.window_frames, n_frames - seek, clip_end - seek)
                window = subject.spectrogram.window(seek, size, fill=settings.policy.fill)
                told = self._told(prompt.tokens)
                memory, result = yield from self._decode(window, told)
                if self._is_silence(result):
                    self.seek = seek + size
                    continue
                told = replace(told, language=result.language)
                found, self.seek, settled = self._cut(result, seek, size)
                if settings.word_timestamps:
                    assert memory is not None
                    self._add_words(found, result.language, memory, size, last_speech_s)
                    last_word_s = end_of(found)
                    if not settled and last_word_s is not None and last_word_s > offset_s:
                        self.seek = round(last_word_s * FRAMES_PER_SECOND)
                    if settings.hallucination_silence_threshold is not None:
                        self.seek, n_kept = judge(
                            found,
                            settings.hallucination_silence_threshold,
                            start=seek,
                            size=size,
                            n_frames=n_frames,
                            seek=self.seek,
                            settled=settled,
                            last_speech_s=last_speech_s,
                            longest=settings.window_frames,
                        )
                        if n_kept is None:
                            continue
                        del found[n_kept:]
                    last_word_s = end_of(found)
                    if last_word_s is not None:
                        last_speech_s = last_word_s
                if settings.cut_at_pauses and clip_end - self.seek < LEAST_REST:
                    self.seek = clip_end
                if subject.watch.heard is not None:
                    assert memory is not None
                    subject.watch.heard(
                        Heard(subject.spectrogram, seek, window, memory, told, result, found)
                    )
                for segment in found:
                    if segment.start == segment.end or not segment.text.strip():
                        segment.text, segment.tokens, segment.words = "", [], []
                    prompt.tokens_so_far.extend(segment.tokens)
                self.segments += found
                if (
                    not settings.condition_on_previous_text
                    or result.temperature > PROMPT_RESET_TEMPERATURE
                ):
                    prompt.reset()

    def _prompt(self) -> "Prompt":
        settings, tokenizer = self.subject.settings, self.subject.tokenizer
        initial: list[int] = []
        if settings.initial_prompt is not None:
            initial = tokenizer.encode(" " + settings.initial_prompt.strip())
        hotwords: list[int] = []
        if settings.hotwords is not None and not self.subject.options.prefix:
            hotwords = tokenizer.encode(" " + settings.hotwords.strip())
        room = self.subject.model.dims.n_text_ctx // 2 - 1
        return Prompt(initial, settings.carry_initial_prompt, room, hotwords)

    def _add_words(
        self,
        found: list[Segment],
        language: str,
        memory: Memory,
        size: int,
        last_speech_s: float,
    ) -> None:
        """Set the words of a window's segments; their times depend on its language."""
        model, settings = self.subject.model, self.subject.settings
        tokenizer = get_tokenizer(
            model.is_multilingual,
            num_languages=model.num_languages,
            language=language,
            task=self.subject.options.task,
        )
        add_words(
            found,
            model,
            tokenizer,
            memory,
            size,
            prepended=settings.prepend_punctuations,
            appended=settings.append_punctuations,
            last_speech_s=last_speech_s,
        )

    def _told(self, prompt: list[int]) -> DecodingOptions:
        """The options of the next window."""
        options = replace(self.subject.options, prompt=prompt)
        # a prefix was the beginning of the first text
        is_begun = bool(self.segments) or not self.is_first
        return replace(options, prefix=None) if is_begun else options

    def _decode(self, window: Features, options: DecodingOptions) -> Asking:
        """The window's text, and the memory that it was read from.

        Under a policy that hides padding a text that runs away is decoded again with all of it;
        so is one without timestamps that stops early, with timestamps: the walk goes on from them.
        """
        settings, use = self.subject.settings, self.subject.use
        policy = settings.policy
        computed_s, avoided_s = policy.padding_s(window.n_positions)
        if policy.kind == "full" or not settings.policy_fallback:
            use.add(computed_s, avoided_s)
            return (yield from self._read(window, policy, options, settings.temperatures))
        memory, result = yield from self._read(window, policy, options, settings.temperatures[:1])
        reason = runaway(
            result,
            window.n_positions,
            most_compression=settings.compression_ratio_threshold,
            least_logprob=self._least_logprob(),
        )
        if reason is None and options.without_timestamps and stops_early(result.text, window):
            reason, options = "stops early", replace(options, without_timestamps=False)
        if reason is None:
            use.add(computed_s, avoided_s)
            return memory, result
        again_s, _ = policy.fallback.padding_s(window.n_positions)
        use.add(computed_s + again_s, 0.0, reason)
        memory, result = yield from self._read(
            window, policy.fallback, options, settings.temperatures
        )
        return memory, replace(result, fallback=reason)

    def _least_logprob(self) -> float | None:
        """Below it, a text found without all of the padding is decoded again with it."""
        settings = self.subject.settings
        # a reason only where other temperatures are tried anyway
        return settings.logprob_threshold if len(settings.temperatures) > 1 else None

    def _read(
        self,
        window: Features,
        policy: Policy,
        options: DecodingOptions,
        temperatures: Sequence[float],
    ) -> Asking:
        """The window's text, at the first temperature that gives a credible one."""
        settings, watch = self.subject.settings, self.subject.watch
        memory: Memory | None = None
        for temperature in temperatures:
            attempt = at_temperature(options, temperature)
            memory, result = yield Ask(window, policy, attempt, memory, self._keeps_memory)
            if watch.attempt is not None:
                watch.attempt(window, attempt, result)
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
        return memory, replace(result, policy=policy)

    def _is_silence(self, result: DecodingResult) -> bool:
        settings = self.subject.settings
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
        begin = self.subject.tokenizer.timestamp_begin
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
                segments.append(self._segment(result, seek, size, start, end, tokens[a:b]))
            if settled:
                return segments, seek + size, settled
            last = tokens[ends[-1] - 1] - begin
            return segments, seek + last * FRAMES_PER_POSITION, settled
        duration = size / FRAMES_PER_SECOND
        times = [token for token in tokens if token >= begin]
        if times and times[-1] != begin:
            duration = (times[-1] - begin) * POSITION_S
        segment = self._segment(result, seek, size, offset_s, offset_s + duration, tokens)
        return [segment], seek + size, settled

    def _segment(
        self,
        result: DecodingResult,
        seek: int,
        size: int,
        start: float,
        end: float,
        tokens: list[int],
    ) -> Segment:
        tokenizer = self.subject.tokenizer
        settings = self.subject.settings
        if settings.padding is not None or settings.vad_filter:
            # upstream lets times run past the audio
            latest = (seek + size) / FRAMES_PER_SECOND
            start, end = min(start, latest), min(end, latest)
        return Segment(
            id=-1,  # given by the recording
            seek=seek,
            start=start,
            end=end,
            text=tokenizer.decode(t for t in tokens if t < tokenizer.eot),
            tokens=tokens,
            temperature=result.temperature,
            avg_logprob=result.avg_logprob,
            compression_ratio=result.compression_ratio,
            no_speech_prob=result.no_speech_prob,
            language=result.language if settings.multilingual else None,
            policy=None if settings.padding is None else str(result.policy),
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
