"""Voice activity detection with Silero VAD, whose package includes the weights.

Silences are cut out, the remaining speech is transcribed as one recording, and its times are then
mapped back.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from asrmask.audio.constants import N_SAMPLES, SAMPLE_RATE
from asrmask.audio.recording import Recording
from asrmask.errors import OptionError

FRAME = 512  # samples per detector call: 32 ms


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
        for name in ("threshold", "neg_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise OptionError(f"{name} must be in 0..1, got {value}")
        for name in ("min_speech_duration_ms", "min_silence_duration_ms", "speech_pad_ms"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not self.max_speech_duration_s > 0:
            raise OptionError(
                f"max_speech_duration_s must be above 0, got {self.max_speech_duration_s}"
            )


@cache
def _silero() -> Any:
    n_threads = torch.get_num_threads()
    import silero_vad  # sets PyTorch's threads to 1 on import

    torch.set_num_threads(n_threads)
    return silero_vad


def _detector() -> Any:
    """A new detector, with empty state."""
    with warnings.catch_warnings():
        # from the package's way of loading its weights
        warnings.simplefilter("ignore", DeprecationWarning)
        return _silero().load_silero_vad()


@torch.no_grad()
def probabilities(recording: Recording) -> np.ndarray:
    """Return the probability of speech in every 32 ms of a recording."""
    detector = _detector()
    found = []
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # frames are too small for more threads
    try:
        for start in range(0, recording.n_samples, N_SAMPLES // FRAME * FRAME):
            stop = min(start + N_SAMPLES // FRAME * FRAME, recording.n_samples)
            n_frames = -(-(stop - start) // FRAME)
            samples = torch.from_numpy(recording.read(start, start + n_frames * FRAME).copy())
            found += [detector(frame, SAMPLE_RATE).item() for frame in samples.split(FRAME)]
    finally:
        torch.set_num_threads(n_threads)
    return np.array(found)


def speech_spans(recording: Recording, options: VadOptions) -> list[tuple[float, float]]:
    """Return the (start, end) of each speech segment in seconds."""
    spans = _silero().utils_vad.get_speech_timestamps_from_probs(
        probabilities(recording).tolist(),
        sampling_rate=SAMPLE_RATE,
        threshold=options.threshold,
        neg_threshold=options.neg_threshold,
        min_speech_duration_ms=options.min_speech_duration_ms,
        max_speech_duration_s=options.max_speech_duration_s,
        min_silence_duration_ms=options.min_silence_duration_ms,
        speech_pad_ms=options.speech_pad_ms,
        audio_length_samples=recording.n_samples,
    )
    return [(span["start"] / SAMPLE_RATE, span["end"] / SAMPLE_RATE) for span in spans]
