"""Run a comparison: transcribe each clip with asrmask and with the other systems."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asrmask.audio.constants import SAMPLE_RATE
from asrmask.comparison.peers import Peer, Run, Scale, SystemComparison, run
from asrmask.decoding.options import DecodingOptions
from asrmask.errors import AudioError, AudioWarning, OptionError
from asrmask.evaluation import corpus
from asrmask.evaluation.corpus import Clip
from asrmask.evaluation.score import Errors
from asrmask.model.whisper import Whisper
from asrmask.systems import SystemTranscript, upstream
from asrmask.transcription import jobs
from asrmask.transcription.settings import Settings

WARM_S = 5  # of the first clip, to warm up every system before timing
MANIFESTS = {".tsv", ".csv", ".jsonl"}


@dataclass(frozen=True)
class Compared:
    """The transcript of a clip by asrmask, and its comparison with each other system."""

    clip: Clip
    duration_s: float
    heard: SystemTranscript
    seconds: float
    errors: Errors | None  # None: no reference transcript
    against: list[SystemComparison]
    language: str  # selects the text normaliser

    @property
    def is_equal(self) -> bool:
        return all(found.is_equal for found in self.against)


def clips_of(sources: Sequence[str], reference: str | None = None) -> list[Clip]:
    """Find the clips of sources: files, folders of files, and data sets with transcripts.

    reference: transcript of the file, if there is exactly one
    """
    found: list[Clip] = []
    for source in sources:
        path = Path(source)
        if path.suffix in MANIFESTS or (path.is_dir() and corpus.is_data_set(path)):
            found += corpus.read(path)
        else:
            found += [Clip(Path(name)) for name in jobs.files_of(source)]
    if reference is not None:
        if len(found) != 1:
            raise OptionError(f"--reference is for one file, got {len(found)}: use a manifest")
        return [replace(found[0], text=reference)]
    return found


class Comparison:
    """asrmask and the other systems, loaded once for all clips."""

    def __init__(
        self,
        model: Whisper,
        opponents: Sequence[Peer],
        settings: Settings,
        options: DecodingOptions,
    ):
        self.model = model
        self.opponents = opponents
        self.settings = settings
        self.options = replace(options, fp16=False)
        self.is_warm = False

    def compare(self, clip: Clip) -> Compared:
        """Transcribe a clip with all systems and compare the results."""
        samples = samples_of(clip)
        if not self.is_warm:
            self._warm(samples)
        ours = self._run(samples)
        language = ours.result.language if clip.text is None else clip.language
        if self.options.task == "translate":
            language = "en"
        normalise = upstream.normalizer(language)
        scale = Scale(normalise, None if clip.text is None else normalise(clip.text))
        against = [opponent.against(ours, self.options, scale) for opponent in self.opponents]
        return Compared(
            clip,
            len(samples) / SAMPLE_RATE,
            SystemTranscript.of(ours.result),
            ours.seconds,
            scale.errors(ours.result.text),
            against,
            language,
        )

    def _run(self, samples: np.ndarray) -> Run:
        return run(self.model, samples, self.settings, self.options)

    def _warm(self, samples: np.ndarray) -> None:
        """Run the first seconds through all systems: timing must exclude compiling and loading."""
        ours = self._run(samples[: WARM_S * SAMPLE_RATE])
        for opponent in self.opponents:
            opponent.warm(ours)
        self.is_warm = True


def samples_of(clip: Clip) -> np.ndarray:
    """Read all samples of a clip; raise if it is broken or shorter than a frame."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", AudioWarning)  # do not compare truncated audio
        try:
            recording = clip.recording()
        except AudioWarning as problem:
            raise AudioError(str(problem)) from None
    recording.check_length(str(clip.path))
    return recording.read(0, recording.n_samples)
