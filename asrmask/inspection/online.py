"""Online mean and variance that can be merged (Welford's and Chan's methods).

Every sample has the same weight, whatever its batch or process: three batches of 32 and one of 2
give the same result as one batch of 98. NaN values are skipped for each entry separately, and do
not count. An entry without samples has the mean NaN.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np

from asrmask.errors import OptionError
from asrmask.inspection.quantities import kind_of
from asrmask.reporting.tables import Table

Key = TypeVar("Key")


@dataclass(frozen=True)
class Moments:
    """Statistics of samples, each (…); `+` merges two sample sets."""

    n: np.ndarray  # samples with data
    mean: np.ndarray
    m2: np.ndarray  # sum of squared deviations

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
        shapes = self.mean.shape, other.mean.shape
        if shapes[0] != shapes[1]:
            raise OptionError(f"statistics must be of one shape to add up, got {shapes}")
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


def accumulate(moments: dict[Key, Moments], samples: Mapping[Key, np.ndarray]) -> None:
    """Add a batch of samples, (samples, …), to the moments of each key."""
    for key, batch in samples.items():
        new = Moments.of(batch)
        moments[key] = moments[key] + new if key in moments else new


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
    moments:  (place, quantity) → statistics, (H,)
    """

    def __init__(self, expected: Iterable[tuple[str, str]] = ()):
        self.expected = tuple(expected)
        self.moments: dict[tuple[str, str], Moments] = {}

    def add(self, values: Mapping[tuple[str, str], np.ndarray]) -> None:
        """Add a batch: (place, quantity) → (samples, heads)."""
        accumulate(self.moments, values)

    def heads(self) -> Iterator[HeadMean]:
        """Yield every quantity of every head; NaN without samples."""
        for (place, quantity), moments in self.moments.items():
            columns = (moments.n, moments.means(), *moments.interval())
            for head, (n, *numbers) in enumerate(zip(*columns, strict=True)):
                yield HeadMean(place, quantity, head, int(n), *map(float, numbers))

    def ranked(self, kind: str, quantity: str) -> list[HeadMean]:
        """Return the heads of one kind of attention (KINDS) that have data, highest mean first."""
        wanted = (kind, quantity)
        heads = [h for h in self.heads() if (kind_of(h.place), h.quantity) == wanted and h.n > 0]
        return sorted(heads, key=lambda head: -head.mean)

    def places(self, kind: str) -> list[str]:
        """Return the expected places of one kind of attention, in the order of layers."""
        return [p for p in dict.fromkeys(place for place, _ in self.expected) if kind_of(p) == kind]

    def has(self, key: tuple[str, str]) -> bool:
        """Whether a (place, quantity) has data."""
        return key in self.moments and bool(self.moments[key].n.any())

    @property
    def missing(self) -> list[str]:
        """Names of expected quantities without data; just the place if it has no data at all."""
        missing: list[str] = []
        for place, group in groupby(self.expected, key=itemgetter(0)):
            pairs = list(group)
            absent = [" ".join(pair) for pair in pairs if not self.has(pair)]
            missing += [place] if len(absent) == len(pairs) else absent
        return missing

    def grid(self, kind: str, quantity: str, n_heads: int) -> np.ndarray:
        """Return the means of one kind of attention, (layers, heads); NaN: no data."""
        keys = [(place, quantity) for place in self.places(kind)]
        no_data = np.full(n_heads, np.nan)
        return np.array([self.moments[k].means() if k in self.moments else no_data for k in keys])


def heads_table(tallies: Iterable[tuple[str, Tally]], label: str, samples: str) -> Table:
    """Tabulate the mean of every quantity of every head, with its 95 % interval.

    tallies: (name, tally) pairs
    label:   header of the column of names: "policy", "cell"
    samples: header of the number of samples: "windows", "clips"
    """
    head: dict[str, type] = {"attention": str, "layer": int, "head": int, "quantity": str}
    table = Table({label: str, **head, samples: int, "mean": float, "low": float, "high": float})
    for name, tally in tallies:
        for place, quantity, number, n, *interval in tally.heads():
            cells = (name, kind_of(place), int(place.split(".")[1]), number, quantity, n, *interval)
            table.add(**dict(zip(table.columns, cells, strict=True)))
    return table
