"""Recordings of any length: windows of 30 s, one after the other, to segments."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from asrmask.audio import N_FRAMES, Recording, Spectrogram
from asrmask.decoding import DecodingOptions, decode_memory, language_of, use_precision
from asrmask.encoding import encode
from asrmask.media import Source
from asrmask.model import Whisper
from asrmask.pauses import cut
from asrmask.policy import Policy
from asrmask.settings import Settings, sorted_out
from asrmask.tokenizer import get_tokenizer, language_code
from asrmask.transcription import PaddingUse, Segment, Transcription
from asrmask.vad import Speech
from asrmask.walk import Answer, Ask, Subject, Walk, Watcher

Audio = Source | np.ndarray | Tensor | Recording


class Stream:
    """A transcription under way: iterate it for segments as they are found.

    language: of the recording, given or detected
    n_frames, seek: how long it is and how far the work has come, in frames of 10 ms; with
              vad_filter, of its speech
    walks:    the ways through it, each independent of the others: one, or one for each part
    """

    def __init__(
        self,
        model: Whisper,
        recording: Recording | Spectrogram,
        settings: Settings,
        options: DecodingOptions,
        watch: Watcher | None = None,
    ):
        settings.check()
        use_precision(model, options.fp16)
        self.model = model
        self.settings = settings
        if isinstance(recording, Recording):
            recording = Spectrogram(recording, model.dims.n_mels)
        self.spectrogram = recording
        self.duration_s = recording.recording.duration_s
        self.clips = settings.clips(recording.n_frames)
        speech = None
        if settings.vad_filter:
            speech = Speech.of(recording.recording, settings.vad_options)
            self.spectrogram = Spectrogram(speech.recording, model.dims.n_mels)
            kept = [(speech.kept_frame(start), speech.kept_frame(end)) for start, end in self.clips]
            self.clips = [(start, end) for start, end in kept if start < end]
        self.n_frames = self.spectrogram.n_frames
        if settings.cut_at_pauses:
            longest = settings.window_frames
            self.clips = [
                part for clip in self.clips for part in cut(self.spectrogram, *clip, longest)
            ]
        self.policy = settings.policy
        self.language, self.language_probability = self._language(options.language)
        self.tokenizer = get_tokenizer(
            model.is_multilingual,
            num_languages=model.num_languages,
            language=self.language,
            task=options.task,
        )
        self.options = replace(options, language=None if settings.multilingual else self.language)
        self._subject = Subject(
            model,
            self.spectrogram,
            settings,
            self.options,
            self.tokenizer,
            PaddingUse(str(self.policy)),
            watch or Watcher(),
            speech,
        )
        ways = [[clip] for clip in self.clips] if settings.cut_at_pauses else [self.clips]
        # made when they are gone: each holds a window
        self.walks: Iterator[Walk] = (
            Walk(self._subject, way, is_first=i == 0) for i, way in enumerate(ways)
        )
        self.segments: list[Segment] = []
        self.seek = 0

    def __iter__(self) -> Iterator[Segment]:
        return self._running

    def result(self) -> Transcription:
        """The whole transcription, once the rest is done."""
        for _ in self._running:
            pass
        return self.transcription(self.segments)

    def transcription(self, segments: Sequence[Segment]) -> Transcription:
        """What comes of the recording, given its segments."""
        for i, segment in enumerate(segments):
            segment.id = i
        text = self.tokenizer.decode(t for segment in segments for t in segment.tokens)
        use = None if self.settings.padding is None else self._subject.use
        return Transcription(
            text,
            list(segments),
            self.language,
            use,
            self.language_probability,
            self.duration_s,
        )

    def _language(self, given: str | None) -> tuple[str, float]:
        """The language, and its probability: 1 if it was given."""
        if given is not None:
            return language_code(given), 1.0
        if not self.model.is_multilingual:
            return "en", 1.0
        # upstream reads the language from the first half minute with *silence* behind it
        policy = self.policy.with_fill("silence") if self.policy == Policy() else self.policy
        start = self.clips[0][0] if self.settings.vad_filter and self.clips else 0
        n_frames = min(self.n_frames - start, N_FRAMES)
        window = self.spectrogram.window(start, n_frames, fill=policy.fill)
        tokenizer = get_tokenizer(True, num_languages=self.model.num_languages)
        memory = encode(self.model, [window], policy)
        ((language, probabilities),) = language_of(self.model, memory, tokenizer)
        return language, probabilities[language]

    @cached_property
    def _running(self) -> Iterator[Segment]:
        """Made when it is asked for: one that is never run to its end keeps this in memory."""
        return self._run()

    def _run(self) -> Iterator[Segment]:
        for walk in self.walks:
            while walk.ask is not None:
                self.seek = walk.seek
                found = walk.tell(*answer(self.model, walk.ask))
                for segment in found:
                    segment.id = len(self.segments)
                    self.segments.append(segment)
                self.seek = walk.seek
                yield from found


def answer(model: Whisper, ask: Ask) -> Answer:
    """The text of one window, and the memory that it was read from."""
    memory = encode(model, [ask.window], ask.policy) if ask.memory is None else ask.memory
    (result,) = decode_memory(model, memory, ask.options)
    return memory, result


def stream(
    model: Whisper,
    audio: Audio,
    settings: Settings | None = None,
    options: DecodingOptions | None = None,
    watch: Watcher | None = None,
) -> Stream:
    """A transcription to iterate: segments come as they are found."""
    settings, options = settings or Settings(), options or DecodingOptions()
    return Stream(model, opened(audio), settings, options, watch)


def opened(audio: Audio) -> Recording:
    """The recording of a file or of 16 kHz samples: see `transcribe`."""
    if isinstance(audio, Recording):
        return audio
    return Recording.of(audio) if isinstance(audio, (np.ndarray, Tensor)) else Recording.open(audio)


def transcribe(
    model: Whisper,
    audio: Audio,
    *,
    verbose: bool | None = None,
    **options: Any,
) -> Transcription:
    """The text, segments and language of a recording of any length.

    audio:   a path ("-": standard input), the bytes of a file, an open file, or 16 kHz samples:
             floats in −1..1 or 16-bit integers, mono or (channels, n)
    verbose: print segments as they are found
    options: fields of Settings and of DecodingOptions, under openai-whisper's names
    """
    from asrmask.writers import line

    running = stream(model, audio, *sorted_out(options))
    for segment in running:
        if verbose:
            print(line(segment), flush=True)
    return running.result()
