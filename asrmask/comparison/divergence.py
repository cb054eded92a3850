"""Find the first decoding choice at which two window loops differ, and how close it was."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from asrmask.audio.constants import FRAMES_PER_SECOND
from asrmask.comparison.sampling import replayed, widest
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


@dataclass(frozen=True)
class Divergence:
    """The first choice at which two runs differ.

    start: first frame of the window
    step:  token of the window's text, from 0; None: the choice was not of a token
    gap:   how close the choice was, as a difference of scores; None: unknown
    """

    start: int
    step: int | None
    ours: str
    theirs: str
    gap: float | None
    about: str  # what the gap measures

    @property
    def is_near(self) -> bool:
        return self.gap is not None and abs(self.gap) < NEAR

    def __str__(self) -> str:
        place = f"window at {self.start / FRAMES_PER_SECOND:.2f} s"
        if self.step is not None:
            place += f", step {self.step}"
        gap = f"{self.about} {self.gap:.1e}" if self.gap is not None else self.about
        near = " (a near tie)" if self.is_near else ""
        return f"{place}: asrmask {self.ours}, openai-whisper {self.theirs}, {gap}{near}"


Pair = tuple[DecodingAttempt, upstream.Attempt]


def windows(
    ours: Sequence[DecodingAttempt], theirs: Sequence[upstream.Attempt]
) -> list[tuple[list[DecodingAttempt], list[upstream.Attempt]]]:
    """Pair the attempts on each window, in order, up to the shorter list of windows."""
    mine = [list(group) for _, group in groupby(ours, key=lambda attempt: attempt.start)]
    others = [list(group) for _, group in groupby(theirs, key=lambda attempt: id(attempt.mel))]
    return list(zip(mine, others, strict=False))


def first_divergence(
    model: Whisper,
    other: Any,
    ours: Sequence[DecodingAttempt],
    theirs: Sequence[upstream.Attempt],
    settings: Settings,
) -> Divergence | None:
    """Return the first difference between the tokens of two runs; None if there is none."""
    tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    done: list[Pair] = []
    for mine, others in windows(ours, theirs):
        for a, b in zip(mine, others, strict=False):
            if a.options.temperature != b.options.temperature:
                break
            done.append((a, b))
            if a.result.tokens != b.result.tokens:
                return _at_token(other, done, tokenizer)
        if [x.options.temperature for x in mine] != [x.options.temperature for x in others]:
            return _at_threshold(mine, others, settings)
    return None


def _at_token(other: Any, done: Sequence[Pair], tokenizer: Tokenizer) -> Divergence:
    a, b = done[-1]
    ours, theirs = a.result.tokens, b.result.tokens
    pairs = enumerate(zip(ours, theirs, strict=False))
    step = next((i for i, (x, y) in pairs if x != y), min(len(ours), len(theirs)))
    mine = ours[step] if step < len(ours) else tokenizer.eot
    their = theirs[step] if step < len(theirs) else tokenizer.eot
    gap: float | None
    if a.options.temperature > 0:
        gap = _draw_gap(other, done, tokenizer)
        about = f"drawn at temperature {a.options.temperature:g}"
        about += "" if gap is None else ", gap in the draw"
    elif a.options.beam_size is not None:  # beam search chooses between complete texts
        about = "gap between the texts' mean log-probabilities"
        gap = _mean_logprob(other, b, theirs, tokenizer) - _mean_logprob(other, b, ours, tokenizer)
    else:
        about = "gap between the logits"
        gap = _logit_gap(other, b, step, mine, their, tokenizer)

    def shown(token: int) -> str:
        return f"{tokenizer.decode_with_timestamps([token])!r} ({token})"

    return Divergence(a.start, step, shown(mine), shown(their), gap, about)


def _at_threshold(
    mine: Sequence[DecodingAttempt], others: Sequence[upstream.Attempt], settings: Settings
) -> Divergence:
    """Describe a window where the texts are equal, but one system retried it more often."""
    n = min(len(mine), len(others))
    a, b = mine[n - 1].result, others[n - 1].result
    gap, about = None, "decoded anew"
    for name, limit in (
        ("avg_logprob", settings.logprob_threshold),
        ("no_speech_prob", settings.no_speech_threshold),
    ):
        x, y = getattr(a, name), getattr(b, name)
        if limit is not None and min(x, y) <= limit <= max(x, y):
            gap, about = y - x, f"{name} beside its threshold {limit:g}, gap"

    def shown(attempts: Sequence[Any]) -> str:
        return "temperatures " + ", ".join(f"{x.options.temperature:g}" for x in attempts)

    return Divergence(mine[0].start, None, shown(mine), shown(others), gap, about)


@torch.inference_mode()
def _logits(other: Any, attempt: upstream.Attempt, tokens: list[int]) -> tuple[Tensor, int]:
    """Return teacher-forced logits (Q, n_vocab) of a window, and where its text begins."""
    opening = upstream.opening(other, attempt.options)
    features = other.encoder(attempt.mel[None].to(other.device))
    forced = torch.tensor([[*opening, *tokens]], device=other.device)
    return other.decoder(forced[:, : other.dims.n_text_ctx], features)[0], len(opening)


def _logit_gap(
    other: Any,
    attempt: upstream.Attempt,
    step: int,
    ours: int,
    theirs: int,
    tokenizer: Tokenizer,
) -> float:
    """Return upstream's logit of its own token minus its logit of ours.

    Between a timestamp and a word, upstream first applies a rule: whether all timestamps together
    are more likely than the best word. Then the smaller of the two gaps counts.
    """
    row = _logits(other, attempt, attempt.result.tokens[:step])[0][-1]
    gap = float(row[theirs] - row[ours])
    begin = tokenizer.timestamp_begin
    if (ours >= begin) != (theirs >= begin):
        rule = float(row[begin:].logsumexp(dim=-1) - row[: tokenizer.eot + 1].amax())
        gap = min(gap, rule if theirs >= begin else -rule, key=abs)
    return gap


def _draw_gap(other: Any, done: Sequence[Pair], tokenizer: Tokenizer) -> float | None:
    """Return the margin of the draws at which texts first differ; None if unknown.

    Only the first attempt that differs counts: after it, the random numbers are out of step.
    """
    for a, b in done:
        if a.options.temperature == 0:
            continue
        theirs = replayed(other, b)
        if theirs is None:
            return None
        gap = widest(a.draws, theirs, tokenizer.eot)
        if gap is not None:
            return gap if gap < torch.inf else None
    return None


def _mean_logprob(
    other: Any, attempt: upstream.Attempt, tokens: list[int], tokenizer: Tokenizer
) -> float:
    logits, n_opening = _logits(other, attempt, [*tokens, tokenizer.eot])
    chosen = torch.tensor([*tokens, tokenizer.eot], device=logits.device)
    logprobs = logits[n_opening - 1 : -1].log_softmax(dim=-1)
    picked = logprobs.gather(1, chosen[: len(logprobs), None])
    return float(picked.sum()) / max(len(tokens), 1)
