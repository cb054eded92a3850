"""Rules on the next token: most set the logits of what may not come to −inf.

A filter is called with logits (R, n_vocab), changed in place, and with the tokens that each of the
R texts has so far: what was given of it and what was found, without the prompt.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from asrmask.tokenizer import Tokenizer

Filter = Callable[[Tensor, Sequence[Sequence[int]]], None]


class SuppressBlank:
    """The first token that is found is neither a space alone nor the end.

    n_given: tokens at the beginning of each text that were given, not found
    """

    def __init__(self, tokenizer: Tokenizer, device: torch.device, n_given: int = 0):
        self.tokens = torch.tensor([tokenizer.blank, tokenizer.eot], device=device)
        self.n_given = n_given

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        if len(sampled[0]) == self.n_given:  # all texts are equally long
            logits.index_fill_(1, self.tokens, -torch.inf)


class RepetitionPenalty:
    """Tokens that a text has already are less likely, if the penalty is above 1.

    Positive logits are divided by it, negative ones multiplied.
    """

    def __init__(self, penalty: float):
        self.penalty = penalty

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        for row, text in zip(logits, sampled, strict=True):
            tokens = torch.tensor(sorted(set(text)), dtype=torch.long, device=logits.device)
            said = row[tokens]
            row[tokens] = torch.where(said > 0, said / self.penalty, said * self.penalty)


class NoRepeatNgram:
    """No n tokens in a row come twice in a text."""

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
    """Listed tokens never come."""

    def __init__(self, tokens: Sequence[int], device: torch.device):
        self.tokens = torch.tensor(tokens, dtype=torch.long, device=device)

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        logits.index_fill_(1, self.tokens, -torch.inf)


class TimestampRules:
    """Timestamps come first, in pairs, in order, and whenever they are likelier than any word.

    max_initial_index: the latest that a text may begin, in steps after the audio's beginning
    first:             that beginning for each clip, in steps; default: 0 for all
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
                row[begin:] = -torch.inf  # a pair is complete: text follows
            elif last_is_time:
                row[: self.eot] = -torch.inf  # a segment has ended: its pair, or the end, follows
            latest = next((token for token in reversed(tokens) if token >= begin), None)
            if latest is not None:
                # times never go back, and a segment lasts: only the next one's start may be equal
                opens = last_is_time and not previous_is_time
                row[begin : latest if opens else latest + 1] = -torch.inf
        if not sampled[0]:  # the first step, where each clip is one row
            logits[:, :begin] = -torch.inf
            for row, first in zip(logits, self.first or [0] * len(logits), strict=True):
                row[begin : begin + first] = -torch.inf
                if self.max_initial_index is not None:
                    row[begin + first + self.max_initial_index + 1 :] = -torch.inf
        any_time = logits[:, begin:].logsumexp(dim=-1)
        best_text = logits[:, :begin].amax(dim=-1)
        for row in (any_time > best_text).nonzero().flatten().tolist():
            logits[row, :begin] = -torch.inf
