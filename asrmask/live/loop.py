"""The live loop: audio in, requests to decode and events out.

Like the window loop (transcription/window_loop.py), it does not run the model. It asks for the text
of a window and is sent the result, so that one scheduler can answer many loops.

Audio is taken in pieces of 32 ms, whatever it arrives in. After each step of speech, the utterance
up to now is decoded: an update. Committed words are the prefix of its text, so only what is new is
decoded. A pause ends the utterance.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from asrmask.audio.constants import FRAMES_PER_SECOND, HOP_LENGTH, SAMPLE_RATE
from asrmask.audio.spectrogram import LiveSpectrogram
from asrmask.audio.vad import FRAME, LiveDetector
from asrmask.decoding.options import DecodingOptions, DecodingResult
from asrmask.decoding.quality import MIN_SURE_LOGPROB, runaway_reason
from asrmask.decoding.task import use_precision
from asrmask.live.commitment import LiveWord, candidates
from asrmask.live.events import Committed, Endpoint, Event, Partial
from asrmask.live.settings import LONGEST_BUFFER_S, LiveSettings
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.languages import language_code
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer
from asrmask.transcription.punctuation import APPEND_PUNCTUATIONS, PREPEND_PUNCTUATIONS
from asrmask.transcription.result import Word
from asrmask.transcription.window_loop import DecodeReply, DecodeRequest, Prompt
from asrmask.transcription.word_timing import WordTiming, align, merge_punctuations

PIECE_S = FRAME / SAMPLE_RATE  # 0.032
MAX_PIECES = round(LONGEST_BUFFER_S / PIECE_S)
HYSTERESIS = 0.15  # speech goes on down to this much below the threshold
LEAD_S = 0.4  # of audio before speech, part of the utterance
TAIL_S = 0.3  # of audio after speech, part of the last update
MIN_SPEECH_S = 0.15  # less is no utterance
MISSED_SPEECH_S = 0.4  # so much after the committed words has words of its own
MIN_UPDATE_S = 0.3  # of audio in the first update of an utterance, without its lead
MAX_PREFIX = 150  # tokens; with more, the buffer is cut
KEPT_S = 2.0  # of audio that a cut leaves, at least
MIN_LANGUAGE_PROB, MAX_LANGUAGE_S = 0.5, 3.0  # surer, or after so much audio: it is kept
TOKENS_BEFORE, TOKENS_PER_S = 12, 12  # the longest text of an update; fast speech has 6 a second
MULTILINGUAL_FACTOR = 2.5  # some scripts need more tokens
SILENCE_PROB, SILENCE_LOGPROB = 0.6, -1.0  # as no_speech_threshold and logprob_threshold

LoopGenerator = Generator[DecodeRequest | None, DecodeReply | None, None]
WordsGenerator = Generator[DecodeRequest | None, DecodeReply | None, list[WordTiming] | None]


@dataclass
class SpeechTracker:
    """Follows the probabilities of speech.

    speech:        ends of the latest pieces of speech in the utterance; empty: no utterance
    last_speech_s: end of the last speech
    """

    threshold: float
    speech: list[float] = field(default_factory=list)
    last_speech_s: float = 0.0

    def add(self, probability: float, time_s: float) -> bool:
        """Add a piece that ends at time_s; return whether speech begins with it."""
        is_open = bool(self.speech)
        if probability < self.threshold - HYSTERESIS * is_open:
            return False
        self.last_speech_s = time_s
        self.speech.append(time_s)
        del self.speech[:-MAX_PIECES]
        return not is_open

    def speech_after(self, time_s: float) -> tuple[float, float]:
        """Return the start and the seconds of the utterance's speech after a time."""
        after = [end for end in self.speech if end - PIECE_S >= time_s]
        return (after[0] - PIECE_S if after else time_s), PIECE_S * len(after)


