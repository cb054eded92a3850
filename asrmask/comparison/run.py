"""The work: clips through asrmask and beside other systems, one by one."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from asrmask import corpus, jobs, upstream
from asrmask.audio import HOP_LENGTH, SAMPLE_RATE
from asrmask.comparison.against import Against, Opponent, Run, Scale, heard, run
from asrmask.corpus import Clip
from asrmask.decoding import DecodingOptions
from asrmask.errors import AudioError, AudioWarning, OptionError
from asrmask.model import Whisper
from asrmask.score import Errors
from asrmask.settings import Settings
from asrmask.systems import Heard

WARM_S = 5  # of the first clip, through every system before anything is timed
MANIFESTS = {".tsv", ".csv", ".jsonl"}


@dataclass(frozen=True)
class Compared:
    """A clip, as asrmask heard it and beside each of the other systems."""

    clip: Clip
    duration_s: float
    heard: Heard
    seconds: float
    errors: Errors | None  # None: nobody said what is in the clip
    against: list[Against]
    language: str  # whose normaliser texts went through before words were counted

    @property
    def is_equal(self) -> bool:
        return all(found.is_equal for found in self.against)


def clips_of(sources: Sequence[str], reference: str | None = None) -> list[Clip]:
    """The clips that a call names: files, folders of files, and data sets with their transcripts.

    reference: what is said in the one file that is named
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
    """asrmask and its opponents, loaded and set once for all clips."""

    def __init__(
        self,
        model: Whisper,
        opponents: Sequence[Opponent],
        settings: Settings,
        options: DecodingOptions,
    ):
        self.model = model
        self.opponents = opponents
        self.settings = settings
        self.options = replace(options, fp16=False)
        self.is_warm = False

    def compare(self, clip: Clip) -> Compared:
        """One clip through all of them."""
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
            heard(ours.result),
            ours.seconds,
            scale.errors(ours.result.text),
            against,
            language,
        )

    def _run(self, samples: np.ndarray) -> Run:
        return run(self.model, samples, self.settings, self.options)

    def _warm(self, samples: np.ndarray) -> None:
        """The first seconds through all: compiling and loading are not what is to be timed."""
        ours = self._run(samples[: WARM_S * SAMPLE_RATE])
        for opponent in self.opponents:
            opponent.warm(ours)
        self.is_warm = True


def samples_of(clip: Clip) -> np.ndarray:
    """All of a clip; an error if it is broken, or too short to hold a frame."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", AudioWarning)  # half a recording is not what was meant
        try:
            recording = clip.recording()
        except AudioWarning as problem:
            raise AudioError(str(problem)) from None
    if recording.n_samples < HOP_LENGTH:
        raise AudioError(
            f"{clip.path}: too short, got {recording.n_samples} samples, "
            f"expected {HOP_LENGTH} or more"
        )
    return recording.read(0, recording.n_samples)
