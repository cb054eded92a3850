"""The clips of an ablation: speech, controls, and silence or noise added at the end."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from asrmask.ablation.spec import Trailing
from asrmask.audio.constants import SAMPLE_RATE
from asrmask.audio.noise import white_noise
from asrmask.evaluation.corpus import Clip

NOTHING_S = 5.0  # length of the controls without speech: silence and noise
NOTHING_DB = -40.0


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


def controls(sounds: Sequence[AblationClip], seed: int) -> list[AblationClip]:
    """Return control clips: one of 30 s, where every mask is a no-op, and two without speech."""
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
        return lambda: white_noise(np.random.default_rng(seed), n_nothing, level_db)

    return [
        AblationClip("control: 30 s", whole, 30.0, None, language, kind="half minute"),
        *(
            AblationClip(
                f"control: {name}", nothing(level), NOTHING_S, "", language, kind="nothing"
            )
            for name, level in (("silence", -90.0), ("noise", NOTHING_DB))
        ),
    ]


def with_trailing(sound: AblationClip, trailing: Trailing, seed: int) -> np.ndarray:
    """Return the samples of a clip, followed by the cell's trailing silence or noise."""
    samples = sound.load()
    if not trailing.seconds:
        return samples
    n = round(trailing.seconds * SAMPLE_RATE)
    if trailing.noise_db is None:
        return np.pad(samples, (0, n))
    return np.concatenate([samples, white_noise(clip_rng(sound, seed), n, trailing.noise_db)])


def clip_rng(sound: AblationClip, seed: int) -> np.random.Generator:
    """Return a random generator for a clip, seeded the same in every run."""
    digest = hashlib.sha256(f"{seed} {sound.id}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def sound_of(clip: Clip, seconds: float) -> AblationClip:
    """Convert a corpus clip, cut to its first 30 s."""

    def load() -> np.ndarray:
        recording = clip.recording()
        return recording.read(0, min(recording.n_samples, 30 * SAMPLE_RATE))

    seconds = min(seconds, 30.0)
    path = str(clip.path.resolve()) if clip.data is None else None
    return AblationClip(clip.id, load, seconds, clip.text, clip.language, clip.speaker, path=path)


def batches(sounds: Sequence[AblationClip], size: int) -> list[list[AblationClip]]:
    """Group clips into batches of one kind, one language and similar length."""
    order = sorted(sounds, key=lambda s: (s.kind, s.language, s.seconds, s.id))
    found: list[list[AblationClip]] = []
    for sound in order:
        last = found[-1] if found else None
        alike = last and (last[0].kind, last[0].language) == (sound.kind, sound.language)
        if last is None or not alike or len(last) == size:
            found.append([sound])
        else:
            last.append(sound)
    return found
