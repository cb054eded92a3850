"""Compare one clip between asrmask and another system, and find the first difference."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asrmask.audio.constants import FRAMES_PER_SECOND
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features
from asrmask.comparison import sampling
from asrmask.comparison.divergence import DecodingAttempt, first_divergence, windows
from asrmask.comparison.stages import Stage, compare, worst
from asrmask.comparison.times import Times, times_between
from asrmask.comparison.transcripts import first_difference
from asrmask.decoding.options import DecodingOptions, DecodingResult
from asrmask.errors import AsrmaskError, one_line
from asrmask.evaluation.alignment import n_different
from asrmask.evaluation.score import Errors, errors
from asrmask.model.whisper import Whisper
from asrmask.systems import DecodingSettings, Piece, System, SystemTranscript, upstream
from asrmask.tokenizer.tokenizer import Tokenizer
from asrmask.transcription.result import Transcription
from asrmask.transcription.settings import Settings
from asrmask.transcription.stream import TranscriptionStream
from asrmask.transcription.window_loop import POSITION_S, Callbacks

OPENAI = "openai-whisper"
# fields that openai-whisper's loop does not have (OWN), or sets by itself (FILLED)
OWN = {
    *("vad_filter", "vad_parameters", "hotwords", "multilingual", "chunk_length"),
    *("repetition_penalty", "no_repeat_ngram_size", "padding", "policy_fallback", "cut_at_pauses"),
}
FILLED = {"temperature", "prompt", "fp16"}


@dataclass(frozen=True)
class Scale:
    """Scores texts after normalising, against the reference transcript if it is known."""

    normalise: Callable[[str], str]
    reference: str | None  # normalised

    def errors(self, text: str) -> Errors | None:
        return None if self.reference is None else errors(self.reference, self.normalise(text))

    def n_different(self, theirs: str, ours: str) -> int:
        return n_different(self.normalise(theirs), self.normalise(ours))


@dataclass(frozen=True)
class Run:
    """A recording and its transcription by asrmask."""

    samples: np.ndarray
    stream: TranscriptionStream
    result: Transcription
    attempts: list[DecodingAttempt]
    seconds: float


@dataclass(frozen=True)
class SystemComparison:
    """The comparison of a clip with one system."""

    system: str
    heard: SystemTranscript  # by that system
    seconds: float
    errors: Errors | None
    different: str | None  # the first difference beyond its tolerance; None: equal
    then: str | None  # if that is a stage: the first difference of the texts
    near: str | None  # the first difference if it is within its tolerance: a near tie
    n_words_different: int
    stages: list[Stage] = field(default_factory=list)  # the worst of each layer, over all windows
    times: Times | None = None  # None with openai-whisper

    @property
    def is_equal(self) -> bool:
        return self.different is None


def run(model: Whisper, samples: np.ndarray, settings: Settings, options: DecodingOptions) -> Run:
    """Transcribe samples with asrmask's window loop, and keep every attempt on a window."""
    attempts: list[DecodingAttempt] = []

    def attempt(window: Features, options: DecodingOptions, result: DecodingResult) -> None:
        result = replace(result, audio_features=torch.empty(0))  # large
        attempts.append(DecodingAttempt(stream.seek, window.n_frames, options, result, list(drawn)))
        drawn.clear()

    torch.manual_seed(0)  # fallback temperatures sample
    begun = time.perf_counter()
    with sampling.kept() as drawn:
        stream = TranscriptionStream(
            model, Recording.of(samples), settings, options, Callbacks(on_attempt=attempt)
        )
        result = stream.result()
    return Run(samples, stream, result, attempts, time.perf_counter() - begun)


def written(result: Transcription, tokenizer: Tokenizer) -> list[Piece]:
    """Return segments with the times of their timestamp tokens, not adjusted to word times."""
    begin = tokenizer.timestamp_begin
    found = []
    for segment in result.segments:
        first, last = (segment.tokens or [0])[0], (segment.tokens or [0])[-1]
        offset_s = segment.seek / FRAMES_PER_SECOND
        start = offset_s + (first - begin) * POSITION_S if first >= begin else segment.start
        end = offset_s + (last - begin) * POSITION_S if last >= begin else segment.end
        found.append(Piece(start, end, segment.text))
    return found


@contextmanager
def failing(name: str) -> Iterator[None]:
    """Convert any exception of another system into an AsrmaskError of one line."""
    try:
        yield
    except AsrmaskError:
        raise
    except Exception as error:
        raise AsrmaskError(f"{name} failed: {type(error).__name__}: {one_line(error)}") from error


