"""Filters on the next token. Most set the logits of forbidden tokens to −inf.

A filter changes logits (R, n_vocab) in place. It also gets the tokens of each of the R texts so
far: prefix and decoded tokens, without the prompt.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asrmask.audio.constants import CHUNK_LENGTH
from asrmask.decoding.options import DecodingOptions
from asrmask.errors import OptionError
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import Tokenizer

Filter = Callable[[Tensor, Sequence[Sequence[int]]], None]


@dataclass(frozen=True)
class RepetitionPenalty:
    """Make tokens that a text already contains less likely, if the penalty is above 1.

    Positive logits are divided by the penalty, negative ones multiplied.
    """

    penalty: float

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        for row, text in zip(logits, sampled, strict=True):
            tokens = torch.tensor(sorted(set(text)), dtype=torch.long, device=logits.device)
            x = row[tokens]
            row[tokens] = torch.where(x > 0, x / self.penalty, x * self.penalty)


@dataclass(frozen=True)
class NoRepeatNgram:
    """Forbid a text to contain the same n-gram of tokens twice."""

    size: int

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        n_before = self.size - 1
        for row, text in zip(logits, sampled, strict=True):
            last = list(text[len(text) - n_before :])
            for i in range(len(text) - n_before):
                if list(text[i : i + n_before]) == last:
                    row[text[i + n_before]] = -torch.inf


class SuppressTokens:
    """Forbid the listed tokens, everywhere or only after n_before tokens of text."""

    def __init__(self, tokens: Sequence[int], device: torch.device, n_before: int | None = None):
        self.tokens = torch.tensor(tokens, dtype=torch.long, device=device)
        self.n_before = n_before

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        if self.n_before in {None, len(sampled[0])}:  # all texts have the same length
            logits.index_fill_(1, self.tokens, -torch.inf)


@dataclass(frozen=True)
class TimestampRules:
    """Require timestamps first, in pairs, in order, and when likelier than any text token."""

    tokenizer: Tokenizer
    max_initial_index: int | None  # latest first timestamp, in steps after the start of the audio
    first: Sequence[int] = ()  # start of the audio in each clip, in steps; default: 0 for all

    def __call__(self, logits: Tensor, sampled: Sequence[Sequence[int]]) -> None:
        begin = self.tokenizer.timestamp_begin
        logits[:, self.tokenizer.no_timestamps] = -torch.inf
        for row, tokens in zip(logits, sampled, strict=True):
            last_is_time = bool(tokens) and tokens[-1] >= begin
            # the start of the text counts as the second half of a pair
            previous_is_time = len(tokens) < 2 or tokens[-2] >= begin
            if last_is_time and previous_is_time:
                row[begin:] = -torch.inf  # a pair is complete: text must follow
            elif last_is_time:
                row[: self.tokenizer.eot] = -torch.inf  # a segment ended: a timestamp or eot
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
        logits[any_time > best_text, :begin] = -torch.inf


def token_filters(
    model: Whisper, tokenizer: Tokenizer, options: DecodingOptions, first: list[int], n_prefix: int
) -> list[Filter]:
    """Return the filters that the options ask for.

    first:    start of the audio in each clip, in steps
    n_prefix: number of prefix tokens in each text
    """
    filters: list[Filter] = []
    if options.repetition_penalty != 1:
        filters.append(RepetitionPenalty(options.repetition_penalty))
    if options.no_repeat_ngram_size:
        filters.append(NoRepeatNgram(options.no_repeat_ngram_size))
    if options.suppress_blank:
        blank = [tokenizer.blank, tokenizer.eot]  # not as the first token after the prefix
        filters.append(SuppressTokens(blank, model.device, n_before=n_prefix))
    if options.suppress_tokens:
        suppressed = _suppressed(tokenizer, options.suppress_tokens, model.dims.n_vocab)
        filters.append(SuppressTokens(suppressed, model.device))
    if not options.without_timestamps:
        latest = None
        if options.max_initial_timestamp:
            position_s = CHUNK_LENGTH / model.dims.n_audio_ctx
            latest = round(options.max_initial_timestamp / position_s)
        filters.append(TimestampRules(tokenizer, latest, first))
    return filters


def _suppressed(tokenizer: Tokenizer, listed: str | Iterable[int], n_vocab: int) -> list[int]:
    try:
        items = [part for part in listed.split(",") if part] if isinstance(listed, str) else listed
        tokens = {int(item) for item in items}
    except (TypeError, ValueError):
        raise OptionError(f"suppress_tokens must be token ids or -1, got {listed!r}") from None
    if any(not -1 <= token < n_vocab for token in tokens):
        raise OptionError(f"suppress_tokens must be in -1..{n_vocab - 1}, got {sorted(tokens)}")
    if -1 in tokens:
        tokens = tokens - {-1} | set(tokenizer.non_speech_tokens)
    # never part of a text; the probability of no_speech is read at sot
    tokens |= {tokenizer.transcribe, tokenizer.translate, tokenizer.sot, tokenizer.sot_prev}
    return sorted(tokens | {tokenizer.sot_lm, tokenizer.no_speech})
