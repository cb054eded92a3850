"""What is trained on: clips of a data set, whole or cut, in batches of like lengths.

Every draw follows from the seed and from what it is for. So a run that is resumed draws what it
would have drawn, and no state of a random generator is kept.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from asrmask.audio.constants import CHUNK_LENGTH, N_SAMPLES, SAMPLE_RATE
from asrmask.evaluation import corpus
from asrmask.evaluation.corpus import Clip
from asrmask.training.spec import TrainSpec

MIN_CUT_S = 1.0
SORTED_BATCHES = 8  # so many batches of random clips are sorted by length, and cut into batches


def rng(*key: object) -> np.random.Generator:
    """A random generator for a purpose: the same key gives the same numbers."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


@dataclass(frozen=True)
class Example:
    """A clip up to a sample. A cut one ends anywhere, also in the middle of a word."""

    clip: Clip
    n_samples: int
    is_cut: bool = False

    def samples(self) -> np.ndarray:
        """(n_samples,) float32"""
        return self.clip.recording().read(0, self.n_samples)


def versions_of(clip: Clip, seconds: float, n_cuts: int) -> list[Example]:
    """The whole clip, then versions of it that end early: always the same for a clip."""
    n_samples = min(round(seconds * SAMPLE_RATE), N_SAMPLES)
    first = min(round(MIN_CUT_S * SAMPLE_RATE), n_samples)
    ends = rng("cuts", clip.id).integers(first, n_samples + 1, n_cuts)
    return [Example(clip, n_samples), *(Example(clip, int(end), True) for end in ends)]


def split(clips: Sequence[Clip], n_held_out: int) -> tuple[list[Clip], list[Clip]]:
    """Clips to train on, and clips to validate: the same ones whatever the seed."""
    order = sorted(clips, key=lambda clip: hashlib.sha256(clip.id.encode()).digest())
    held_out = {clip.id for clip in order[:n_held_out]}
    return (
        [clip for clip in clips if clip.id not in held_out],
        [clip for clip in clips if clip.id in held_out],
    )


class Batches:
    """Batches without end: in each epoch every clip once, in one of its versions."""

    def __init__(self, versions: Sequence[Sequence[Example]], size: int, seed: int):
        """versions: of each clip"""
        self.versions, self.size, self.seed = versions, size, seed
        self.n_per_epoch = -(-len(versions) // size)
        self._epoch = lru_cache(2)(self._make_epoch)

    def __getitem__(self, index: int) -> list[Example]:
        epoch, i = divmod(index, self.n_per_epoch)
        return self._epoch(epoch)[i]

    def _make_epoch(self, epoch: int) -> list[list[Example]]:
        draw = rng("epoch", self.seed, epoch)
        drawn = [
            self.versions[i][int(draw.integers(len(self.versions[i])))]
            for i in draw.permutation(len(self.versions))
        ]
        stretch = SORTED_BATCHES * self.size
        alike: list[Example] = []
        for i in range(0, len(drawn), stretch):
            alike += sorted(drawn[i : i + stretch], key=lambda example: example.n_samples)
        batches = [alike[i : i + self.size] for i in range(0, len(alike), self.size)]
        return [batches[i] for i in draw.permutation(len(batches))]


def usable(source: Path, spec: TrainSpec) -> tuple[list[Clip], dict[str, float], dict[str, str]]:
    """Clips that can be trained on, their seconds by id, and the problem of each other one."""
    clips = corpus.read(source)
    needs_text = not spec.losses.is_distilling
    durations_s, problems = corpus.check(clips, needs_text)
    for name, seconds in list(durations_s.items()):
        if seconds > CHUNK_LENGTH:
            problems[name] = f"longer than {CHUNK_LENGTH} s, {seconds:.1f} s"
            del durations_s[name]
    return [clip for clip in clips if clip.id in durations_s], durations_s, problems
