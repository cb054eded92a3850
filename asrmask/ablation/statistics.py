"""Summarise the records of each cell and compare the cell with its reference.

WER is weighted by words (all errors ÷ all reference words) unless it is named "by clip". A value
without data is None, never 0.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from asrmask.ablation.records import RecordsError, read
from asrmask.ablation.spec import Cell, Decoding, Spec, Trailing, of
from asrmask.decoding.quality import MAX_COMPRESSION
from asrmask.evaluation.score import (
    Errors,
    clopper_pearson_upper,
    difference_interval,
    difference_p,
    min_p,
    total,
)
from asrmask.inspection.online import Tally
from asrmask.inspection.quantities import flat, kind_of
from asrmask.model.policy import Policy

N_DRAWS = 10_000


@dataclass(frozen=True)
class Difference:
    """The difference between two cells, on the clips that both have."""

    wer: float  # WER minus the other's WER, weighted by words
    low: float | None  # 95 % interval, paired bootstrap over blocks; None: no spread
    high: float | None
    p: float  # p-value of the sign-flip test over blocks
    n_clips: int
    n_same: int  # clips with the same tokens
    n_blocks: int  # speakers, or clips where the speaker is unknown
    n_blocks_same: int  # blocks whose clips all have the same tokens
    p_holm: float = 1.0  # Holm-corrected; the primary comparison is not corrected
    min_p_holm: float = 1.0  # smallest possible p_holm with this number of blocks

    @property
    def min_p(self) -> float:
        return min_p(self.n_blocks)

    @property
    def most_blocks(self) -> float:
        """Upper 95 % bound on the share of blocks with different tokens."""
        return clopper_pearson_upper(self.n_blocks - self.n_blocks_same, self.n_blocks)


@dataclass(frozen=True)
class Summary:
    """Statistics of a cell over all of its clips."""

    cell: Cell
    n_clips: int
    errors: Errors
    wer_by_clip: float | None  # mean over clips
    above_100: float | None  # share of clips with more errors than words
    runaways: int  # "no end", "repetition", "times past the end" or "unsure"
    no_end: int
    fallbacks: int
    repeated: float | None  # share of clips
    invented: float | None  # share of clips without speech that got text
    reference_nll: float | None  # nats per reference token, mean over all tokens
    end_probability: float | None  # mean over clips, after the reference's last word
    encoder_s: float | None  # mean over clips
    decoder_s: float | None
    heads: Tally  # attention measurements, if the spec sets `inspect`
    difference: Difference | None = None

    @property
    def wer(self) -> float | None:
        return self.errors.wer if self.errors.n_words else None

    def on_padding(self, kind: str) -> float | None:
        """Return the share of attention on padding: mean over clips, then over heads of a kind."""
        return _mean(self._means(kind, "padding"))

    def end_from(self, quantity: str) -> float | None:
        """Return the end-token logit from padding or audio: mean over clips, sum over heads."""
        found = self._means("decoder.cross", quantity)
        return sum(found) if found else None

    def _means(self, kind: str, quantity: str) -> list[float]:
        found = [
            moments.means()
            for (place, name), moments in self.heads.moments.items()
            if kind_of(place) == kind and name == quantity
        ]
        return [float(x) for row in found for x in row if not math.isnan(x)]


@dataclass(frozen=True)
class Results:
    """The results of a run, complete or not."""

    folder: Path
    spec: Spec
    about: dict[str, Any]
    records: dict[Cell, dict[str, dict[str, Any]]]  # by cell and clip
    summaries: dict[Cell, Summary]
    differences: dict[tuple[Cell, Cell], Difference]  # all tested pairs, including the primary

    @property
    def primary(self) -> tuple[Cell, Cell]:
        """The comparison that the spec fixed before the run."""
        a, b = (Cell(self.spec.models[0], Policy.parse(text)) for text in self.spec.primary)
        return a, b

    @property
    def blocks(self) -> str:
        """The unit of the bootstrap and the sign-flip test: "speakers" or "clips"."""
        clips = [clip for clip in self.about["clips"].values() if clip["kind"] == "speech"]
        n_known = sum(clip["speaker"] is not None for clip in clips)
        if n_known in (0, len(clips)):
            return "speakers" if n_known else "clips"
        return "speakers (clips where none is known)"

    @property
    def n_records(self) -> int:
        return sum(map(len, self.records.values()))

    @property
    def is_complete(self) -> bool:
        return self.n_records == self.about["n_records"]

    def format_clip_count(self, n_clips: int) -> str:
        """Format a number of clips, out of those in the data set: "5 of 16 clips"."""
        return f"{told_of(n_clips, self.about.get('n_available', n_clips))} clips"

    def kind(self, clip: str) -> str:
        return self.about["clips"][clip]["kind"]

    def speech(self, cell: Cell) -> dict[str, dict[str, Any]]:
        """Return the records of a cell by clip, of clips with speech and a transcript."""
        found = self.records.get(cell, {})
        return {clip: record for clip, record in found.items() if self.kind(clip) == "speech"}


def told_of(n: int, n_all: int) -> str:
    """Format a part of a total: "5 of 16", or "16" if it is all of them."""
    return str(n) if n == n_all else f"{n} of {n_all}"


def load(folder: Path) -> Results:
    """Load the results in a folder, complete or not."""
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordsError(f"{folder}: expected a run with run.json, got {error}") from None
    spec = of(about["spec"])
    records: dict[Cell, dict[str, dict[str, Any]]] = defaultdict(dict)
    for record in read(folder / "records.jsonl"):
        cell = Cell(
            record["model"],
            Policy.parse(record["policy"]),
            Decoding.parse(record["decoding"]),
            Trailing.parse(record["trailing"]),
            record["control"],
        )
        records[cell][record["clip"]] = record
    bare = Results(folder, spec, about, dict(records), {}, {})
    pairs = [(cell, cell.reference) for cell in spec.cells() if cell != cell.reference]
    found = {pair: _difference(bare, *pair) for pair in dict.fromkeys([*pairs, bare.primary])}
    known = {pair: d for pair, d in found.items() if d is not None}
    differences = _corrected(known, bare.primary)
    summaries = {
        cell: replace(summed(bare, cell), difference=differences.get((cell, cell.reference)))
        for cell in spec.cells()
    }
    return replace(bare, summaries=summaries, differences=differences)


def errors_of(record: dict[str, Any]) -> Errors:
    return Errors(*record["errors"]) if record["errors"] is not None else Errors()


def summed(results: Results, cell: Cell) -> Summary:
    """Summarise the clips of a cell, without the comparison."""
    speech = list(results.speech(cell).values())
    found = results.records.get(cell, {})
    nothing = [record for clip, record in found.items() if results.kind(clip) == "nothing"]
    counts = [errors_of(record) for record in speech]
    logprobs = [x for record in speech for x in record["reference_logprobs"] or []]
    ends = [math.exp(r["reference_end_logprob"]) for r in speech if r["reference_logprobs"]]
    wers = [count.wer for count in counts if count.n_words]
    return Summary(
        cell=cell,
        n_clips=len(speech),
        errors=total(counts),
        wer_by_clip=_mean(wers),
        above_100=_mean([wer > 1 for wer in wers]),
        runaways=sum(record["runaway"] is not None for record in speech),
        no_end=sum(not record["ended"] for record in speech),
        fallbacks=sum(record["fallback"] for record in speech),
        repeated=_mean([record["compression_ratio"] > MAX_COMPRESSION for record in speech]),
        invented=_mean([bool(record["text"].strip()) for record in nothing]),
        reference_nll=None if not logprobs else -sum(logprobs) / len(logprobs),
        end_probability=_mean(ends),
        encoder_s=_mean([record["encoder_s"] for record in speech]),
        decoder_s=_mean([record["decoder_s"] for record in speech]),
        heads=tallied(speech),
    )


def tallied(records: Sequence[dict[str, Any]]) -> Tally:
    """Aggregate the attention measurements of clips, all with equal weight."""
    tally = Tally()
    for record in records:
        if "heads" in record:
            tally.add(flat(record["heads"]))
    return tally


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def blocks_of(results: Results, clips: Sequence[str]) -> list[str]:
    """Return the block of each clip: its speaker, or the clip itself if the speaker is unknown."""
    about = results.about["clips"]
    return [about[clip]["speaker"] or clip for clip in clips]


def _difference(results: Results, cell: Cell, other: Cell) -> Difference | None:
    mine, theirs = results.speech(cell), results.speech(other)
    clips = sorted(set(mine) & set(theirs))
    ours, full = [errors_of(mine[c]) for c in clips], [errors_of(theirs[c]) for c in clips]
    if not total(full).n_words:
        return None
    blocks = blocks_of(results, clips)
    low, high = difference_interval(ours, full, blocks, n_draws=N_DRAWS, seed=results.spec.seed)
    is_same = [mine[c]["tokens"] == theirs[c]["tokens"] for c in clips]
    different = {block for block, same in zip(blocks, is_same, strict=True) if not same}
    return Difference(
        wer=total(ours).wer - total(full).wer,
        low=low if low < high else None,
        high=high if low < high else None,
        p=difference_p(ours, full, blocks),
        n_clips=len(clips),
        n_same=sum(is_same),
        n_blocks=len(set(blocks)),
        n_blocks_same=len(set(blocks)) - len(different),
    )


def holm(ps: dict[Any, float]) -> dict[Any, float]:
    """Apply Holm's correction for multiple comparisons.

    >>> {k: round(p, 2) for k, p in holm({"a": 0.01, "b": 0.04, "c": 0.03}).items()}
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected = {}
    most = 0.0
    for i, (key, p) in enumerate(sorted(ps.items(), key=lambda item: item[1])):
        most = max(most, min(1.0, (len(ps) - i) * p))
        corrected[key] = most
    return corrected


