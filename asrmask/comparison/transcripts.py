"""Compare two transcripts: all fields (openai-whisper), or only the times (other systems)."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jiwer

from asrmask.systems import SystemTranscript, TimedText

TIME_S = 0.02  # one position: the alignment path through the attention can be a near tie
ROUNDING_S = 1e-6
SEGMENT_FIELDS = ("seek", "start", "end", "text", "tokens", "temperature")
WORD_FIELDS = ("word", "start", "end")
OTHERS_TIME_S = 0.5  # wide: other systems compute times differently


@dataclass(frozen=True)
class FieldDifference:
    """One field that differs, with a description."""

    start: int  # first frame of its window
    description: str
    is_near: bool = False  # whether it is a time difference within the tolerance

    def __str__(self) -> str:
        return f"{self.description} (within {TIME_S} s)" if self.is_near else self.description


def first_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> FieldDifference | None:
    """Return the first difference in text, tokens, times or words; None if there is none.

    A difference beyond its tolerance is preferred to one within. A time within its tolerance may
    shift the start of the next window, so differences in later windows are then ignored.
    """
    near = None
    for difference in _differences(ours, theirs):
        if near is not None and difference.start != near.start:
            break
        if not difference.is_near:
            return difference
        near = near or difference
    return near


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[FieldDifference]:
    """Yield all differences in order; probabilities are not compared."""
    if ours["language"] != theirs["language"]:
        yield FieldDifference(0, f"language: ours {ours['language']}, theirs {theirs['language']}")
    seek = 0
    for a, b in zip(ours["segments"], theirs["segments"], strict=False):
        name, seek = f"segment {a['id']}", a["seek"]
        words, others = a.get("words", []), b.get("words", [])
        parts = [(name, field, a[field], b[field]) for field in SEGMENT_FIELDS]
        for i, (word, other) in enumerate(zip(words, others, strict=False)):
            parts += [(f"{name}, word {i}", f, word[f], other[f]) for f in WORD_FIELDS]
        for part, field, x, y in parts:
            if x != y:
                is_near = field in {"start", "end"} and abs(x - y) <= TIME_S + ROUNDING_S
                yield FieldDifference(seek, f"{part}, {field}: ours {x!r}, theirs {y!r}", is_near)
        if len(words) != len(others):
            yield FieldDifference(seek, f"{name}: other words")
    n_ours, n_theirs = len(ours["segments"]), len(theirs["segments"])
    if n_ours != n_theirs:
        more = max(ours["segments"], theirs["segments"], key=len)[min(n_ours, n_theirs)]
        yield FieldDifference(more["seek"], f"ours {n_ours} segments, theirs {n_theirs}")
    if ours["text"] != theirs["text"]:
        yield FieldDifference(seek, "text")


@dataclass(frozen=True)
class TimeDifferences:
    """Absolute differences of start and end times, in seconds."""

    unit: str  # "words" or "segments"
    n: int  # number of times compared
    median_s: float
    largest_s: float

    @property
    def is_equal(self) -> bool:
        return self.largest_s <= OTHERS_TIME_S

    def __str__(self) -> str:
        return (
            f"{self.n} times of {self.unit}: {self.median_s:.2f} s apart at the median, "
            f"{self.largest_s:.2f} s at most (tolerance {OTHERS_TIME_S} s)"
        )


def compare_times(
    ours: SystemTranscript, theirs: SystemTranscript, normalise: Callable[[str], str]
) -> TimeDifferences | None:
    """Compare the starts and ends of words that both have; None if there are none.

    If either has no word times, compare starts and ends of segments, at words that start or end a
    segment in both.
    """
    unit = "words" if ours.words and theirs.words else "segments"
    mine, others = (_word_times(getattr(side, unit), normalise) for side in (ours, theirs))
    if not mine or not others:
        return None
    reference, hypothesis = (" ".join(word for word, *_ in words) for words in (mine, others))
    apart = [
        abs(x - y)
        for chunk in jiwer.process_words(reference, hypothesis).alignments[0]
        if chunk.type == "equal"
        for (_, *a), (_, *b) in zip(
            mine[chunk.ref_start_idx : chunk.ref_end_idx],
            others[chunk.hyp_start_idx : chunk.hyp_end_idx],
            strict=True,
        )
        for x, y in zip(a, b, strict=True)
        if x is not None and y is not None
    ]
    if not apart:
        return None
    return TimeDifferences(unit, len(apart), statistics.median(apart), max(apart))


def _word_times(
    texts: Sequence[TimedText], normalise: Callable[[str], str]
) -> list[tuple[str, float | None, float | None]]:
    """Return each normalised word, with the start of its text if first in it, the end if last."""
    found = []
    for text in texts:
        words = normalise(text.text).split()
        for i, word in enumerate(words):
            start = text.start if i == 0 else None
            found.append((word, start, text.end if i == len(words) - 1 else None))
    return found
