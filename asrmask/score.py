"""Word error rate, from counts that add up."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Errors:
    """How a hypothesis differs from its reference, in words. Errors of several clips add up."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    n_words: int = 0  # of the reference

    def __add__(self, other: "Errors") -> "Errors":
        return Errors(
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
            self.n_words + other.n_words,
        )

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def wer(self) -> float:
        """Errors a reference word; NaN where there are no reference words."""
        return self.total / self.n_words if self.n_words else float("nan")

    def __str__(self) -> str:
        return (
            f"WER {100 * self.wer:.2f} % ({self.substitutions} sub, {self.deletions} del, "
            f"{self.insertions} ins in {self.n_words} words)"
        )


def errors(reference: str, hypothesis: str) -> Errors:
    """The least edits from reference to hypothesis, both normalised by the caller.

    >>> errors("a b c", "a x c d")
    Errors(substitutions=1, deletions=0, insertions=1, n_words=3)
    """
    import jiwer

    n_words = len(reference.split())
    if n_words == 0:
        return Errors(insertions=len(hypothesis.split()))
    found = jiwer.process_words(reference, hypothesis)
    return Errors(found.substitutions, found.deletions, found.insertions, n_words)


def total(parts: Iterable[Errors]) -> Errors:
    return sum(parts, Errors())


def difference_interval(
    ours: Sequence[Errors],
    theirs: Sequence[Errors],
    blocks: Sequence[str],
    *,
    n_draws: int = 10_000,
    seed: int = 0,
) -> tuple[float, float]:
    """The 95 % interval of ours' WER minus theirs, by a paired bootstrap over blocks of clips.

    A block is drawn with all its clips, in both: clips of one speaker do not vote separately.

    ours, theirs: errors of the same clips
    blocks:       the block that each clip belongs to: its speaker, or itself
    """
    import numpy as np

    names = sorted(set(blocks))
    sums = np.zeros((len(names), 3))  # errors of ours, errors of theirs, words
    for a, b, block in zip(ours, theirs, blocks, strict=True):
        sums[names.index(block)] += a.total, b.total, a.n_words
    draws = np.random.default_rng(seed).integers(len(names), size=(n_draws, len(names)))
    mine, other, n_words = sums[draws].sum(axis=1).T
    with np.errstate(invalid="ignore"):
        low, high = np.nanpercentile((mine - other) / n_words, [2.5, 97.5])
    return float(low), float(high)
