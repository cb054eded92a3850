"""The clips of an ablation: speech, controls, and silence or noise added at the end."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from asrmask.ablation.spec import Trailing
from asrmask.audio.constants import N_SAMPLES, SAMPLE_RATE
from asrmask.audio.spectrogram import white_noise
from asrmask.evaluation.corpus import Clip

NO_SPEECH_S = 5.0  # length of the controls without speech
NO_SPEECH_DB = {"silence": -90.0, "noise": -40.0}


@dataclass(frozen=True)
class AblationClip:
    """A clip as it enters the model."""

    id: str
    load: Callable[[], np.ndarray]  # returns the samples, at most 30 s
    seconds: float
    text: str | None  # reference transcript; None: not scored
    language: str
    speaker: str | None = None
    kind: str = "speech"  # or "half minute", "nothing"
    path: str | None = None  # of the audio file; None: not from a file


def from_corpus(clip: Clip, seconds: float) -> AblationClip:
    """Convert a clip of a data set, cut to its first 30 s."""

    def load() -> np.ndarray:
        recording = clip.recording()
        return recording.read(0, min(recording.n_samples, N_SAMPLES))

    seconds = min(seconds, 30.0)
    path = str(clip.path.resolve()) if clip.data is None else None
    return AblationClip(clip.id, load, seconds, clip.text, clip.language, clip.speaker, path=path)


def controls(clips: Sequence[AblationClip], seed: int) -> list[AblationClip]:
    """Return control clips: one of 30 s, where every mask is a no-op, and two without speech."""

    def half_minute() -> np.ndarray:
        parts: list[np.ndarray] = []
        while sum(map(len, parts)) < N_SAMPLES:
            parts.append(clips[len(parts) % len(clips)].load())
        return np.concatenate(parts)[:N_SAMPLES]

    def no_speech(name: str) -> AblationClip:
        def load() -> np.ndarray:
            n = int(NO_SPEECH_S * SAMPLE_RATE)
            return white_noise(np.random.default_rng(seed), n, NO_SPEECH_DB[name])

        return AblationClip(f"control: {name}", load, NO_SPEECH_S, "", language, kind="nothing")

    language = clips[0].language
    return [
        AblationClip("control: 30 s", half_minute, 30.0, None, language, kind="half minute"),
        *map(no_speech, NO_SPEECH_DB),
    ]


def with_trailing(clip: AblationClip, trailing: Trailing, seed: int) -> np.ndarray:
    """Return the samples of a clip, followed by the cell's trailing silence or noise."""
    samples = clip.load()
    n = round(trailing.seconds * SAMPLE_RATE)
    if trailing.noise_db is None:
        return np.pad(samples, (0, n))
    return np.concatenate([samples, white_noise(clip_rng(clip, seed), n, trailing.noise_db)])


def clip_rng(clip: AblationClip, seed: int) -> np.random.Generator:
    """Return a random generator for a clip, seeded the same in every run."""
    digest = hashlib.sha256(f"{seed} {clip.id}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def batches(clips: Sequence[AblationClip], size: int) -> list[list[AblationClip]]:
    """Group clips into batches of one kind, one language and similar length."""
    order = sorted(clips, key=lambda c: (c.kind, c.language, c.seconds, c.id))
    groups = [list(group) for _, group in groupby(order, key=lambda c: (c.kind, c.language))]
    return [group[i : i + size] for group in groups for i in range(0, len(group), size)]
