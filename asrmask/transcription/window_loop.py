"""The window loop: turn a recording into segments, window by window.

It follows openai-whisper's loop step by step and gives the same output. The timestamps of a window
determine the start of the next. An unreliable window is decoded again at a higher temperature. The
text so far is the prompt of the next window.

The loop does not run the model. It is a generator that yields a DecodeRequest and is sent the
result, so a caller can serve one loop at a time (stream.py) or many in a batch (scheduler.py).
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asrmask.audio.constants import FRAMES_PER_POSITION, FRAMES_PER_SECOND
from asrmask.audio.spectrogram import Features, Spectrogram
from asrmask.decoding.options import DecodingOptions, DecodingResult
from asrmask.decoding.quality import runaway, stops_early
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.policy import Policy
from asrmask.tokenizer.tokenizer import get_tokenizer
from asrmask.transcription.hallucination import skip_hallucinations
from asrmask.transcription.result import Segment
from asrmask.transcription.settings import at_temperature
from asrmask.transcription.word_timing import add_words, end_of

if TYPE_CHECKING:
    from asrmask.transcription.stream import TranscriptionStream

POSITION_S = FRAMES_PER_POSITION / FRAMES_PER_SECOND  # seconds between timestamps: 0.02
PROMPT_RESET_TEMPERATURE = 0.5  # text decoded above it is not used as a prompt
MIN_REST = 100  # frames; a shorter rest of a part is skipped


@dataclass(frozen=True)
class DecodeRequest:
    """A request to decode a window.

    encoded:      the window as encoded in an earlier attempt; None: encode it
    keep_encoded: send the encoded window back with the result
    """

    window: Features
    policy: Policy
    options: DecodingOptions
    encoded: CrossAttentionCache | None = None
    keep_encoded: bool = False


DecodeReply = tuple[CrossAttentionCache | None, DecodingResult]
DecodeGenerator = Generator[DecodeRequest, DecodeReply, DecodeReply]


@dataclass(frozen=True)
class DecodedWindow:
    """A decoded window, with the inputs and the segments of its text.

    seek:     first frame of the window in the recording
    options:  the decoding options, including the prompt
    segments: a callback may change them
    """

    spectrogram: Spectrogram
    seek: int
    window: Features
    encoded: CrossAttentionCache
    options: DecodingOptions
    result: DecodingResult
    segments: list[Segment]


@dataclass(frozen=True)
class Callbacks:
    """Functions called during a transcription.

    on_attempt:  after each decoding of a window; more attempts may follow
    on_window:   when the segments of a window are complete, before they are returned
    on_progress: with the fraction of the recording done since the last call, 0..1
    """

    on_attempt: Callable[[Features, DecodingOptions, DecodingResult], None] | None = None
    on_window: Callable[[DecodedWindow], None] | None = None
    on_progress: Callable[[float], None] | None = None


class WindowLoop:
    """The window loop over some parts of a recording.

    request:  the next window to decode; None: the loop has ended
    seek:     the current frame
    segments: all segments so far
    """

    def __init__(
        self, stream: "TranscriptionStream", clips: Sequence[tuple[int, int]], *, is_first: bool
    ):
        """clips: (start, end) in frames; is_first: whether they start the recording"""
        self.stream = stream
        self.clips = clips
        self.is_first = is_first
        self.seek = clips[0][0] if clips else 0
        self.segments: list[Segment] = []
        on_window = stream.callbacks.on_window
        self._keep_encoded = stream.settings.word_timestamps or on_window is not None
        self._generator = self._run()
        self.request = next(self._generator, None)

    def send(self, encoded: CrossAttentionCache | None, result: DecodingResult) -> list[Segment]:
        """Continue with the result of the request, and return the new segments."""
        n_before, start = len(self.segments), self.seek
        try:
            self.request = self._generator.send((encoded, result))
        except StopIteration:
            self.request = None
            self.stream.n_open -= 1
        on_progress = self.stream.callbacks.on_progress
        if on_progress is not None and self.seek > start:
            on_progress((self.seek - start) / self.stream.n_frames)
        found = self.segments[n_before:]
        if self.stream.speech is not None:
            for segment in found:
                self.stream.speech.restore(segment)
        return found

    def _run(self) -> Generator[DecodeRequest, DecodeReply, None]:
        stream, settings = self.stream, self.stream.settings
        n_frames = stream.spectrogram.n_frames
        prompt = self._prompt()
        last_speech_s = 0.0
        for clip_start, clip_end in self.clips:
            self.seek = clip_start
            while self.seek < min(clip_end, n_frames):
                seek = self.seek
                size = min(settings.window_frames, n_frames - seek, clip_end - seek)
                window = stream.spectrogram.window(seek, size, fill=settings.policy.fill)
                options = self._options(prompt.tokens)
                encoded, result = yield from self._decode(window, options)
                if self._is_silence(result):
                    self.seek = seek + size
                    continue
                options = replace(options, language=result.language)
                found, self.seek, settled = self._cut(result, seek, size)
                if settings.word_timestamps:
                    assert encoded is not None
                    self._add_words(found, result.language, encoded, size, last_speech_s)
                    if not self._drop_hallucinations(found, seek, size, settled, last_speech_s):
                        continue
                    end_s = end_of(found)
                    last_speech_s = last_speech_s if end_s is None else end_s
                if settings.cut_at_pauses and clip_end - self.seek < MIN_REST:
                    self.seek = clip_end
                if stream.callbacks.on_window is not None:
                    assert encoded is not None
                    stream.callbacks.on_window(
                        DecodedWindow(
                            stream.spectrogram, seek, window, encoded, options, result, found
                        )
                    )
                for segment in found:
                    if segment.start == segment.end or not segment.text.strip():
                        segment.text, segment.tokens, segment.words = "", [], []
                    prompt.tokens_so_far.extend(segment.tokens)
                self.segments += found
                is_drawn = result.temperature > PROMPT_RESET_TEMPERATURE
                if is_drawn or not settings.condition_on_previous_text:
                    prompt.reset()

    def _drop_hallucinations(
        self, found: list[Segment], seek: int, size: int, settled: bool, last_speech_s: float
    ) -> bool:
        """Move `seek` to the end of the last word, and drop hallucinated segments.

        Returns False if the window must be discarded and decoding continues at the new `seek`.
        """
        settings = self.stream.settings
        last_word_s = end_of(found)
        if not settled and last_word_s is not None and last_word_s > seek / FRAMES_PER_SECOND:
            self.seek = round(last_word_s * FRAMES_PER_SECOND)
        if settings.hallucination_silence_threshold is None:
            return True
        self.seek, n_kept = skip_hallucinations(
            found,
            settings.hallucination_silence_threshold,
            start=seek,
            size=size,
            n_frames=self.stream.spectrogram.n_frames,
            seek=self.seek,
            settled=settled,
            last_speech_s=last_speech_s,
            longest=settings.window_frames,
        )
        if n_kept is None:
            return False
        del found[n_kept:]
        return True

    def _prompt(self) -> "Prompt":
        settings, tokenizer = self.stream.settings, self.stream.tokenizer
        initial: list[int] = []
        if settings.initial_prompt is not None:
            initial = tokenizer.encode(" " + settings.initial_prompt.strip())
        hotwords: list[int] = []
        if settings.hotwords is not None and not self.stream.options.prefix:
            hotwords = tokenizer.encode(" " + settings.hotwords.strip())
        room = self.stream.model.dims.n_text_ctx // 2 - 1
        return Prompt(initial, settings.carry_initial_prompt, room, hotwords)

    def _add_words(
        self,
        found: list[Segment],
        language: str,
        encoded: CrossAttentionCache,
        size: int,
        last_speech_s: float,
    ) -> None:
        """Add words to the segments of a window. Words and times depend on its language."""
        model, settings = self.stream.model, self.stream.settings
        tokenizer = get_tokenizer(
            model.is_multilingual,
            num_languages=model.num_languages,
            language=language,
            task=self.stream.options.task,
        )
        add_words(
            found,
            model,
            tokenizer,
            encoded,
            size,
            prepended=settings.prepend_punctuations,
            appended=settings.append_punctuations,
            last_speech_s=last_speech_s,
        )

    def _options(self, prompt: list[int]) -> DecodingOptions:
        """Return the decoding options of the next window."""
        options = replace(self.stream.options, prompt=prompt)
        # the prefix applies to the first text only
        is_begun = bool(self.segments) or not self.is_first
        return replace(options, prefix=None) if is_begun else options

    def _decode(self, window: Features, options: DecodingOptions) -> DecodeGenerator:
        """Decode a window, and again with all padding if hidden padding made it unreliable.

        A text without timestamps that stops early is also decoded again, with timestamps: they
        show where the loop must continue.
        """
        settings, use = self.stream.settings, self.stream.padding_use
        policy = settings.policy
        computed_s, avoided_s = policy.padding_s(window.n_positions)
        if policy.kind == "full" or not settings.policy_fallback:
            use.add(computed_s, avoided_s)
            return (yield from self._read(window, policy, options, settings.temperatures))
        encoded, result = yield from self._read(window, policy, options, settings.temperatures[:1])
        reason = runaway(
            result,
            window.n_positions,
            max_compression=settings.compression_ratio_threshold,
            min_logprob=self._min_logprob(),
        )
        if reason is None and options.without_timestamps and stops_early(result.text, window):
            reason, options = "stops early", replace(options, without_timestamps=False)
        if reason is None:
            use.add(computed_s, avoided_s)
            return encoded, result
        again_s, _ = policy.fallback.padding_s(window.n_positions)
        use.add(computed_s + again_s, 0.0, reason)
        encoded, result = yield from self._read(
            window, policy.fallback, options, settings.temperatures
        )
        return encoded, replace(result, fallback=reason)

    def _min_logprob(self) -> float | None:
        """Log-probability below which a text with hidden padding is decoded again; None: off."""
        settings = self.stream.settings
        # applies only if other temperatures are tried anyway
        return settings.logprob_threshold if len(settings.temperatures) > 1 else None

    def _read(
        self,
        window: Features,
        policy: Policy,
        options: DecodingOptions,
        temperatures: Sequence[float],
    ) -> DecodeGenerator:
        """Decode at rising temperatures until the text passes the thresholds."""
        settings, callbacks = self.stream.settings, self.stream.callbacks
        encoded: CrossAttentionCache | None = None
        for temperature in temperatures:
            attempt = at_temperature(options, temperature)
            encoded, result = yield DecodeRequest(
                window, policy, attempt, encoded, self._keep_encoded
            )
            if callbacks.on_attempt is not None:
                callbacks.on_attempt(window, attempt, result)
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
        return encoded, replace(result, policy=policy)

    def _is_silence(self, result: DecodingResult) -> bool:
        settings = self.stream.settings
        if settings.no_speech_threshold is None:
            return False
        sure = (
            settings.logprob_threshold is not None
            and result.avg_logprob > settings.logprob_threshold
        )
        return result.no_speech_prob > settings.no_speech_threshold and not sure

    def _cut(self, result: DecodingResult, seek: int, size: int) -> tuple[list[Segment], int, bool]:
        """Return a window's segments, the start of the next window, and whether it is final.

        Two timestamps in a row are a cut. A single one at the end means that no speech follows, so
        the window is finished. Otherwise the audio after the last cut is decoded again.
        """
        begin = self.stream.tokenizer.timestamp_begin
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
        tokenizer = self.stream.tokenizer
        settings = self.stream.settings
        if settings.padding is not None or settings.vad_filter:
            # upstream allows times past the end of the audio
            latest = (seek + size) / FRAMES_PER_SECOND
            start, end = min(start, latest), min(end, latest)
        return Segment(
            id=-1,  # set by the stream
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
    """The prompt of the next window: hotwords, initial prompt and previous text."""

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
            tokens = self.tokens_so_far[self._since :]
        else:
            recent = self.tokens_so_far[max(len(self.initial), self._since) :]
            tokens = self.initial + recent[-(self.room - len(self.initial)) :]
        return (
            self.hotwords + tokens[max(0, len(tokens) - self.room) :] if self.hotwords else tokens
        )

    def reset(self) -> None:
        """Leave all text up to now out of later prompts."""
        self._since = len(self.tokens_so_far)
