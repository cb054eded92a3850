"""One clip through asrmask, and then beside another system: what differs, and where first."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asrmask import upstream
from asrmask.alignment import n_different
from asrmask.audio import FRAMES_PER_SECOND, Features, Recording
from asrmask.comparison import draws
from asrmask.comparison.partings import Attempt, first_parting, windows
from asrmask.comparison.stages import Stage, compare, worst
from asrmask.comparison.times import Times, times_between
from asrmask.comparison.transcripts import first_difference
from asrmask.decoding import DecodingOptions, DecodingResult
from asrmask.errors import AsrmaskError, one_line
from asrmask.model import Whisper
from asrmask.score import Errors, errors
from asrmask.settings import Settings
from asrmask.systems import Decoding, Heard, Piece, System
from asrmask.tokenizer import Tokenizer
from asrmask.transcriber import Stream
from asrmask.transcription import Transcription
from asrmask.walk import POSITION_S, Watcher

OPENAI = "openai-whisper"
# fields of ours that openai-whisper's loop does not have, or that it fills in by itself
OWN = {
    *("vad_filter", "vad_parameters", "hotwords", "multilingual", "chunk_length"),
    *("repetition_penalty", "no_repeat_ngram_size", "padding", "policy_fallback", "cut_at_pauses"),
}
FILLED = {"temperature", "prompt", "fp16"}


@dataclass(frozen=True)
class Scale:
    """How texts are measured: normalised, and against what was said if that is known."""

    normalise: Callable[[str], str]
    reference: str | None  # normalised

    def errors(self, text: str) -> Errors | None:
        return None if self.reference is None else errors(self.reference, self.normalise(text))

    def n_different(self, theirs: str, ours: str) -> int:
        return n_different(self.normalise(theirs), self.normalise(ours))


@dataclass(frozen=True)
class Run:
    """A recording, as asrmask transcribed it."""

    samples: np.ndarray
    stream: Stream
    result: Transcription
    attempts: list[Attempt]
    seconds: float


@dataclass(frozen=True)
class Against:
    """What came of a clip beside one system."""

    system: str
    heard: Heard  # by that system
    seconds: float
    errors: Errors | None
    different: str | None  # the first difference beyond its tolerance; None: equal
    then: str | None  # where that is a stage: where the texts part
    near: str | None  # one within its tolerance that is worth a word: a near tie
    n_words_different: int
    stages: list[Stage] = field(default_factory=list)  # the worst of each layer, over all windows
    times: Times | None = None  # of other systems than openai-whisper

    @property
    def is_equal(self) -> bool:
        return self.different is None


def run(model: Whisper, samples: np.ndarray, settings: Settings, options: DecodingOptions) -> Run:
    """Samples through asrmask's window loop, every attempt on a window kept."""
    attempts: list[Attempt] = []

    def attempt(window: Features, options: DecodingOptions, result: DecodingResult) -> None:
        result = replace(result, audio_features=torch.empty(0))  # they are large
        attempts.append(Attempt(stream.seek, window.n_frames, options, result, list(drawn)))
        drawn.clear()

    torch.manual_seed(0)  # fallback temperatures draw
    begun = time.perf_counter()
    with draws.kept() as drawn:
        stream = Stream(model, Recording.of(samples), settings, options, Watcher(attempt=attempt))
        result = stream.result()
    return Run(samples, stream, result, attempts, time.perf_counter() - begun)


def heard(result: Mapping[str, Any]) -> Heard:
    """A transcription of ours or of openai-whisper's, as other systems give theirs."""
    segments = [Piece(s["start"], s["end"], s["text"]) for s in result["segments"]]
    words = None
    if any("words" in s for s in result["segments"]):
        words = [
            Piece(float(w["start"]), float(w["end"]), w["word"])
            for s in result["segments"]
            for w in s.get("words", [])
        ]
    return Heard(result["text"], segments, words, result["language"])


def written(result: Transcription, tokenizer: Tokenizer) -> list[Piece]:
    """Segments with the times that their tokens say, before those of words took their place."""
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
    """Within it, whatever another system raises becomes one line of ours."""
    try:
        yield
    except AsrmaskError:
        raise
    except Exception as error:
        raise AsrmaskError(f"{name} failed: {type(error).__name__}: {one_line(error)}") from error


class OpenaiWhisper:
    """openai-whisper with the same weights: every stage of every window is compared."""

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

    def against(self, ours: Run, asked: DecodingOptions, scale: Scale) -> Against:
        settings = ours.stream.settings
        begun = time.perf_counter()
        theirs, attempts = self.transcribe(ours.samples, settings, asked)
        seconds = time.perf_counter() - begun

        model = ours.stream.model
        difference = first_difference(ours.result, theirs)
        parting = first_parting(model, self.other, ours.attempts, attempts, settings)
        if difference is not None and (parting is None or difference.seek < parting.start):
            first: Any = difference
            last = difference.seek
        else:
            first, last = parting, ours.stream.n_frames if parting is None else parting.start
        beyond, found = self._stages(ours, attempts, last)
        near = str(first) if first is not None and first.is_near else None
        different = str(first) if first is not None and not first.is_near else None
        return Against(
            self.name,
            heard(theirs),
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
        """The first stage beyond its tolerance, and each layer's worst, in windows up to last."""
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


class AnotherSystem:
    """Another system: text and times are compared."""

    def __init__(self, name: str, system: System):
        self.name = name
        self.system = system

    def transcribe(
        self, samples: np.ndarray, settings: Settings, options: DecodingOptions
    ) -> Heard:
        words = settings.word_timestamps
        decoding = Decoding(options.beam_size, options.language, options.task, words)
        self.system.load_audio = lambda path: samples  # those of asrmask: no file is read, or timed
        with failing(self.name):
            return self.system.transcribe(Path("samples"), decoding)

    def warm(self, ours: Run) -> None:
        self.transcribe(ours.samples, ours.stream.settings, ours.stream.options)

    def against(self, ours: Run, asked: DecodingOptions, scale: Scale) -> Against:
        begun = time.perf_counter()
        theirs = self.transcribe(ours.samples, ours.stream.settings, asked)
        seconds = time.perf_counter() - begun
        mine = heard(ours.result)
        if theirs.words is None:  # times of segments: those that the model wrote, in both
            mine = replace(mine, segments=written(ours.result, ours.stream.tokenizer), words=None)
        n_words = scale.n_different(theirs.text, mine.text)
        times = times_between(mine, theirs, scale.normalise)
        different = None
        if n_words:
            different = f"text: {n_words} words differ"
        elif times is not None and not times.is_equal:
            different = f"times: {times}"
        scored = scale.errors(theirs.text)
        return Against(
            self.name, theirs, seconds, scored, different, None, None, n_words, times=times
        )


Opponent = OpenaiWhisper | AnotherSystem
