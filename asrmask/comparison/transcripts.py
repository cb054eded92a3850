"""Two transcriptions beside each other: language, segments, tokens, times and words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TIME_S = 0.02  # a time may be one position off: the way through the attention can be a near tie
ROUNDING_S = 1e-6
FIELDS = ("seek", "start", "end", "text", "tokens", "temperature")


@dataclass(frozen=True)
class Difference:
    """One thing that differs, in words."""

    seek: int  # the first frame of the window that it is in
    told: str
    time_s: float | None = None  # by how much, if it is a time

    @property
    def is_near(self) -> bool:
        """Whether it is a time that is within its tolerance."""
        return self.time_s is not None and abs(self.time_s) <= TIME_S + ROUNDING_S

    def __str__(self) -> str:
        return f"{self.told} (within {TIME_S} s)" if self.is_near else self.told


def first_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Difference | None:
    """Where two transcriptions part; None if text, tokens, times and words are equal.

    One beyond its tolerance if there is one, else the first within. A time that is a little off may
    begin the next window elsewhere: what differs from there on does not count.
    """
    near = None
    for found in differences(ours, theirs):
        if near is not None and found.seek != near.seek:
            break
        if not found.is_near:
            return found
        near = near or found
    return near


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Difference]:
    """Everything that differs, in order; how sure the models were is not compared."""
    if ours["language"] != theirs["language"]:
        yield Difference(0, f"language: ours {ours['language']}, theirs {theirs['language']}")
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
            yield Difference(seek, f"{place}: other words")
    n_ours, n_theirs = len(ours["segments"]), len(theirs["segments"])
    if n_ours != n_theirs:
        more = max(ours["segments"], theirs["segments"], key=len)[min(n_ours, n_theirs)]
        yield Difference(more["seek"], f"ours {n_ours} segments, theirs {n_theirs}")
    if ours["text"] != theirs["text"]:
        yield Difference(seek, "text")


def _differences(
    seek: int, place: str, a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, ...]
) -> Iterator[Difference]:
    for name in names:
        x, y = a[name], b[name]
        if x != y:
            shown = f"{place}, {name}: ours {x!r}, theirs {y!r}"
            yield Difference(seek, shown, x - y if name in {"start", "end"} else None)
