"""Transcribe a recording of any length: detect its language, split it, collect segments."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain, count

from asrmask.audio.constants import N_FRAMES
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Spectrogram
from asrmask.audio.vad import speech_spans
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import decode_encoded, language_of, use_precision
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.languages import language_code
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer
from asrmask.transcription.result import PaddingUse, Segment, Transcription
from asrmask.transcription.settings import Settings
from asrmask.transcription.speech import Speech, split_at_pauses
from asrmask.transcription.window_loop import Callbacks, DecodeReply, DecodeRequest, WindowLoop


class TranscriptionStream:
    """A transcription in progress: iterate to get segments as they are decoded.

    language:       of the recording, given or detected
    n_frames, seek: length and current position, in frames of 10 ms; with vad_filter, of the speech
    clips:          parts to transcribe, (start, end) in frames
    parts:          segments of each independent part started so far
    n_open:         number of parts started but not finished
    error:          the exception that stopped the work, or None
    """

    def __init__(
        self,
        model: Whisper,
        recording: Recording,
        settings: Settings,
        options: DecodingOptions,
        callbacks: Callbacks | None = None,
    ):
        settings.check()
        use_precision(model, options.fp16)
        self.model = model
        self.settings = settings
        self.options = options
        self.callbacks = callbacks or Callbacks()
        self.duration_s = recording.duration_s
        self.spectrogram = Spectrogram(recording, model.dims.n_mels)
        self.clips = settings.clips(self.spectrogram.n_frames)
        self.speech = None
        if settings.vad_filter:
            vad = settings.vad_options
            spans = speech_spans(recording, vad)
            self.speech = Speech(recording, spans, margin_s=vad.speech_pad_ms / 1000)
            self.spectrogram = Spectrogram(self.speech.recording, model.dims.n_mels)
            frame = self.speech.frame
            clips = [(frame(start), frame(end)) for start, end in self.clips]
            self.clips = [(start, end) for start, end in clips if start < end]
        self.n_frames = self.spectrogram.n_frames
        if settings.cut_at_pauses:
            size = settings.window_frames
            parts = [split_at_pauses(self.spectrogram, *clip, size) for clip in self.clips]
            self.clips = list(chain(*parts))
        self.policy = settings.policy
        self.padding_use = PaddingUse(str(self.policy))
        self.language, self.language_probability = self._language(options.language)
        self.tokenizer = self.tokenizer_for(self.language)
        self.options = replace(options, language=None if settings.multilingual else self.language)
        self.seek = 0
        self.parts: list[list[Segment]] = []
        self.n_open = 0
        self.error: Exception | None = None
        self._all_started = False

    def tokenizer_for(self, language: str | None) -> Tokenizer:
        return get_tokenizer(
            self.model.is_multilingual,
            num_languages=self.model.num_languages,
            language=language,
            task=self.options.task,
        )

    def start_loops(self) -> Iterator[WindowLoop]:
        """Yield a started window loop for each independent part; lazy: each loop holds a window.

        A loop refers to its stream, but not the reverse: a cycle would stay in memory.
        """
        parts = [[clip] for clip in self.clips] if self.settings.cut_at_pauses else [self.clips]
        for i, part in enumerate(parts):
            if self.error is not None:
                return
            loop = WindowLoop(self, part, is_first=i == 0)
            self.parts.append(loop.segments)
            self.n_open += loop.request is not None
            yield loop
        self._all_started = True

    @property
    def is_finished(self) -> bool:
        return self.error is not None or (self._all_started and self.n_open == 0)

    def __iter__(self) -> Iterator[Segment]:
        return self._segments

    def result(self) -> Transcription:
        """Transcribe the rest, and return the complete transcription."""
        for _ in self._segments:
            pass
        return self.transcription()

    def transcription(self) -> Transcription:
        """Return the transcription up to now, or raise the exception that stopped the work."""
        if self.error is not None:
            raise self.error
        segments = list(chain(*self.parts))
        for i, segment in enumerate(segments):
            segment.id = i
        return Transcription(
            self.tokenizer.decode(t for segment in segments for t in segment.tokens),
            segments,
            self.language,
            None if self.settings.padding is None else self.padding_use,
            self.language_probability,
            self.duration_s,
        )

    def _language(self, given: str | None) -> tuple[str, float]:
        """Return the language and its probability, which is 1 if it was given."""
        if given is not None:
            return language_code(given), 1.0
        if not self.model.is_multilingual:
            return "en", 1.0
        # upstream detects the language in the first 30 seconds, padded with *silence*
        policy = self.policy.with_fill("silence") if self.policy == Policy() else self.policy
        start = self.clips[0][0] if self.settings.vad_filter and self.clips else 0
        n_frames = min(self.n_frames - start, N_FRAMES)
        window = self.spectrogram.window(start, n_frames, fill=policy.fill)
        encoded = encode(self.model, [window], policy)
        ((language, probabilities),) = language_of(self.model, encoded, self.tokenizer_for(None))
        return language, probabilities[language]

    @cached_property
    def _segments(self) -> Iterator[Segment]:
        """Created on first use: an unused generator would keep the stream in memory."""
        ids = count()
        for loop in self.start_loops():
            while loop.request is not None:
                self.seek = loop.seek
                segments = loop.send(*decode_request(self.model, loop.request))
                self.seek = loop.seek
                for segment in segments:
                    segment.id = next(ids)
                yield from segments


def decode_request(model: Whisper, request: DecodeRequest) -> DecodeReply:
    """Decode one window."""
    encoded = request.encoded
    if encoded is None:
        encoded = encode(model, [request.window], request.policy)
    (result,) = decode_encoded(model, encoded, request.options)
    return encoded, result