def _corrected(found: dict[Any, Difference], primary: Any) -> dict[Any, Difference]:
    """Apply Holm's correction to all comparisons but the primary one, fixed before the run."""
    others = {pair: d for pair, d in found.items() if pair != primary}
    by_holm = holm({pair: d.p for pair, d in others.items()})
    least = holm({pair: d.min_p for pair, d in others.items()})
    return {
        pair: replace(d, p_holm=by_holm.get(pair, d.p), min_p_holm=least.get(pair, d.min_p))
        for pair, d in found.items()
    }


def enough_blocks(alpha: float) -> int:
    """Return the fewest blocks with which a comparison can be significant.

    >>> enough_blocks(0.05)
    6
    """
    return next(n for n in itertools.count(1) if min_p(n) <= alpha)


@dataclass(frozen=True)
class Check:
    """The outcome of a control: what must hold, whether it does, and the numbers."""

    name: str
    holds: bool | None  # None: no data
    told: str


def checks(results: Results) -> list[Check]:
    """Evaluate the controls of a run, for each model."""
    found = []
    for model in results.spec.models:
        full = Cell(model, Policy())
        both = Policy("mask:both")
        found += [
            _same(
                results,
                "an all-valid mask changes nothing",
                full,
                Cell(model, both, control="all-valid"),
            ),
            _same(results, "mask:both is trim", Cell(model, both), Cell(model, Policy("trim"))),
            _no_op(results, model),
        ]
        random = results.summaries.get(Cell(model, both, control="random"))
        hidden = results.summaries.get(Cell(model, both))
        if random and hidden and random.wer is not None and hidden.wer is not None:
            told = (
                f"WER {100 * random.wer:.1f} % with as many positions hidden anywhere, "
                f"{100 * hidden.wer:.1f} % with the padding hidden"
            )
            found.append(Check(f"{model}: a random mask is another matter", None, told))
    return found


def _same(results: Results, name: str, a: Cell, b: Cell) -> Check:
    mine, other = results.speech(a), results.speech(b)
    clips = sorted(set(mine) & set(other))
    n_same = sum(mine[c]["tokens"] == other[c]["tokens"] for c in clips)
    told = f"tokens equal on {n_same} of {len(clips)} clips"
    return Check(f"{a.model}: {name}", n_same == len(clips) if clips else None, told)


def _no_op(results: Results, model: str) -> Check:
    """Check that all policies agree on the 30 s clip, which has no padding."""
    texts: dict[Decoding, set[tuple[int, ...]]] = defaultdict(set)
    n = 0
    for cell, records in results.records.items():
        if cell.model != model or cell.control != "none":
            continue
        for clip, record in records.items():
            if results.kind(clip) == "half minute":
                texts[cell.decoding].add(tuple(record["tokens"]))
                n += 1
    holds = all(len(tokens) == 1 for tokens in texts.values()) if n else None
    told = f"{n} cells on a 30 s clip: tokens equal" if holds else f"{n} cells: tokens differ"
    return Check(f"{model}: without padding every policy is a no-op", holds, told)
