"""Voice activity detection with Silero VAD, whose package includes the weights."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from asrmask.audio.constants import N_SAMPLES, SAMPLE_RATE
from asrmask.audio.recording import Recording
from asrmask.errors import OptionError

FRAME = 512  # samples per detector call: 32 ms
BLOCK = N_SAMPLES // FRAME * FRAME  # samples in memory at a time


@dataclass(frozen=True)
class VadOptions:
    """Rules for what counts as speech, with faster-whisper's names and defaults."""

    threshold: float = 0.5  # probability above which speech begins
    neg_threshold: float | None = None  # below which it ends; default: threshold − 0.15
    min_speech_duration_ms: int = 0  # shorter speech is dropped
    max_speech_duration_s: float = float("inf")  # longer speech is split, at a silence if any
    min_silence_duration_ms: int = 2000  # shorter silence does not end speech
    speech_pad_ms: int = 400  # kept before and after

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is None:
                continue
            if name.endswith("threshold") and not 0 <= value <= 1:
                raise OptionError(f"{name} must be in 0..1, got {value}")
            if name.endswith("_ms") and not value >= 0:
                raise OptionError(f"{name} must be 0 or more, got {value}")
            if name.endswith("_s") and not value > 0:
                raise OptionError(f"{name} must be above 0, got {value}")


@cache
def _silero() -> Any:
    n_threads = torch.get_num_threads()
    import silero_vad  # sets PyTorch's threads to 1 on import

    torch.set_num_threads(n_threads)
    return silero_vad


def _detector() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from silero_vad's loading of weights
        return _silero().load_silero_vad()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Frames are too small for more threads."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


class LiveDetector:
    """Voice activity of audio that is still arriving. It keeps the detector's state."""

    def __init__(self) -> None:
        self._detector = _detector()

    @torch.no_grad()
    def probability(self, samples: np.ndarray) -> float:
        """Return the probability of speech in the next FRAME samples."""
        with _one_thread():
            return self._detector(torch.from_numpy(samples), SAMPLE_RATE).item()


@torch.no_grad()
def probabilities(recording: Recording) -> np.ndarray:
    """Return the probability of speech in every 32 ms of a recording."""
    detector = _detector()
    probs: list[float] = []
    with _one_thread():
        for start in range(0, recording.n_samples, BLOCK):
            n_frames = -(-min(BLOCK, recording.n_samples - start) // FRAME)
            samples = torch.from_numpy(recording.read(start, start + n_frames * FRAME).copy())
            probs += [detector(frame, SAMPLE_RATE).item() for frame in samples.split(FRAME)]
    return np.array(probs)


def speech_spans(recording: Recording, options: VadOptions) -> list[tuple[float, float]]:
    """Return the (start, end) of each speech segment in seconds."""
    spans = _silero().utils_vad.get_speech_timestamps_from_probs(
        probabilities(recording).tolist(),
        sampling_rate=SAMPLE_RATE,
        audio_length_samples=recording.n_samples,
        **vars(options),
    )
    return [(span["start"] / SAMPLE_RATE, span["end"] / SAMPLE_RATE) for span in spans]
