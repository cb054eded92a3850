"""Where there is speech: Silero's detector, whose weights come with its package.

The speech of a recording is transcribed as one recording, with the silences cut out; its times are
then mapped back.
"""

import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf
from typing import Any

import numpy as np
import torch

from asrmask.audio import FRAMES_PER_SECOND, HOP_LENGTH, N_SAMPLES, SAMPLE_RATE, Recording
from asrmask.errors import OptionError
from asrmask.transcription import Segment

FRAME = 512  # samples that the detector judges at a time: 32 ms


@dataclass(frozen=True)
class VadOptions:
    """What counts as speech; names and defaults are faster-whisper's."""

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
    """A detector that has heard nothing yet."""
    with warnings.catch_warnings():
        # of the ways in which the package finds and reads its weights
        warnings.simplefilter("ignore", DeprecationWarning)
        return _silero().load_silero_vad()


@torch.no_grad()
def probabilities(recording: Recording) -> np.ndarray:
    """The probability of speech in every 32 ms of a recording, read piece by piece."""
    detector = _detector()
    found = []
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the frames are too small to share
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
    """(start, end) of each stretch of speech, in seconds."""
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


class Speech:
    """The speech of a recording with the silences cut out, and when it was said.

    recording: what was kept
    """

    def __init__(self, whole: Recording, spans: Sequence[tuple[float, float]], slack_s: float = 0):
        """spans: parts to keep, in seconds, in order; slack_s: no speech is that near their ends"""
        self.whole = whole
        self.slack_s = slack_s
        self.spans: list[tuple[int, int]] = []  # in samples, with a silence between any two
        for span in spans:
            start, end = (round(time * SAMPLE_RATE) for time in span)
            if self.spans and self.spans[-1][1] == start:
                start = self.spans.pop()[0]
            self.spans.append((start, end))
        # where each span begins in what was kept, and the end of the last
        self.begins = [0, *accumulate(end - start for start, end in self.spans)]
        self.cuts_s = [begin / SAMPLE_RATE for begin in self.begins[1:-1]]
        self.recording = Recording(self.begins[-1], self._read)

    @classmethod
    def of(cls, whole: Recording, options: VadOptions) -> "Speech":
        """What the detector takes for speech."""
        return cls(whole, speech_spans(whole, options), options.speech_pad_ms / 1000)

    def _read(self, start: int, stop: int) -> np.ndarray:
        parts = [np.empty(0, dtype=np.float32)]
        for i in range(bisect_right(self.begins, start) - 1, bisect_left(self.begins, stop)):
            first, end = self.spans[i]
            moved = first - self.begins[i]
            parts.append(self.whole.read(max(first, start + moved), min(end, stop + moved)))
        return np.concatenate(parts)

    def kept_frame(self, frame: int) -> int:
        """The frame of what was kept for a frame of the recording; in a silence: the next one."""
        sample = frame * HOP_LENGTH
        n_before = sum(min(end, sample) - start for start, end in self.spans if start < sample)
        return round(n_before / HOP_LENGTH)

    def restore(self, segment: Segment) -> None:
        """Bring a segment of what was kept to the times of the recording."""
        if not self.spans:
            return
        segment.seek = round(self._time(segment.seek / FRAMES_PER_SECOND) * FRAMES_PER_SECOND)
        segment.start, segment.end = self._times(segment.start, segment.end, self.slack_s)
        for word in segment.words or ():  # each lies in one span
            word.start, word.end = self._times(word.start, word.end, inf)
        if segment.words:
            segment.start, segment.end = segment.words[0].start, segment.words[-1].end

    def _time(self, time: float) -> float:
        return self._times(time, time, 0)[0]

    def _times(self, start: float, end: float, slack_s: float) -> tuple[float, float]:
        """Times in the recording; an end that is past a cut by slack_s or less is moved to it."""
        middle = bisect_right(self.cuts_s, (start + end) / 2)
        first = min(middle, bisect_right(self.cuts_s, start + slack_s))
        last = max(middle, bisect_left(self.cuts_s, end - slack_s))
        return self._within(first, start), self._within(last, end)

    def _within(self, i: int, time: float) -> float:
        """A time of what was kept, as one of the recording that lies in span i."""
        start, end = self.spans[i]
        found = start / SAMPLE_RATE + time - self.begins[i] / SAMPLE_RATE
        found = max(found, start / SAMPLE_RATE)
        return min(round(found, 2), end / SAMPLE_RATE)
