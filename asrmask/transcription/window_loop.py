"""The window loop: turn a recording into segments, window by window.

It follows openai-whisper's loop step by step and gives the same output. The timestamps of a window
determine the start of the next. An unreliable window is decoded again at a higher temperature. The
text so far is the prompt of the next window.

The loop does not run the model. It is a generator that yields a DecodeRequest and is sent the
result, so a caller can serve one loop at a time (stream.py) or many in a batch (scheduler.py).
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

from asrmask.audio.constants import FRAMES_PER_POSITION, FRAMES_PER_SECOND
from asrmask.audio.spectrogram import Features, Spectrogram
from asrmask.decoding.options import DecodingOptions, DecodingResult
from asrmask.decoding.quality import MIN_SURE_LOGPROB, runaway_reason, stops_early
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.policy import Policy
from asrmask.transcription.hallucination import skip_hallucinations
from asrmask.transcription.result import Segment
from asrmask.transcription.settings import at_temperature
from asrmask.transcription.word_timing import add_words, last_word_end

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

    @property
    def batch_key(self) -> Any:
        """Requests with equal keys can be decoded in one batch; None: decode it alone.

        Only first attempts at temperature 0 are batched.
        """
        if self.encoded is not None or self.options.temperature > 0:
            return None
        return self.policy, self.options, self.keep_encoded


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
        self._last_speech_s = 0.0  # end of the last word
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
        segments = self.segments[n_before:]
        if self.stream.speech is not None:
            for segment in segments:
                self.stream.speech.restore(segment)
        return segments

    def _run(self) -> Generator[DecodeRequest, DecodeReply, None]:
        stream, settings = self.stream, self.stream.settings
        on_window = stream.callbacks.on_window
        prompt = self._prompt()
        for clip_start, clip_end in self.clips:
            self.seek = clip_start
            while self.seek < min(clip_end, stream.n_frames):
                seek = self.seek
                size = min(settings.window_frames, stream.n_frames - seek, clip_end - seek)
                window = stream.spectrogram.window(seek, size, fill=stream.policy.fill)
                options = replace(stream.options, prompt=prompt.tokens)
                if self.segments or not self.is_first:
                    options = replace(options, prefix=None)  # it starts the first text only
                encoded, result = yield from self._decode(window, options)
                if self._is_silent(result):
                    self.seek = seek + size
                    continue
                options = replace(options, language=result.language)
                segments, self.seek, is_complete = self._split(result, seek, size)
                if settings.word_timestamps:
                    assert encoded is not None
                    tokenizer, last_s = stream.tokenizer_for(result.language), self._last_speech_s
                    add_words(segments, stream.model, tokenizer, encoded, size, settings, last_s)
                    if not self._follow_words(segments, seek, size, is_complete):
                        continue
                if settings.cut_at_pauses and clip_end - self.seek < MIN_REST:
                    self.seek = clip_end
                if on_window is not None:
                    assert encoded is not None
                    inputs = stream.spectrogram, seek, window, encoded, options
                    on_window(DecodedWindow(*inputs, result, segments))
                for segment in segments:
                    if segment.start == segment.end or not segment.text.strip():
                        segment.text, segment.tokens, segment.words = "", [], []
                    prompt.previous.extend(segment.tokens)
                self.segments += segments
                is_sampled = result.temperature > PROMPT_RESET_TEMPERATURE
                if is_sampled or not settings.condition_on_previous_text:
                    prompt.reset()

    def _prompt(self) -> "Prompt":
        stream, settings = self.stream, self.stream.settings

        def encode(text: str | None) -> list[int]:
            return [] if text is None else stream.tokenizer.encode(" " + text.strip())

        return Prompt(
            encode(settings.initial_prompt),
            settings.carry_initial_prompt,
            stream.model.dims.n_text_ctx // 2 - 1,
            [] if stream.options.prefix else encode(settings.hotwords),
        )

    def _follow_words(
        self, segments: list[Segment], seek: int, size: int, is_complete: bool
    ) -> bool:
        """Continue after the last word, and drop hallucinated segments.

        Returns False if the window must be discarded and decoding continues at the new `seek`.
        """
        settings = self.stream.settings
        threshold = settings.hallucination_silence_threshold
        last_word_s = last_word_end(segments)
        if not is_complete and last_word_s is not None and last_word_s > seek / FRAMES_PER_SECOND:
            rest_s = (seek + settings.window_frames) / FRAMES_PER_SECOND - last_word_s
            skip_rest = threshold is not None and rest_s <= threshold
            self.seek = seek + size if skip_rest else round(last_word_s * FRAMES_PER_SECOND)
        if threshold is not None:
            self.seek, n_kept = skip_hallucinations(
                segments, self.stream, threshold, seek, size, self.seek, self._last_speech_s
            )
            if n_kept is None:
                return False
            del segments[n_kept:]
            last_word_s = last_word_end(segments)
        self._last_speech_s = self._last_speech_s if last_word_s is None else last_word_s
        return True

    def _decode(self, window: Features, options: DecodingOptions) -> DecodeGenerator:
        """Decode a window, and again with all padding if hidden padding made it unreliable.

        A text without timestamps that stops early is also decoded again, with timestamps: they
        show where the loop must continue.
        """
        settings, policy, use = self.stream.settings, self.stream.policy, self.stream.padding_use
        temperatures = settings.temperatures
        can_retry = settings.policy_fallback and policy.kind != "full"
        tried = temperatures[:1] if can_retry else temperatures
        encoded, result = yield from self._try_temperatures(window, policy, options, tried)
        reason = None
        if can_retry:
            min_logprob = settings.logprob_threshold
            if min_logprob is not None and len(temperatures) == 1:
                min_logprob = MIN_SURE_LOGPROB
            reason = runaway_reason(
                result,
                window.n_positions,
                max_compression=settings.compression_ratio_threshold,
                min_logprob=min_logprob,
            )
            if reason is None and options.without_timestamps and stops_early(result.text, window):
                reason, options = "stops early", replace(options, without_timestamps=False)
        computed_s, avoided_s = policy.padding_s(window.n_positions)
        if reason is None:
            use.add(computed_s, avoided_s)
            return encoded, result
        again_s, _ = policy.fallback.padding_s(window.n_positions)
        use.add(computed_s + again_s, 0.0, reason)
        policy = policy.fallback
        encoded, result = yield from self._try_temperatures(window, policy, options, temperatures)
        return encoded, replace(result, fallback=reason)

    def _try_temperatures(
        self, window: Features, policy: Policy, options: DecodingOptions, temperatures: list[float]
    ) -> DecodeGenerator:
        """Decode at rising temperatures until the text passes the thresholds."""
        callbacks = self.stream.callbacks
        keep_encoded = self.stream.settings.word_timestamps or callbacks.on_window is not None
        encoded: CrossAttentionCache | None = None
        for temperature in temperatures:
            attempt = at_temperature(options, temperature)
            encoded, result = yield DecodeRequest(window, policy, attempt, encoded, keep_encoded)
            if callbacks.on_attempt is not None:
                callbacks.on_attempt(window, attempt, result)
            if not self._needs_fallback(result):
                break
        return encoded, replace(result, policy=policy)

    def _needs_fallback(self, result: DecodingResult) -> bool:
        settings = self.stream.settings
        repetitive = result.compression_ratio > _limit(settings.compression_ratio_threshold, inf)
        uncertain = result.avg_logprob < _limit(settings.logprob_threshold, -inf)
        silent = uncertain and result.no_speech_prob > _limit(settings.no_speech_threshold, inf)
        return (repetitive or uncertain) and not silent

    def _is_silent(self, result: DecodingResult) -> bool:
        settings = self.stream.settings
        certain = result.avg_logprob > _limit(settings.logprob_threshold, inf)
        return result.no_speech_prob > _limit(settings.no_speech_threshold, inf) and not certain

    def _split(
        self, result: DecodingResult, seek: int, size: int
    ) -> tuple[list[Segment], int, bool]:
        """Return a window's segments, the start of the next window, and whether it is final.

        Segments are split between two timestamps in a row. A single timestamp at the end means that
        no speech follows, so the window is complete. Otherwise the audio after the last split is
        decoded again.
        """
        settings, tokenizer = self.stream.settings, self.stream.tokenizer
        begin, tokens = tokenizer.timestamp_begin, result.tokens
        is_time = [token >= begin for token in tokens]
        single_timestamp_ending = is_time[-2:] == [False, True]
        splits = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
        if splits and single_timestamp_ending:
            splits.append(len(tokens))
        next_seek = seek + size
        if splits:
            parts = [tokens[a:b] for a, b in pairwise([0, *splits])]
            spans = [((p[0] - begin) * POSITION_S, (p[-1] - begin) * POSITION_S) for p in parts]
            if not single_timestamp_ending:
                next_seek = seek + (parts[-1][-1] - begin) * FRAMES_PER_POSITION
        else:
            last = ([token for token in tokens if token >= begin] or [begin])[-1]
            end_s = (last - begin) * POSITION_S or size / FRAMES_PER_SECOND
            parts, spans = [tokens], [(0.0, end_s)]
        offset_s = seek / FRAMES_PER_SECOND
        # upstream allows times past the end of the audio
        is_limited = settings.padding is not None or settings.vad_filter
        limit_s = (seek + size) / FRAMES_PER_SECOND if is_limited else inf
        segments = [
            Segment(
                id=-1,  # set by the stream
                seek=seek,
                start=min(offset_s + start, limit_s),
                end=min(offset_s + end, limit_s),
                text=tokenizer.decode(token for token in part if token < tokenizer.eot),
                tokens=part,
                temperature=result.temperature,
                avg_logprob=result.avg_logprob,
                compression_ratio=result.compression_ratio,
                no_speech_prob=result.no_speech_prob,
                language=result.language if settings.multilingual else None,
                policy=None if settings.padding is None else str(result.policy),
            )
            for part, (start, end) in zip(parts, spans, strict=True)
        ]
        return segments, next_seek, single_timestamp_ending


def _limit(threshold: float | None, default: float) -> float:
    return default if threshold is None else threshold


class Prompt:
    """The prompt of the next window: hotwords, initial prompt and previous text, as tokens."""

    def __init__(
        self, initial: list[int], carry: bool, max_tokens: int, hotwords: Sequence[int] = ()
    ):
        """carry: keep the initial prompt before the previous text"""
        self.initial = initial
        self.carry = carry
        self.hotwords = list(hotwords[:max_tokens])
        self.max_tokens = max_tokens - len(self.hotwords)
        self.previous = list(initial)
        self._n_skipped = 0

    @property
    def tokens(self) -> list[int]:
        tokens = self.previous[self._n_skipped :]
        if self.carry:
            recent = self.previous[max(len(self.initial), self._n_skipped) :]
            tokens = self.initial + recent[-(self.max_tokens - len(self.initial)) :]
        return self.hotwords + tokens[max(0, len(tokens) - self.max_tokens) :]

    def reset(self) -> None:
        """Leave all text up to now out of later prompts."""
        self._n_skipped = len(self.previous)
