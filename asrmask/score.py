"""Word error rate, from counts that add up."""

from collections.abc import Iterable
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
