"""Remove silences from a recording, for vad_filter, or split it at pauses, for cut_at_pauses."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf

import numpy as np

from asrmask.audio.constants import FRAMES_PER_SECOND, HOP_LENGTH, SAMPLE_RATE
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Spectrogram
from asrmask.transcription.result import Segment

PAUSE = 30  # frames over which loudness is averaged: 0.3 s


class Speech:
    """A recording with its silences removed, and the mapping back to its original times.

    recording: the speech, joined
    """

    def __init__(
        self, original: Recording, spans: Sequence[tuple[float, float]], margin_s: float = 0
    ):
        """spans: parts with speech, in seconds, sorted; margin_s: silence at both of their ends"""
        self.original = original
        self.margin_s = margin_s
        self.spans: list[tuple[int, int]] = []  # in samples; adjacent spans are merged
        for span in spans:
            start, end = (round(time * SAMPLE_RATE) for time in span)
            if self.spans and self.spans[-1][1] == start:
                start = self.spans.pop()[0]
            self.spans.append((start, end))
        # start of each span in the joined speech, and the end of the last
        self.offsets = [0, *accumulate(end - start for start, end in self.spans)]
        self.cuts_s = [offset / SAMPLE_RATE for offset in self.offsets[1:-1]]
        self.recording = Recording(self.offsets[-1], self._read)

    def _read(self, start: int, stop: int) -> np.ndarray:
        parts = [np.empty(0, dtype=np.float32)]
        for i in range(bisect_right(self.offsets, start) - 1, bisect_left(self.offsets, stop)):
            span_start, span_end = self.spans[i]
            shift = span_start - self.offsets[i]
            first, last = max(span_start, start + shift), min(span_end, stop + shift)
            parts.append(self.original.read(first, last))
        return np.concatenate(parts)

    def frame(self, original_frame: int) -> int:
        """Map a frame of the original to the joined speech; in a silence: to the next frame."""
        sample = original_frame * HOP_LENGTH
        n_before = sum(min(end, sample) - start for start, end in self.spans if start < sample)
        return round(n_before / HOP_LENGTH)

    def restore(self, segment: Segment) -> None:
        """Convert a segment's times from the joined speech to the original, in place."""
        if not self.spans:
            return
        seek_s = segment.seek / FRAMES_PER_SECOND
        segment.seek = round(self._original_times(seek_s, seek_s, 0)[0] * FRAMES_PER_SECOND)
        segment.start, segment.end = self._original_times(segment.start, segment.end, self.margin_s)
        for word in segment.words or ():  # a word is in one span
            word.start, word.end = self._original_times(word.start, word.end, inf)
        if segment.words:
            segment.start, segment.end = segment.words[0].start, segment.words[-1].end

    def _original_times(self, start: float, end: float, margin_s: float) -> tuple[float, float]:
        """Map times to the original; a time across a cut by at most margin_s moves to the cut."""
        middle = bisect_right(self.cuts_s, (start + end) / 2)
        first = min(middle, bisect_right(self.cuts_s, start + margin_s))
        last = max(middle, bisect_left(self.cuts_s, end - margin_s))
        return self._original_time(first, start), self._original_time(last, end)

    def _original_time(self, i: int, time: float) -> float:
        """Map a time to the original, clamped to span i."""
        start, end = (sample / SAMPLE_RATE for sample in self.spans[i])
        original = max(start + time - self.offsets[i] / SAMPLE_RATE, start)
        return min(round(original, 2), end)


def split_at_pauses(
    spectrogram: Spectrogram, start: int, end: int, max_frames: int
) -> list[tuple[int, int]]:
    """Split frames start..end into (start, end) parts of at most `max_frames` frames."""
    end = min(end, spectrogram.n_frames)
    if end - start <= max_frames:
        return [(start, end)] if start < end else []
    n_parts = -(-(end - start) // (max_frames // 2))
    reach = max_frames // 6 + PAUSE // 2  # frames to search on each side of an even split
    splits = [start]
    for i in range(1, n_parts):
        first = start + (end - start) * i // n_parts - reach
        nearby = spectrogram.loudness[first : first + 2 * reach]
        averages = nearby.unfold(0, PAUSE, 1).mean(dim=-1)
        splits.append(first + int(averages.argmin()) + PAUSE // 2)
    return list(zip(splits, [*splits[1:], end], strict=True))
