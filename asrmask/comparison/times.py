"""Compare the times of two transcripts, at the words that both have."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asrmask.evaluation.alignment import aligned
from asrmask.systems import Piece, SystemTranscript

TOLERANCE_S = 0.5  # wide: other systems compute times differently


@dataclass(frozen=True)
class Times:
    """Absolute differences of start and end times, in seconds."""

    unit: str  # "words" or "segments"
    n: int  # number of times compared
    median_s: float
    largest_s: float

    @property
    def is_equal(self) -> bool:
        return self.largest_s <= TOLERANCE_S

    def __str__(self) -> str:
        return (
            f"{self.n} times of {self.unit}: {self.median_s:.2f} s apart at the median, "
            f"{self.largest_s:.2f} s at most (tolerance {TOLERANCE_S} s)"
        )


def times_between(
    ours: SystemTranscript, theirs: SystemTranscript, normalise: Callable[[str], str]
) -> Times | None:
    """Compare the starts and ends of words that both have; None if there are none.

    If either has no word times, compare starts and ends of segments, at words that start or end a
    segment in both.
    """
    unit = "words" if ours.words and theirs.words else "segments"
    mine, others = (
        _marks((heard.words if unit == "words" else heard.segments) or [], normalise)
        for heard in (ours, theirs)
    )
    i = j = 0
    apart: list[float] = []
    for chunk in aligned(" ".join(w for w, _, _ in mine), " ".join(w for w, _, _ in others)):
        n, m = len(chunk.said.split()), len(chunk.heard.split())
        if chunk.kind == "equal":
            for (_, *a), (_, *b) in zip(mine[i : i + n], others[j : j + m], strict=True):
                apart += [
                    abs(x - y) for x, y in zip(a, b, strict=True) if x is not None and y is not None
                ]
        i, j = i + n, j + m
    if not apart:
        return None
    return Times(unit, len(apart), statistics.median(apart), max(apart))


def _marks(
    pieces: Sequence[Piece], normalise: Callable[[str], str]
) -> list[tuple[str, float | None, float | None]]:
    """Return each normalised word with the start of its piece if first in it, the end if last."""
    found = []
    for piece in pieces:
        words = normalise(piece.text).split()
        for i, word in enumerate(words):
            start = piece.start if i == 0 else None
            found.append((word, start, piece.end if i == len(words) - 1 else None))
    return found
