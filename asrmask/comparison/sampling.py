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
    margins: list[float] | None  # of each token: log of its p / e, minus that of the runner-up


@contextmanager
def record_draws(with_margins: bool = False) -> Iterator[list[Draw]]:
    """While active, append every sampling step to the list that it yields.

    with_margins: works on a CPU only, where the random numbers can be generated a second time
    """
    draws: list[Draw] = []
    sample = Categorical.sample

    def sample_and_record(self: Any, *shape: Any) -> Tensor:
        if not with_margins:
            tokens = sample(self, *shape)
            draws.append(Draw(tokens.tolist(), None))
            return tokens
        state = torch.get_rng_state()
        ratios = self.probs / torch.empty_like(self.probs).exponential_()
        torch.set_rng_state(state)
        tokens = sample(self, *shape)
        best = ratios.log().topk(2, dim=-1)
        margins = best.values[:, 0] - best.values[:, 1]
        margins[best.indices[:, 0] != tokens] = torch.inf  # other random numbers: unknown
        draws.append(Draw(tokens.tolist(), margins.tolist()))
        return tokens

    Categorical.sample = sample_and_record  # type: ignore[method-assign]
    try:
        yield draws
    finally:
        Categorical.sample = sample  # type: ignore[method-assign]


def replay(other: Any, attempt: upstream.Attempt) -> list[Draw] | None:
    """Repeat an attempt of openai-whisper and return its draws; None if it cannot be repeated."""
    if attempt.rng_state is None or attempt.mel.device.type != "cpu":
        return None
    with torch.random.fork_rng(devices=[]), record_draws(with_margins=True) as draws:
        torch.set_rng_state(attempt.rng_state)
        result = upstream.whisper().decode(other, attempt.mel, attempt.options)
    return draws if result.tokens == attempt.result.tokens else None


def largest_margin(ours: Sequence[list[int]], theirs: Sequence[Draw], eot: int) -> float | None:
    """Return the largest margin at which one of our texts first differs; None if none differs.

    Draws after the end of a text are ignored.
    """
    margins = []
    for i in range(len(theirs[0].tokens) if theirs else 0):
        for tokens, draw in zip(ours, theirs, strict=False):
            if tokens[i] != draw.tokens[i]:
                margins.append(torch.inf if draw.margins is None else draw.margins[i])
                break
            if tokens[i] == eot:
                break
    return max(margins, default=None)