class LiveLoop:
    """The live loop over one stream of audio.

    request:  what to decode next; None: more audio is needed
    language: given, or detected at the first words
    time_s:   audio that was taken, in seconds
    """

    def __init__(self, model: Whisper, settings: LiveSettings, options: DecodingOptions):
        settings.check()
        options.check()
        use_precision(model, options.fp16)
        self.model = model
        self.settings = settings
        self.options = options
        self.language = "en" if not model.is_multilingual else options.language
        if self.language is not None:
            self.language = language_code(self.language)
        self.time_s = 0.0
        self._commitment, self._policy = settings.commitment, settings.policy
        self._spectrogram = LiveSpectrogram(model.dims.n_mels)
        self._detector = LiveDetector()
        self._tracker = SpeechTracker(settings.threshold)
        self._prompt = self._new_prompt()
        self._samples = np.empty(0, np.float32)
        self._is_closed = self._is_late = False
        self._events: list[Event] = []
        self._end_frame = 0  # of the previous utterance
        self._opened_s = 0.0  # start of the utterance
        self._reset(0)
        self.request: DecodeRequest | None = None
        self._generator = self._run()
        next(self._generator)

    # for callers

    def add(self, samples: np.ndarray, *, late: bool = False) -> None:
        """Add float32 samples. late: no update before the end of an utterance."""
        self._samples = np.concatenate([self._samples, samples])
        self._is_late = late
        self._resume(None)

    def close(self) -> None:
        """End the audio."""
        self._is_closed = True
        self._resume(None)

    def send(self, encoded: CrossAttentionCache | None, result: DecodingResult) -> None:
        """Continue with the result of the request."""
        self._resume((encoded, result))

    @property
    def asked(self) -> DecodeRequest:
        assert self.request is not None
        return self.request

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _resume(self, reply: DecodeReply | None) -> None:
        try:
            self.request = self._generator.send(reply)
        except StopIteration:
            self.request = None

    # the loop

    def _run(self) -> LoopGenerator:
        while True:
            while len(self._samples) < FRAME and not self._is_closed:
                yield None
            n_left = len(self._samples)
            if n_left == 0:
                break
            piece, self._samples = self._samples[:FRAME], self._samples[FRAME:]
            self._take(np.pad(piece, (0, FRAME - len(piece))))
            if self._tracker.speech:
                yield from self._follow()
        if self._tracker.speech:
            yield from self._end()

    def _take(self, piece: np.ndarray) -> None:
        """Take one piece of audio; open an utterance if speech begins."""
        self.time_s += PIECE_S
        self._spectrogram.add(piece)
        if self._tracker.add(self._detector.probability(piece), self.time_s):
            self._opened_s = self.time_s
            self._reset(max(self._end_frame, self._frame(self.time_s - PIECE_S - LEAD_S)))
        if not self._tracker.speech:
            self._spectrogram.drop(self._frame(self.time_s - 2 * LEAD_S))

    def _follow(self) -> LoopGenerator:
        """Decide what the newest piece of an utterance leads to."""
        n_frames = self._spectrogram.n_frames
        buffer_s = (n_frames - self._start) / FRAMES_PER_SECOND
        silence_s = self.time_s - self._tracker.last_speech_s
        if silence_s > self.settings.endpoint - PIECE_S / 2:
            yield from self._end()
        elif buffer_s > LONGEST_BUFFER_S:  # nothing was committed for long
            yield from self._finish_buffer()
            self._leave(len(self._committed))
            self._reset(n_frames)
        elif self._is_due():
            self._updated_s = self.time_s
            yield from self._update()
            n_tokens = sum(len(word.tokens) for word in self._committed)
            if buffer_s > self.settings.buffer or n_tokens > MAX_PREFIX:
                self._cut()

    def _is_due(self) -> bool:
        is_time = self.time_s - self._updated_s > self.settings.step - PIECE_S / 2
        is_long = self.time_s - self._opened_s >= MIN_UPDATE_S
        has_news = self._tracker.last_speech_s > self._updated_s - TAIL_S
        return is_time and is_long and has_news and not self._is_late

    def _reset(self, start: int) -> None:
        """Begin a buffer at this frame."""
        self._start = start
        self._committed: list[WordTiming] = []  # those whose audio is in the buffer
        self._candidates: list[LiveWord] = []
        self._updated_s = self.time_s
        self._partial = ""
        self._spectrogram.drop(start)

    def _update(self) -> LoopGenerator:
        """Decode the buffer, commit what is ready and report the rest."""
        stop = self._spectrogram.n_frames
        found = yield from self._new_words(stop, min_logprob=None)
        if found is None:
            return
        self._candidates = candidates(found, self._candidates)
        if self.language is not None:
            end_s = stop / FRAMES_PER_SECOND
            self._commit(self._commitment.n_ready(self._candidates, end_s))
        text = "".join(word.timing.word for word in self._candidates)
        if text != self._partial:
            self._partial = text
            self._events.append(Partial(self._now, text))

    def _end(self) -> LoopGenerator:
        """End the utterance: commit all words and report the endpoint."""
        speech_s = PIECE_S * len(self._tracker.speech)
        if speech_s >= MIN_SPEECH_S or self._spoken is not None:
            yield from self._finish_buffer()
        if self._spoken is not None:
            self._events.append(Endpoint(self._now, *self._spoken))
            self._spoken = None
        self._end_frame = self._spectrogram.n_frames
        self._tracker.speech.clear()
        self._leave(len(self._committed))
        self._reset(self._end_frame)

    def _finish_buffer(self) -> LoopGenerator:
        """Decode the buffer once more and commit all of its words."""
        last = self._frame(self._tracker.last_speech_s + TAIL_S)
        stop = max(min(last, self._spectrogram.n_frames), self._start + 1)
        fallback = self.settings.policy_fallback and self._policy.kind != "full"
        min_logprob = MIN_SURE_LOGPROB if fallback else None
        found = yield from self._new_words(stop, min_logprob)
        if found is None and fallback:
            found = yield from self._decode(stop, self._policy.fallback, None)
        if found is not None:
            self._candidates = candidates(found, self._candidates)
        self._commit(len(self._candidates))

    def _new_words(self, stop: int, min_logprob: float | None) -> WordsGenerator:
        """Decode, and again without the committed words if speech follows them but no word."""
        found = yield from self._decode(stop, self._policy, min_logprob)
        if found == [] and self._begin_after_committed():
            found = yield from self._decode(stop, self._policy, min_logprob)
        return found

    def _begin_after_committed(self) -> bool:
        """Begin the buffer after the committed words, if much speech follows them.

        After a pause the model often takes the committed words for the whole text. Without them it
        does not.
        """
        start_s, speech_s = self._tracker.speech_after(self._committed_s + MIN_SPEECH_S)
        if not self._committed or speech_s < MISSED_SPEECH_S:
            return False
        self._start = self._frame(max(start_s - LEAD_S, self._committed_s))
        self._leave(len(self._committed))
        self._spectrogram.drop(self._start)
        return True

    def _decode(self, stop: int, policy: Policy, min_logprob: float | None) -> WordsGenerator:
        """Return the words after the committed ones; None: the text is unreliable."""
        window = self._spectrogram.window(self._start, stop)
        prefix = [token for word in self._committed for token in word.tokens]
        new_s = stop / FRAMES_PER_SECOND - self._committed_s
        factor = MULTILINGUAL_FACTOR if self.model.is_multilingual else 1.0
        options = replace(
            self.options,
            language=self.language,
            prompt=self._prompt.tokens or None,
            prefix=prefix or None,
            suppress_blank=self.options.suppress_blank and not prefix,  # it may be all
            sample_len=round(factor * (TOKENS_BEFORE + TOKENS_PER_S * new_s)),
        )
        reply = yield DecodeRequest(window, policy, options, keep_encoded=True)
        assert reply is not None
        encoded, result = reply
        assert encoded is not None
        if runaway_reason(result, window.n_positions, min_logprob=min_logprob) is not None:
            return None
        is_silent = result.no_speech_prob > SILENCE_PROB and result.avg_logprob < SILENCE_LOGPROB
        if is_silent and not prefix:
            return []
        self._keep_language(result, window.n_frames / FRAMES_PER_SECOND)
        return self._words(result, encoded, window.n_frames, len(prefix))

    def _keep_language(self, result: DecodingResult, audio_s: float) -> None:
        if self.language is None:
            probability = (result.language_probs or {}).get(result.language, 0.0)
            if probability >= MIN_LANGUAGE_PROB or audio_s >= MAX_LANGUAGE_S:
                self.language = result.language

    def _words(
        self, result: DecodingResult, encoded: CrossAttentionCache, n_frames: int, n_prefix: int
    ) -> list[WordTiming]:
        """Return the words after the prefix, with times on the clock of the stream."""
        tokenizer = self._tokenizer(result.language)
        tokens = [token for token in result.tokens if token < tokenizer.eot]
        if len(tokens) <= n_prefix:
            return []
        timings = align(
            self.model, tokenizer, tokens, encoded, n_frames, min(n_prefix, len(tokens))
        )
        timings = after_tokens(timings, n_prefix, tokenizer)
        merge_punctuations(timings, PREPEND_PUNCTUATIONS, APPEND_PUNCTUATIONS)
        offset_s = self._start / FRAMES_PER_SECOND
        return [
            replace(
                timing,
                start=max(timing.start + offset_s, self._committed_s),
                end=max(timing.end + offset_s, self._committed_s),
                focus=timing.focus + offset_s,
            )
            for timing in timings
            if timing.word
        ]

    def _commit(self, n: int) -> None:
        """Commit the first n candidates."""
        timings = [word.timing for word in self._candidates[:n]]
        self._candidates = self._candidates[n:]
        if not timings:
            return
        self._committed += timings
        tokens = [token for timing in timings for token in timing.tokens]
        words = [
            Word(t.word, round(t.start, 2), round(t.end, 2), round(t.probability, 3))
            for t in timings
        ]
        first_s = words[0].start if self._spoken is None else self._spoken[0]
        self._spoken = first_s, words[-1].end
        text = "".join(word.word for word in words)
        self._partial = ""
        self._events.append(Committed(self._now, text, words, self.language or "en", tokens))

    def _cut(self) -> None:
        """Drop the audio of committed words from the buffer, up to their longest pause."""
        latest_s = self._spectrogram.n_frames / FRAMES_PER_SECOND - KEPT_S
        following = [*self._committed[1:], *(word.timing for word in self._candidates[:1])]
        pauses = [
            (after.start - before.end, i, (before.end + after.start) / 2)
            for i, (before, after) in enumerate(zip(self._committed, following, strict=False))
            if before.end <= latest_s
        ]
        if pauses:
            _, i, time_s = max(pauses)
            self._start = self._frame(time_s)
            self._leave(i + 1)
            self._spectrogram.drop(self._start)

    def _leave(self, n: int) -> None:
        """The audio of the first n committed words leaves the buffer."""
        if self.settings.condition_on_previous_text:
            self._prompt.previous += [t for word in self._committed[:n] for t in word.tokens]
        del self._committed[:n]

    # details

    _spoken: tuple[float, float] | None = None  # start and end of the utterance's words

    @property
    def _now(self) -> float:
        return round(self.time_s, 3)

    @property
    def _committed_s(self) -> float:
        """The end of the last committed word in the buffer, or the buffer's start."""
        return self._committed[-1].end if self._committed else self._start / FRAMES_PER_SECOND

    def _frame(self, time_s: float) -> int:
        return min(max(round(time_s * SAMPLE_RATE / HOP_LENGTH), 0), self._spectrogram.n_frames)

    def _tokenizer(self, language: str | None) -> Tokenizer:
        return get_tokenizer(
            self.model.is_multilingual,
            num_languages=self.model.num_languages,
            language=language,
            task=self.options.task,
        )

    def _new_prompt(self) -> Prompt:
        def encode(text: str | None) -> list[int]:
            tokenizer = self._tokenizer(self.language)
            return [] if text is None else tokenizer.encode(" " + text.strip())

        settings = self.settings
        return Prompt(
            encode(settings.initial_prompt),
            True,
            self.model.dims.n_text_ctx // 2 - 1,
            encode(settings.hotwords),
        )


def after_tokens(
    timings: Sequence[WordTiming], n_tokens: int, tokenizer: Tokenizer
) -> list[WordTiming]:
    """Return the words after the first n_tokens; a word across that border begins there."""
    found = []
    for timing in timings:
        n_known = min(n_tokens, len(timing.tokens))
        n_tokens -= n_known
        tokens = timing.tokens[n_known:]
        if tokens:
            word = tokenizer.decode(tokens) if n_known else timing.word
            found.append(replace(timing, word=word, tokens=tokens))
    return found