class UpstreamPeer:
    """Compares every stage of every window with openai-whisper, on the same weights."""

    name = OPENAI

    def __init__(self, other: Any):
        self.other = other  # upstream.twin, or a model like it

    def transcribe(
        self, samples: np.ndarray, settings: Settings, options: DecodingOptions
    ) -> tuple[Any, list[upstream.Attempt]]:
        asked = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in OWN}
        asked |= {
            f.name: getattr(options, f.name) for f in fields(options) if f.name not in FILLED | OWN
        }
        torch.manual_seed(0)
        with failing(self.name):
            return upstream.transcribe(self.other, samples, **asked)

    def warm(self, ours: Run) -> None:
        self.transcribe(ours.samples, ours.stream.settings, ours.stream.options)

    def against(self, ours: Run, asked: DecodingOptions, scale: Scale) -> SystemComparison:
        settings = ours.stream.settings
        begun = time.perf_counter()
        theirs, attempts = self.transcribe(ours.samples, settings, asked)
        seconds = time.perf_counter() - begun

        model = ours.stream.model
        difference = first_difference(ours.result, theirs)
        parting = first_divergence(model, self.other, ours.attempts, attempts, settings)
        if difference is not None and (parting is None or difference.seek < parting.start):
            first: Any = difference
            last = difference.seek
        else:
            first, last = parting, ours.stream.n_frames if parting is None else parting.start
        beyond, found = self._stages(ours, attempts, last)
        near = str(first) if first is not None and first.is_near else None
        different = str(first) if first is not None and not first.is_near else None
        return SystemComparison(
            self.name,
            SystemTranscript.of(theirs),
            seconds,
            scale.errors(theirs["text"]),
            beyond or different,
            different if beyond else None,
            near,
            scale.n_different(theirs["text"], ours.result.text),
            found,
        )

    def _stages(
        self, ours: Run, attempts: Sequence[upstream.Attempt], last: int
    ) -> tuple[str | None, list[Stage]]:
        """Return the first stage beyond its tolerance and the worst of each layer, up to `last`."""
        stream, beyond = ours.stream, None
        found: list[Stage] = []
        for mine, others in windows(ours.attempts, attempts):
            start, attempt = mine[0].start, others[-1]
            if start > last:
                break
            window = stream.spectrogram.window(start, mine[0].n_frames, fill=stream.policy.fill)
            tokens = upstream.opening(self.other, attempt.options) + attempt.result.tokens
            stages = compare(
                stream.model,
                self.other,
                window,
                attempt.mel,
                tokens[: stream.model.dims.n_text_ctx],
                policy=stream.policy,
                start=start,
            )
            first = next((stage for stage in stages if not stage.is_equal), None)
            if beyond is None and first is not None:
                beyond = f"window at {start / FRAMES_PER_SECOND:.2f} s: {first}"
            found = list(worst([*stages, *found]).values())
        return beyond, found


class TextPeer:
    """Compares text and times with any other system."""

    def __init__(self, name: str, system: System):
        self.name = name
        self.system = system

    def transcribe(
        self, samples: np.ndarray, settings: Settings, options: DecodingOptions
    ) -> SystemTranscript:
        words = settings.word_timestamps
        decoding = DecodingSettings(options.beam_size, options.language, options.task, words)
        self.system.load_audio = lambda path: samples  # same samples; no file is read or timed
        with failing(self.name):
            return self.system.transcribe(Path("samples"), decoding)

    def warm(self, ours: Run) -> None:
        self.transcribe(ours.samples, ours.stream.settings, ours.stream.options)

    def against(self, ours: Run, asked: DecodingOptions, scale: Scale) -> SystemComparison:
        begun = time.perf_counter()
        theirs = self.transcribe(ours.samples, ours.stream.settings, asked)
        seconds = time.perf_counter() - begun
        mine = SystemTranscript.of(ours.result)
        if theirs.words is None:  # compare the segment times that the model wrote
            mine = replace(mine, segments=written(ours.result, ours.stream.tokenizer), words=None)
        n_words = scale.n_different(theirs.text, mine.text)
        times = times_between(mine, theirs, scale.normalise)
        different = None
        if n_words:
            different = f"text: {n_words} words differ"
        elif times is not None and not times.is_equal:
            different = f"times: {times}"
        scored = scale.errors(theirs.text)
        return SystemComparison(
            self.name, theirs, seconds, scored, different, None, None, n_words, times=times
        )


Peer = UpstreamPeer | TextPeer
