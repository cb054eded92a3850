"""Find the first decoding choice at which two window loops differ, and how close it was."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from asrmask.audio.constants import FRAMES_PER_SECOND
from asrmask.comparison.sampling import largest_margin, replay
from asrmask.decoding.options import DecodingOptions, DecodingResult
from asrmask.model.whisper import Whisper
from asrmask.systems import upstream
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer
from asrmask.transcription.settings import Settings

NEAR = 1e-3  # rounding can decide a choice between logits this close


@dataclass(frozen=True)
class DecodingAttempt:
    """One window, decoded once by asrmask; the counterpart of upstream.Attempt."""

    start: int  # frame
    n_frames: int
    options: DecodingOptions
    result: DecodingResult
    draws: list[list[int]] = field(default_factory=list)  # sampled tokens, one list per step


Attempts = Sequence[DecodingAttempt]
UpstreamAttempts = Sequence[upstream.Attempt]
Pair = tuple[DecodingAttempt, upstream.Attempt]


@dataclass(frozen=True)
class Divergence:
    """The first choice at which two runs differ."""

    start: int  # first frame of the window
    step: int | None  # token of the window's text, from 0; None: the choice was not of a token
    ours: str
    theirs: str
    gap: float | None  # how close the choice was, as a difference of scores; None: unknown
    gap_name: str

    @property
    def is_near(self) -> bool:
        return self.gap is not None and abs(self.gap) < NEAR

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        gap = "" if self.gap is None else f" {self.gap:.1e}"
        near = " (a near tie)" if self.is_near else ""
        return (
            f"window at {self.start / FRAMES_PER_SECOND:.2f} s{step}: asrmask {self.ours}, "
            f"openai-whisper {self.theirs}, {self.gap_name}{gap}{near}"
        )


def pair_windows(
    ours: Attempts, theirs: UpstreamAttempts
) -> Iterator[tuple[Attempts, UpstreamAttempts]]:
    """Pair the attempts on each window, in order, up to the shorter list of windows."""
    mine = [list(group) for _, group in groupby(ours, key=lambda attempt: attempt.start)]
    others = [list(group) for _, group in groupby(theirs, key=lambda attempt: id(attempt.mel))]
    return zip(mine, others, strict=False)


def first_divergence(
    model: Whisper, other: Any, ours: Attempts, theirs: UpstreamAttempts, settings: Settings
) -> Divergence | None:
    """Return the first difference between the tokens of two runs; None if there is none."""
    tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    pairs: list[Pair] = []
    for mine, others in pair_windows(ours, theirs):
        for a, b in zip(mine, others, strict=False):
            if a.options.temperature != b.options.temperature:
                break
            pairs.append((a, b))
            if a.result.tokens != b.result.tokens:
                return _token_divergence(other, pairs, tokenizer)
        if [x.options.temperature for x in mine] != [x.options.temperature for x in others]:
            return _retry_divergence(mine, others, settings)
    return None


def _token_divergence(other: Any, pairs: Sequence[Pair], tokenizer: Tokenizer) -> Divergence:
    """Describe the first token that differs in the last pair."""
    a, b = pairs[-1]
    ours, theirs = [*a.result.tokens, tokenizer.eot], [*b.result.tokens, tokenizer.eot]
    step = next(i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y)
    gap: float | None
    if a.options.temperature > 0:
        gap = _draw_gap(other, pairs, tokenizer)
        gap_name = f"drawn at temperature {a.options.temperature:g}"
        gap_name += "" if gap is None else ", gap in the draw"
    elif a.options.beam_size is not None:  # beam search chooses between complete texts
        gap = _mean_logprob(other, b, theirs) - _mean_logprob(other, b, ours)
        gap_name = "gap between the texts' mean log-probabilities"
    else:
        logits = _logits(other, b, theirs[:step])[-1]
        gap = _logit_gap(logits, ours[step], theirs[step], tokenizer)
        gap_name = "gap between the logits"
    x, y = (f"{tokenizer.decode_with_timestamps([t])!r} ({t})" for t in (ours[step], theirs[step]))
    return Divergence(a.start, step, x, y, gap, gap_name)


def _retry_divergence(mine: Attempts, others: UpstreamAttempts, settings: Settings) -> Divergence:
    """Describe a window where the texts are equal, but one system retried it more often."""
    n = min(len(mine), len(others))
    a, b = mine[n - 1].result, others[n - 1].result
    gap, gap_name = None, "decoded again"
    for name, limit, x, y in (
        ("avg_logprob", settings.logprob_threshold, a.avg_logprob, b.avg_logprob),
        ("no_speech_prob", settings.no_speech_threshold, a.no_speech_prob, b.no_speech_prob),
    ):
        if limit is not None and min(x, y) <= limit <= max(x, y):
            gap, gap_name = y - x, f"{name} beside its threshold {limit:g}, gap"
    temperatures, theirs = (
        "temperatures " + ", ".join(f"{attempt.options.temperature:g}" for attempt in attempts)
        for attempts in (mine, others)
    )
    return Divergence(mine[0].start, None, temperatures, theirs, gap, gap_name)


@torch.inference_mode()
def _logits(other: Any, attempt: upstream.Attempt, tokens: list[int]) -> Tensor:
    """Return upstream's teacher-forced logits: (len(tokens) + 1, n_vocab), or up to its context."""
    initial = upstream.initial_tokens(other, attempt.options)
    features = other.encoder(attempt.mel[None].to(other.device))
    forced = torch.tensor([[*initial, *tokens]], device=other.device)
    logits = other.decoder(forced[:, : other.dims.n_text_ctx], features)
    return logits[0, len(initial) - 1 :]


def _logit_gap(logits: Tensor, ours: int, theirs: int, tokenizer: Tokenizer) -> float:
    """Return the logit of their token minus the logit of ours.

    Between a timestamp and a word, upstream first applies a rule: whether all timestamps together
    are more likely than the best word. Then the smaller of the two gaps counts.
    """
    gap = float(logits[theirs] - logits[ours])
    begin = tokenizer.timestamp_begin
    if (ours >= begin) != (theirs >= begin):
        rule = float(logits[begin:].logsumexp(dim=-1) - logits[: tokenizer.eot + 1].amax())
        gap = min(gap, rule if theirs >= begin else -rule, key=abs)
    return gap


def _draw_gap(other: Any, pairs: Sequence[Pair], tokenizer: Tokenizer) -> float | None:
    """Return the margin of the draws at which texts first differ; None if unknown.

    Only the first attempt that differs counts: after it, the random numbers are out of step.
    """
    for a, b in pairs:
        if a.options.temperature > 0:
            draws = replay(other, b)
            gap = torch.inf if draws is None else largest_margin(a.draws, draws, tokenizer.eot)
            if gap is not None:
                return gap if gap < torch.inf else None
    return None


def _mean_logprob(other: Any, attempt: upstream.Attempt, tokens: list[int]) -> float:
    """Return the log-probability of a text per token; tokens: with the end of the text."""
    logprobs = _logits(other, attempt, tokens)[:-1].log_softmax(dim=-1)
    chosen = torch.tensor(tokens[: len(logprobs)], device=logprobs.device)
    return float(logprobs.gather(1, chosen[:, None]).sum()) / max(len(tokens) - 1, 1)
