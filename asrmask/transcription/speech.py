"""Remove silences from a recording, for vad_filter."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf

import numpy as np

from asrmask.audio.constants import FRAMES_PER_SECOND, HOP_LENGTH, SAMPLE_RATE
from asrmask.audio.recording import Recording
from asrmask.audio.vad import VadOptions, speech_spans
from asrmask.transcription.result import Segment


class Speech:
    """A recording with its silences removed, and the mapping back to its original times.

    recording: the kept speech, joined
    """

    def __init__(self, whole: Recording, spans: Sequence[tuple[float, float]], slack_s: float = 0):
        """spans: parts to keep, in seconds, sorted; slack_s: margin without speech at their ends"""
        self.whole = whole
        self.slack_s = slack_s
        self.spans: list[tuple[int, int]] = []  # in samples; adjacent spans are merged
        for span in spans:
            start, end = (round(time * SAMPLE_RATE) for time in span)
            if self.spans and self.spans[-1][1] == start:
                start = self.spans.pop()[0]
            self.spans.append((start, end))
        # start of each span in the kept speech, and the end of the last
        self.begins = [0, *accumulate(end - start for start, end in self.spans)]
        self.cuts_s = [begin / SAMPLE_RATE for begin in self.begins[1:-1]]
        self.recording = Recording(self.begins[-1], self._read)

    @classmethod
    def of(cls, whole: Recording, options: VadOptions) -> "Speech":
        """Keep what the voice activity detector classifies as speech."""
        return cls(whole, speech_spans(whole, options), options.speech_pad_ms / 1000)

    def _read(self, start: int, stop: int) -> np.ndarray:
        parts = [np.empty(0, dtype=np.float32)]
        for i in range(bisect_right(self.begins, start) - 1, bisect_left(self.begins, stop)):
            first, end = self.spans[i]
            moved = first - self.begins[i]
            parts.append(self.whole.read(max(first, start + moved), min(end, stop + moved)))
        return np.concatenate(parts)

    def kept_frame(self, frame: int) -> int:
        """Map a frame of the recording to the kept speech; in a silence: to the next kept frame."""
        sample = frame * HOP_LENGTH
        n_before = sum(min(end, sample) - start for start, end in self.spans if start < sample)
        return round(n_before / HOP_LENGTH)

    def restore(self, segment: Segment) -> None:
        """Convert a segment's times from the kept speech to the recording, in place."""
        if not self.spans:
            return
        segment.seek = round(self._time(segment.seek / FRAMES_PER_SECOND) * FRAMES_PER_SECOND)
        segment.start, segment.end = self._times(segment.start, segment.end, self.slack_s)
        for word in segment.words or ():  # a word is in one span
            word.start, word.end = self._times(word.start, word.end, inf)
        if segment.words:
            segment.start, segment.end = segment.words[0].start, segment.words[-1].end

    def _time(self, time: float) -> float:
        return self._times(time, time, 0)[0]

    def _times(self, start: float, end: float, slack_s: float) -> tuple[float, float]:
        """Map times to the recording; a time across a cut by at most slack_s moves to the cut."""
        middle = bisect_right(self.cuts_s, (start + end) / 2)
        first = min(middle, bisect_right(self.cuts_s, start + slack_s))
        last = max(middle, bisect_left(self.cuts_s, end - slack_s))
        return self._within(first, start), self._within(last, end)

    def _within(self, i: int, time: float) -> float:
        """Map a time in the kept speech to the recording, clamped to span i."""
        start, end = self.spans[i]
        found = start / SAMPLE_RATE + time - self.begins[i] / SAMPLE_RATE
        found = max(found, start / SAMPLE_RATE)
        return min(round(found, 2), end / SAMPLE_RATE)
