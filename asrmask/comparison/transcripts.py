"""Compare two transcriptions field by field: language, segments, tokens, times and words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TIME_S = 0.02  # one position: the alignment path through the attention can be a near tie
ROUNDING_S = 1e-6
FIELDS = ("seek", "start", "end", "text", "tokens", "temperature")


@dataclass(frozen=True)
class FieldDifference:
    """One field that differs, with a description."""

    seek: int  # first frame of its window
    told: str
    time_s: float | None = None  # ours minus theirs, if it is a time

    @property
    def is_near(self) -> bool:
        """Whether it is a time difference within the tolerance."""
        return self.time_s is not None and abs(self.time_s) <= TIME_S + ROUNDING_S

    def __str__(self) -> str:
        return f"{self.told} (within {TIME_S} s)" if self.is_near else self.told


def first_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> FieldDifference | None:
    """Return the first difference in text, tokens, times or words; None if there is none.

    A difference beyond its tolerance is preferred to one within. A time within its tolerance may
    shift the start of the next window, so differences in later windows are then ignored.
    """
    near = None
    for found in differences(ours, theirs):
        if near is not None and found.seek != near.seek:
            break
        if not found.is_near:
            return found
        near = near or found
    return near


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[FieldDifference]:
    """Yield all differences in order; probabilities are not compared."""
    if ours["language"] != theirs["language"]:
        yield FieldDifference(0, f"language: ours {ours['language']}, theirs {theirs['language']}")
    seek = 0
    for a, b in zip(ours["segments"], theirs["segments"], strict=False):
        place, seek = f"segment {a['id']}", a["seek"]
        yield from _differences(seek, place, a, b, FIELDS)
        words, others = a.get("words", []), b.get("words", [])
        for i, (word, other) in enumerate(zip(words, others, strict=False)):
            yield from _differences(
                seek, f"{place}, word {i}", word, other, ("word", "start", "end")
            )
        if len(words) != len(others):
            yield FieldDifference(seek, f"{place}: other words")
    n_ours, n_theirs = len(ours["segments"]), len(theirs["segments"])
    if n_ours != n_theirs:
        more = max(ours["segments"], theirs["segments"], key=len)[min(n_ours, n_theirs)]
        yield FieldDifference(more["seek"], f"ours {n_ours} segments, theirs {n_theirs}")
    if ours["text"] != theirs["text"]:
        yield FieldDifference(seek, "text")


def _differences(
    seek: int, place: str, a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, ...]
) -> Iterator[FieldDifference]:
    for name in names:
        x, y = a[name], b[name]
        if x != y:
            shown = f"{place}, {name}: ours {x!r}, theirs {y!r}"
            yield FieldDifference(seek, shown, x - y if name in {"start", "end"} else None)
