"""Drawn texts: both sides use the same random numbers, so where they part can be measured.

A draw is a race: the token with the largest p / e is taken, e being an exponential random number
for each token. A difference of the logits that is far below the tolerance can turn a race that was
nearly even, and among thousands of draws there is one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from asrmask import upstream


@dataclass(frozen=True)
class Draw:
    """One step of all texts that are drawn at a time."""

    tokens: list[int]
    margins: list[float]  # of each: log of its p / e over that of the next best


@contextmanager
def kept() -> Iterator[list[list[int]]]:
    """Within it, the tokens of every draw are put into the list."""
    found: list[list[int]] = []
    with _instead(lambda _, chosen: found.append(chosen.tolist())):
        yield found


@contextmanager
def measured() -> Iterator[list[Draw]]:
    """Within it, every draw and how near it was; on a CPU, where the race can be run again."""
    found: list[Draw] = []

    def see(race: Tensor, chosen: Tensor) -> None:
        best = race.log().topk(2, dim=-1)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        known = (best.indices[:, 0] == chosen).tolist()
        found.append(
            Draw(
                chosen.tolist(),
                [m if k else torch.inf for m, k in zip(margins, known, strict=True)],
            )
        )

    with _instead(see, races=True):
        yield found


@contextmanager
def _instead(see: Any, races: bool = False) -> Iterator[None]:
    sample = Categorical.sample

    def draw(self: Any, *shape: Any) -> Tensor:
        race = None
        if races:
            state = torch.get_rng_state()
            race = self.probs / torch.empty_like(self.probs).exponential_()
            torch.set_rng_state(state)
        chosen = sample(self, *shape)
        see(race, chosen)
        return chosen

    Categorical.sample = draw  # type: ignore[method-assign]
    try:
        yield
    finally:
        Categorical.sample = sample  # type: ignore[method-assign]


def replayed(other: Any, attempt: upstream.Attempt) -> list[Draw] | None:
    """The draws of an attempt of openai-whisper's; None if it cannot be done again."""
    if attempt.state is None or attempt.mel.device.type != "cpu":
        return None
    state = torch.get_rng_state()
    torch.set_rng_state(attempt.state)
    try:
        with measured() as draws:
            result = upstream.whisper().decode(other, attempt.mel, attempt.options)
    finally:
        torch.set_rng_state(state)
    return draws if result.tokens == attempt.result.tokens else None


def widest(ours: Sequence[list[int]], theirs: Sequence[Draw], eot: int) -> float | None:
    """The largest margin at which a text of ours left theirs; None: no text did.

    What is drawn for a text that has ended counts for nothing.
    """
    margins = []
    for i in range(len(theirs[0].tokens) if theirs else 0):
        for mine, draw in zip(ours, theirs, strict=False):
            if mine[i] != draw.tokens[i]:
                margins.append(draw.margins[i])
                break
            if mine[i] == eot:
                break
    return max(margins, default=None)
