"""Statistics that are taken as samples come by, and that add up: Welford's, merged as Chan's.

Every sample has the same weight, whatever batch or process it came in: three batches of 32 and one
of 2 give what one batch of 98 gives. What has no value (NaN) is left out, entry by entry, and shows
in the counts; an entry without any sample has no mean: NaN.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from asrmask.errors import OptionError


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared distances of some samples, entry by entry.

    n, mean, m2: arrays of one shape (…), float64 but for the counts; plain data, to be sent between
                 processes. Two of them add up to those of all samples
    """

    n: np.ndarray
    mean: np.ndarray
    m2: np.ndarray

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "Moments":
        """No samples of that shape."""
        return cls(np.zeros(shape, dtype=np.int64), np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, samples: np.ndarray) -> "Moments":
        """Those of a batch, (samples, …).

        >>> few = Moments.of(np.array([[1.0, 5.0], [3.0, np.nan]]))
        >>> few.n.tolist(), few.mean.tolist()
        ([2, 1], [2.0, 5.0])
        """
        samples = np.asarray(samples, dtype=np.float64)
        if samples.ndim < 1:
            raise OptionError(f"samples must be (samples, …), got shape {samples.shape}")
        if np.isinf(samples).any():
            raise OptionError("samples must be finite, or NaN where there is no data, got infinity")
        has = ~np.isnan(samples)
        n = has.sum(axis=0)
        mean = np.where(has, samples, 0).sum(axis=0) / np.maximum(n, 1)
        m2 = np.where(has, np.square(samples - mean), 0).sum(axis=0)
        return cls(n, mean, m2)

    def __add__(self, other: "Moments") -> "Moments":
        """Those of both together."""
        if self.mean.shape != other.mean.shape:
            raise OptionError(
                f"statistics must be of one shape to add up, got {self.mean.shape} "
                f"and {other.mean.shape}"
            )
        n = self.n + other.n
        share = other.n / np.maximum(n, 1)
        distance = other.mean - self.mean
        mean = self.mean + distance * share
        m2 = self.m2 + other.m2 + np.square(distance) * self.n * share
        return Moments(n, mean, m2)

    def means(self) -> np.ndarray:
        """(…), NaN where there are no samples."""
        return np.where(self.n > 0, self.mean, np.nan)

    def variance(self) -> np.ndarray:
        """(…), unbiased; NaN where there are fewer than two samples."""
        return np.where(self.n > 1, self.m2 / np.maximum(self.n - 1, 1), np.nan)

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """The 95 % interval of the mean (Student's t); NaN for fewer than two samples."""
        from scipy.special import stdtrit

        n = np.maximum(self.n, 2)
        half = stdtrit(n - 1, 0.975) * np.sqrt(self.variance() / n)
        return self.means() - half, self.means() + half


def total(parts: Iterable[Moments]) -> Moments:
    """All of them together; there must be one at least."""
    first, *rest = parts
    for part in rest:
        first = first + part
    return first


class Tally:
    """The statistics of a model's heads: for each place and quantity a row of heads.

    expected: (place, quantity) pairs that ought to have data: those without are `missing`
    """

    def __init__(self, expected: Iterable[tuple[str, str]] = ()):
        self.expected = tuple(expected)
        self.moments: dict[tuple[str, str], Moments] = {}

    def add(self, values: dict[tuple[str, str], np.ndarray]) -> None:
        """Count a batch: for each place and quantity (samples, heads)."""
        for key, samples in values.items():
            mine = Moments.of(samples)
            self.moments[key] = self.moments[key] + mine if key in self.moments else mine

    def __add__(self, other: "Tally") -> "Tally":
        """Both together: the work of two processes."""
        both = Tally(dict.fromkeys((*self.expected, *other.expected)))
        for part in (self, other):
            for key, mine in part.moments.items():
                both.moments[key] = both.moments[key] + mine if key in both.moments else mine
        return both

    def has(self, key: tuple[str, str]) -> bool:
        return key in self.moments and bool(self.moments[key].n.any())

    @property
    def missing(self) -> list[str]:
        """What ought to have data and has none, by name: a place alone if nothing of it has any."""
        places = dict.fromkeys(place for place, _ in self.expected)
        found = []
        for place in places:
            wanted = [quantity for p, quantity in self.expected if p == place]
            absent = [quantity for quantity in wanted if not self.has((place, quantity))]
            if len(absent) == len(wanted):
                found.append(place)
            else:
                found += [f"{place} {quantity}" for quantity in absent]
        return found

    def grid(self, places: list[str], quantity: str, n_heads: int) -> np.ndarray:
        """Means, (places, heads): NaN, not 0, where there is no data."""
        rows = [
            self.moments[place, quantity].means()
            if self.has((place, quantity))
            else np.full(n_heads, math.nan)
            for place in places
        ]
        return np.stack(rows) if rows else np.empty((0, n_heads))
