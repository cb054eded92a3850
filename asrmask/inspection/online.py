"""Online mean and variance that can be merged (Welford's and Chan's methods).

Every sample has the same weight, whatever its batch or process: three batches of 32 and one of 2
give the same result as one batch of 98. NaN values are skipped for each entry separately, and do
not count. An entry without samples has the mean NaN.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asrmask.errors import OptionError
from asrmask.reporting.tables import Table


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations for each entry; `+` merges two sample sets.

    n, mean, m2: arrays of the same shape (…); n is integer, the others float64. Plain data that
                 can be sent between processes
    """

    n: np.ndarray
    mean: np.ndarray
    m2: np.ndarray

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "Moments":
        """Moments of zero samples of that shape."""
        return cls(np.zeros(shape, dtype=np.int64), np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, samples: np.ndarray) -> "Moments":
        """Moments of a batch, (samples, …).

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
        """Moments of both sample sets together."""
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
        """Means, (…); NaN without samples."""
        return np.where(self.n > 0, self.mean, np.nan)

    def variance(self) -> np.ndarray:
        """Unbiased variance, (…); NaN with fewer than two samples."""
        return np.where(self.n > 1, self.m2 / np.maximum(self.n - 1, 1), np.nan)

    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """95 % confidence interval of the mean (Student's t); NaN with fewer than two samples."""
        from scipy.special import stdtrit

        n = np.maximum(self.n, 2)
        half = stdtrit(n - 1, 0.975) * np.sqrt(self.variance() / n)
        return self.means() - half, self.means() + half


def total(parts: Iterable[Moments]) -> Moments:
    """Merge one or more moments."""
    first, *rest = parts
    for part in rest:
        first = first + part
    return first


class HeadMean(NamedTuple):
    """A quantity of one head: its mean over n samples and the mean's 95 % interval."""

    place: str
    quantity: str
    head: int
    n: int
    mean: float
    low: float
    high: float


class Tally:
    """Statistics of each head, for every place and quantity.

    expected: (place, quantity) pairs that should have data; those without are listed in `missing`
    """

    def __init__(self, expected: Iterable[tuple[str, str]] = ()):
        self.expected = tuple(expected)
        self.moments: dict[tuple[str, str], Moments] = {}

    def add(self, values: dict[tuple[str, str], np.ndarray]) -> None:
        """Add a batch: (place, quantity) → (samples, heads)."""
        for key, samples in values.items():
            mine = Moments.of(samples)
            self.moments[key] = self.moments[key] + mine if key in self.moments else mine

    def __add__(self, other: "Tally") -> "Tally":
        """Merge two tallies, for example from two processes."""
        both = Tally(dict.fromkeys((*self.expected, *other.expected)))
        for part in (self, other):
            for key, mine in part.moments.items():
                both.moments[key] = both.moments[key] + mine if key in both.moments else mine
        return both

    def heads(self) -> Iterator[HeadMean]:
        """Yield every quantity of every head; NaN without samples."""
        for (place, quantity), moments in self.moments.items():
            columns = (moments.n, moments.means(), *moments.interval())
            for head, (n, *numbers) in enumerate(zip(*columns, strict=True)):
                yield HeadMean(place, quantity, head, int(n), *map(float, numbers))

    def ranked(self, kind: str, quantity: str) -> list[HeadMean]:
        """Return the heads of one kind of attention that have data, highest mean first.

        kind: "encoder.self", "decoder.self" or "decoder.cross"
        """
        part, what = kind.split(".")
        found = [
            row
            for row in self.heads()
            if row.quantity == quantity
            and row.place.startswith(f"{part}.")
            and row.place.endswith(f".{what}")
            and not math.isnan(row.mean)
        ]
        return sorted(found, key=lambda row: -row.mean)

    def has(self, key: tuple[str, str]) -> bool:
        return key in self.moments and bool(self.moments[key].n.any())

    @property
    def missing(self) -> list[str]:
        """Names of expected quantities without data; just the place if it has no data at all."""
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
        """Return the means, (places, heads); NaN, not 0, where there is no data."""
        rows = [
            self.moments[place, quantity].means()
            if self.has((place, quantity))
            else np.full(n_heads, math.nan)
            for place in places
        ]
        return np.stack(rows) if rows else np.empty((0, n_heads))


def heads_table(tallies: Iterable[tuple[str, Tally]], label: str, samples: str) -> Table:
    """Tabulate the mean of every quantity of every head, with its 95 % interval.

    tallies: (name, tally) pairs; the name is the first column
    label:   header of the first column: "policy", "cell"
    samples: header of the column with the number of samples: "windows", "clips"
    """
    numbers: dict[str, type] = {"mean": float, "low": float, "high": float}
    head: dict[str, type] = {"attention": str, "layer": int, "head": int, "quantity": str}
    table = Table({label: str, **head, samples: int, **numbers})
    for name, tally in tallies:
        for row in tally.heads():
            part, layer, what = row.place.split(".")
            table.add(
                **{label: name, samples: row.n},
                attention=f"{part}.{what}",
                layer=int(layer),
                head=row.head,
                quantity=row.quantity,
                mean=row.mean,
                low=row.low,
                high=row.high,
            )
    return table
