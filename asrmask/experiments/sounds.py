"""The clips of an ablation as cells hear them: speech, controls, and what is added at the end."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from asrmask.audio import SAMPLE_RATE
from asrmask.corpus import Clip
from asrmask.experiments.spec import Trailing

NOTHING_S = 5.0  # of silence and of noise, in which nothing is said
NOTHING_DB = -40.0


@dataclass(frozen=True)
class Sound:
    """A clip as the run hears it."""

    id: str
    load: Callable[[], np.ndarray]  # its samples, at most 30 s
    seconds: float
    text: str | None  # what is said; None: not scored
    language: str
    speaker: str | None = None
    kind: str = "speech"  # or "half minute", "nothing"
    path: str | None = None  # of its file, if it is one


def controls(sounds: Sequence[Sound], seed: int) -> list[Sound]:
    """Clips for controls: one of 30 s, where every mask is a no-op, and two without speech."""
    language = sounds[0].language
    n_whole, n_nothing = 30 * SAMPLE_RATE, int(NOTHING_S * SAMPLE_RATE)

    def whole() -> np.ndarray:
        parts: list[np.ndarray] = []
        n = 0
        while n < n_whole:
            parts.append(sounds[len(parts) % len(sounds)].load())
            n += len(parts[-1])
        return np.concatenate(parts)[:n_whole]

    def nothing(level_db: float) -> Callable[[], np.ndarray]:
        return lambda: _noise(np.random.default_rng(seed), n_nothing, level_db)

    return [
        Sound("control: 30 s", whole, 30.0, None, language, kind="half minute"),
        *(
            Sound(f"control: {name}", nothing(level), NOTHING_S, "", language, kind="nothing")
            for name, level in (("silence", -90.0), ("noise", NOTHING_DB))
        ),
    ]


def _noise(rng: np.random.Generator, n: int, level_db: float) -> np.ndarray:
    return rng.standard_normal(n, np.float32) * np.float32(10 ** (level_db / 20))


def with_trailing(sound: Sound, trailing: Trailing, seed: int) -> np.ndarray:
    """The clip's samples, with what the cell adds to their end."""
    samples = sound.load()
    if not trailing.seconds:
        return samples
    n = round(trailing.seconds * SAMPLE_RATE)
    if trailing.noise_db is None:
        return np.pad(samples, (0, n))
    return np.concatenate([samples, _noise(rng_of(sound, seed), n, trailing.noise_db)])


def rng_of(sound: Sound, seed: int) -> np.random.Generator:
    """Random numbers of a clip's own, the same in every run."""
    digest = hashlib.sha256(f"{seed} {sound.id}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def sound_of(clip: Clip, seconds: float) -> Sound:
    """A clip as it is heard: its first 30 s."""

    def load() -> np.ndarray:
        recording = clip.recording()
        return recording.read(0, min(recording.n_samples, 30 * SAMPLE_RATE))

    seconds = min(seconds, 30.0)
    path = str(clip.path.resolve()) if clip.data is None else None
    return Sound(clip.id, load, seconds, clip.text, clip.language, clip.speaker, path=path)


def batches(sounds: Sequence[Sound], size: int) -> list[list[Sound]]:
    """Clips of one language and similar length together."""
    order = sorted(sounds, key=lambda s: (s.kind, s.language, s.seconds, s.id))
    found: list[list[Sound]] = []
    for sound in order:
        last = found[-1] if found else None
        alike = last and (last[0].kind, last[0].language) == (sound.kind, sound.language)
        if last is None or not alike or len(last) == size:
            found.append([sound])
        else:
            last.append(sound)
    return found
