"""Filters on the next token. Most set the logits of forbidden tokens to −inf.

A filter changes logits (R, n_vocab) in place. It also gets the tokens of each of the R texts so
far: prefix and decoded tokens, without the prompt.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from asrmask.tokenizer.tokenizer import Tokenizer

Filter = Callable[[Tensor, Sequence[Sequence[int]]], None]


class SuppressBlank:
    """Forbid a lone space and the end token as the first decoded token.

    n_prefix: number of prefix tokens in each text
    """

    def __init__(self, tokenizer: Tokenizer, device: torch.device, n_prefix: int = 0):
        self.tokens = torch.tensor([tokenizer.blank, tokenizer.eot], device=device)
        self.n_prefix = n_prefix

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        if len(sampled[0]) == self.n_prefix:  # all texts have the same length
            logits.index_fill_(1, self.tokens, -torch.inf)


class RepetitionPenalty:
    """Make tokens that a text already contains less likely, if the penalty is above 1.

    Positive logits are divided by the penalty, negative ones multiplied.
    """

    def __init__(self, penalty: float):
        self.penalty = penalty

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        for row, text in zip(logits, sampled, strict=True):
            tokens = torch.tensor(sorted(set(text)), dtype=torch.long, device=logits.device)
            said = row[tokens]
            row[tokens] = torch.where(said > 0, said / self.penalty, said * self.penalty)


class NoRepeatNgram:
    """Forbid a text to contain the same n-gram of tokens twice."""

    def __init__(self, size: int):
        self.size = size

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        n_before = self.size - 1
        for row, text in zip(logits, sampled, strict=True):
            last = list(text[len(text) - n_before :])
            for i in range(len(text) - n_before):
                if list(text[i : i + n_before]) == last:
                    row[text[i + n_before]] = -torch.inf


class SuppressTokens:
    """Forbid the listed tokens."""

    def __init__(self, tokens: Sequence[int], device: torch.device):
        self.tokens = torch.tensor(tokens, dtype=torch.long, device=device)

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        logits.index_fill_(1, self.tokens, -torch.inf)


class TimestampRules:
    """Require timestamps first, in pairs, in order, and when likelier than any text token.

    max_initial_index: latest first timestamp, in steps after the start of the audio
    first:             start of the audio in each clip, in steps; default: 0 for all
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_initial_index: int | None,
        first: Sequence[int] | None = None,
    ):
        self.begin = tokenizer.timestamp_begin
        self.eot = tokenizer.eot
        self.no_timestamps = tokenizer.no_timestamps
        self.max_initial_index = max_initial_index
        self.first = first

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        begin = self.begin
        logits[:, self.no_timestamps] = -torch.inf
        for row, tokens in zip(logits, sampled, strict=True):
            last_is_time = bool(tokens) and tokens[-1] >= begin
            # the start of the text counts as the second half of a pair
            previous_is_time = len(tokens) < 2 or tokens[-2] >= begin
            if last_is_time and previous_is_time:
                row[begin:] = -torch.inf  # a pair is complete: text must follow
            elif last_is_time:
                row[: self.eot] = -torch.inf  # a segment ended: a timestamp or eot follows
            latest = next((token for token in reversed(tokens) if token >= begin), None)
            if latest is not None:
                # times increase; only the start of a segment may equal the end of the previous one
                opens = last_is_time and not previous_is_time
                row[begin : latest if opens else latest + 1] = -torch.inf
        if not sampled[0]:  # first step: each clip has one row
            logits[:, :begin] = -torch.inf
            for row, first in zip(logits, self.first or [0] * len(logits), strict=True):
                row[begin : begin + first] = -torch.inf
                if self.max_initial_index is not None:
                    row[begin + first + self.max_initial_index + 1 :] = -torch.inf
        any_time = logits[:, begin:].logsumexp(dim=-1)
        best_text = logits[:, :begin].amax(dim=-1)
        for row in (any_time > best_text).nonzero().flatten().tolist():
            logits[row, :begin] = -torch.inf
