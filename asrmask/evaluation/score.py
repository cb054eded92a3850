"""Word error rate, with confidence intervals and significance tests."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Errors:
    """Word errors of a hypothesis against its reference. Errors of several clips can be added."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    n_words: int = 0  # words in the reference

    def __add__(self, other: "Errors") -> "Errors":
        return Errors(*map(add, astuple(self), astuple(other)))

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def wer(self) -> float:
        """Errors per reference word; NaN without reference words."""
        return self.total / self.n_words if self.n_words else float("nan")

    def __str__(self) -> str:
        return (
            f"WER {100 * self.wer:.2f} % ({self.substitutions} sub, {self.deletions} del, "
            f"{self.insertions} ins in {self.n_words} words)"
        )


def errors(reference: str, hypothesis: str) -> Errors:
    """Count the minimal edits from reference to hypothesis. The caller normalises both texts.

    >>> errors("a b c", "a x c d")
    Errors(substitutions=1, deletions=0, insertions=1, n_words=3)
    """
    import jiwer

    n_words = len(reference.split())
    if n_words == 0:
        return Errors(insertions=len(hypothesis.split()))
    result = jiwer.process_words(reference, hypothesis)
    return Errors(result.substitutions, result.deletions, result.insertions, n_words)


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
    """The 95 % interval of WER(ours) − WER(theirs), by a paired bootstrap over blocks of clips.

    Blocks are resampled, not clips, because clips of one speaker are not independent.

    ours, theirs: errors of the same clips
    blocks:       the block of each clip: its speaker, or the clip itself
    """
    import numpy as np

    sums = _by_block(ours, theirs, blocks)
    draws = np.random.default_rng(seed).integers(len(sums), size=(n_draws, len(sums)))
    mine, other, n_words = sums[draws].sum(axis=1).T
    with np.errstate(invalid="ignore"):
        low, high = np.nanpercentile((mine - other) / n_words, [2.5, 97.5])
    return float(low), float(high)


def difference_p(ours: Sequence[Errors], theirs: Sequence[Errors], blocks: Sequence[str]) -> float:
    """The p-value of a difference in errors between ours and theirs: two-sided, exact, paired.

    A sign-flip test: under the null hypothesis, each block's (ours − theirs) is equally likely to
    have the other sign. p is the fraction of all 2^n sign assignments whose sum is at least as far
    from 0 as the observed one. Valid for few blocks too; n blocks give at least `min_p(n)`.
    """
    import numpy as np

    sums = _by_block(ours, theirs, blocks)
    differences = (sums[:, 0] - sums[:, 1]).astype(int)
    # the probability of each sum, from −largest to +largest, convolved block by block
    chances = np.ones(1)
    for step in abs(differences[differences != 0]):
        chances = (np.pad(chances, (0, 2 * step)) + np.pad(chances, (2 * step, 0))) / 2
    distances = abs(np.arange(len(chances)) - len(chances) // 2)
    return max(float(chances[distances >= abs(differences.sum())].sum()), min_p(len(sums)))


def min_p(n_blocks: int) -> float:
    """The smallest p-value that `difference_p` can return: all n blocks have the same sign.

    >>> min_p(5)
    0.0625
    """
    return max(2.0 ** (1 - n_blocks), 1e-300) if n_blocks else 1.0


def clopper_pearson_upper(n_different: int, n: int) -> float:
    """The one-sided 95 % upper bound of the fraction that differs, if n_different of n do.

    This is Clopper and Pearson's exact bound: with a larger fraction, n_different or fewer would be
    observed with a probability below 1/20.

    >>> round(clopper_pearson_upper(0, 5), 2)  # 1 - 0.05 ** (1 / 5)
    0.45
    """
    from scipy.special import betaincinv

    return float(betaincinv(n_different + 1, n - n_different, 0.95)) if n_different < n else 1.0


def _by_block(
    ours: Sequence[Errors], theirs: Sequence[Errors], blocks: Sequence[str]
) -> "np.ndarray":
    """Sum by block: (n_blocks, 3), with errors of ours, errors of theirs, reference words."""
    import numpy as np

    names, rows = np.unique(blocks, return_inverse=True)
    sums = np.zeros((len(names), 3))
    np.add.at(
        sums, rows, [(a.total, b.total, a.n_words) for a, b in zip(ours, theirs, strict=True)]
    )
    return sums
