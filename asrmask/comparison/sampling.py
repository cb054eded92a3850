"""Compare sampled texts: both systems use the same random numbers.

Sampling takes the token with the largest p / e, where e is an exponential random number for each
token. If two tokens are nearly equal, a difference of the logits far below the tolerance can change
the choice. Among thousands of draws this happens. So the margin of each draw is measured.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical

from asrmask.systems import upstream


@dataclass(frozen=True)
class Draw:
    """One sampling step, for all texts that are sampled together."""

    tokens: list[int]
    margins: list[float]  # of each token: log of its p / e, minus that of the runner-up


@contextmanager
def kept() -> Iterator[list[list[int]]]:
    """While active, append the tokens of every sampling step to the list that it yields."""
    found: list[list[int]] = []
    with _instead(lambda _, chosen: found.append(chosen.tolist())):
        yield found


@contextmanager
def measured() -> Iterator[list[Draw]]:
    """While active, record every sampling step with its margins.

    Works on a CPU only, where the random numbers can be generated a second time.
    """
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
    """Repeat an attempt of openai-whisper and return its draws; None if it cannot be repeated."""
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
    """Return the largest margin at which one of our texts first differs; None if none differs.

    Draws after the end of a text are ignored.
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
