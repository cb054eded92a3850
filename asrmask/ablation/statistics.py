"""Summarise the records of each cell and compare the cell with its reference.

WER is weighted by words (all errors ÷ all reference words) unless it is named "by clip". A value
without data is None, never 0.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from asrmask.ablation.records import RecordsError, read
from asrmask.ablation.spec import Cell, Decoding, Spec, of
from asrmask.decoding.quality import MAX_COMPRESSION
from asrmask.evaluation.score import (
    Errors,
    clopper_pearson_upper,
    difference_interval,
    difference_p,
    total,
)
from asrmask.inspection.online import Tally
from asrmask.inspection.quantities import flat, kind_of
from asrmask.model.policy import Policy

N_DRAWS = 10_000

Record = dict[str, Any]


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
    max_different: float  # upper 95 % bound on the share of blocks with different tokens
    p_holm: float  # Holm-corrected; the primary comparison is not corrected


@dataclass(frozen=True)
class Summary:
    """Statistics of a cell over all of its clips with speech.

    columns: the row in summary.csv; None: no data, "": does not apply
    heads:   attention measurements, if the spec sets `inspect`
    """

    cell: Cell
    n_clips: int
    errors: Errors
    difference: Difference | None
    columns: dict[str, Any]
    heads: Tally

    @property
    def wer(self) -> float | None:
        return self.errors.wer if self.errors.n_words else None


@dataclass(frozen=True)
class Results:
    """The results of a run, complete or not."""

    folder: Path
    spec: Spec
    about: dict[str, Any]
    records: dict[Cell, dict[str, Record]]  # by cell and clip; "errors" are Errors
    summaries: dict[Cell, Summary]
    differences: dict[tuple[Cell, Cell], Difference]  # all tested pairs, including the primary

    @property
    def primary(self) -> tuple[Cell, Cell]:
        """The comparison that the spec fixed before the run."""
        a, b = (Cell(self.spec.models[0], Policy.parse(text)) for text in self.spec.primary)
        return a, b

    @property
    def speech_clips(self) -> list[dict[str, Any]]:
        return [clip for clip in self.about["clips"].values() if clip["kind"] == "speech"]

    @property
    def blocks(self) -> str:
        """The unit of the bootstrap and the sign-flip test: "speakers" or "clips"."""
        n_known = sum(clip["speaker"] is not None for clip in self.speech_clips)
        if n_known in (0, len(self.speech_clips)):
            return "speakers" if n_known else "clips"
        return "speakers (clips where none is known)"

    @property
    def n_records(self) -> int:
        return sum(map(len, self.records.values()))

    @property
    def is_complete(self) -> bool:
        return self.n_records == self.about["n_records"]

    def of_kind(self, cell: Cell, kind: str) -> dict[str, Record]:
        """Return the records of a cell by clip, of one kind of clip."""
        clips = self.about["clips"]
        records = self.records.get(cell, {})
        return {clip: record for clip, record in records.items() if clips[clip]["kind"] == kind}

    def speech(self, cell: Cell) -> dict[str, Record]:
        return self.of_kind(cell, "speech")

    def blocks_of(self, clips: Sequence[str]) -> list[str]:
        """Return the block of each clip: its speaker, or the clip if the speaker is unknown."""
        return [self.about["clips"][clip]["speaker"] or clip for clip in clips]


def format_clip_count(n: int, about: Mapping[str, Any]) -> str:
    """Format a number of clips: "5 of 16 clips", or "16 clips" if they are all that there are."""
    n_available = about.get("n_available", n)
    return f"{n} clips" if n == n_available else f"{n} of {n_available} clips"


def load(folder: Path) -> Results:
    """Load the results in a folder, complete or not."""
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordsError(f"{folder}: expected a run with run.json, got {error}") from None
    spec = of(about["spec"])
    cells = {str(cell): cell for cell in spec.cells()}
    records: dict[Cell, dict[str, Record]] = defaultdict(dict)
    for record in read(folder / "records.jsonl"):
        if record["cell"] not in cells:
            raise RecordsError(
                f"{folder / 'records.jsonl'}: expected cells of the spec, got {record['cell']!r}"
            )
        if record["errors"] is not None:
            record["errors"] = Errors(*record["errors"])
        records[cells[record["cell"]]][record["clip"]] = record
    results = Results(folder, spec, about, dict(records), {}, {})
    pairs = [(cell, cell.reference) for cell in cells.values() if cell != cell.reference]
    differences = {
        pair: difference
        for pair in (*pairs, results.primary)
        if (difference := _compare(results, *pair)) is not None
    }
    others = {pair: d.p for pair, d in differences.items() if pair != results.primary}
    for pair, p_holm in holm(others).items():
        differences[pair] = replace(differences[pair], p_holm=p_holm)
    summaries = {
        cell: _summarise(results, cell, differences.get((cell, cell.reference)))
        for cell in cells.values()
    }
    return replace(results, summaries=summaries, differences=differences)


def _summarise(results: Results, cell: Cell, difference: Difference | None) -> Summary:
    speech = list(results.speech(cell).values())
    nothing = results.of_kind(cell, "nothing").values()
    errors = [record["errors"] for record in speech]
    sums = total(errors)
    wers = [e.wer for e in errors if e.n_words]
    ends = [math.exp(r["reference_end_logprob"]) for r in speech if r["reference_logprobs"]]
    columns = {
        "model": cell.model,
        "policy": cell.policy_name,
        "decoding": str(cell.decoding),
        "trailing": str(cell.trailing),
        "clips": len(speech),
        "WER %": 100 * sums.wer if sums.n_words else None,
        "sub": sums.substitutions,
        "del": sums.deletions,
        "ins": sums.insertions,
        "WER % by clip": _mean(wers, 100),
        "clips above 100 %": _mean([wer > 1 for wer in wers], 100),
        "runaways": sum(record["runaway"] is not None for record in speech),
        "fallbacks": sum(record["fallback"] for record in speech),
        "repeated %": _mean([r["compression_ratio"] > MAX_COMPRESSION for r in speech], 100),
        "text from nothing %": _mean([bool(r["text"].strip()) for r in nothing], 100),
        "reference, nats a token": _mean(
            [-x for record in speech for x in record["reference_logprobs"] or []]
        ),
        "end after reference": _mean(ends),
        **_difference_columns(cell, difference),
        "encoder ms": _mean([record["encoder_s"] for record in speech], 1000),
        "decoder ms": _mean([record["decoder_s"] for record in speech], 1000),
    }
    if not speech:
        columns |= dict.fromkeys(("sub", "del", "ins", "runaways", "fallbacks"))
    heads = Tally()
    for record in speech:
        heads.add(flat(record.get("heads", {})))
    if results.spec.inspect:
        columns |= _head_columns(heads)
    return Summary(cell, len(speech), sums, difference, columns, heads)


def _difference_columns(cell: Cell, difference: Difference | None) -> dict[str, Any]:
    if difference is None:
        names = ("difference", "low", "high", "p", "p Holm", "same tokens")
        return dict.fromkeys(names, "" if cell == cell.reference else None)
    return {
        "difference": 100 * difference.wer,
        "low": "" if difference.low is None else 100 * difference.low,
        "high": "" if difference.high is None else 100 * difference.high,
        "p": difference.p,
        "p Holm": difference.p_holm,
        "same tokens": difference.n_same,
    }


def _head_columns(heads: Tally) -> dict[str, float | None]:
    """Shares of attention, mean over heads, and end-token logits, sum over heads."""

    def means(kind: str, quantity: str) -> list[float]:
        return [
            float(mean)
            for (place, name), moments in heads.moments.items()
            if kind_of(place) == kind and name == quantity
            for mean in moments.means()
            if not math.isnan(mean)
        ]

    padding, audio = means("decoder.cross", "end_padding"), means("decoder.cross", "end_audio")
    return {
        "encoder on padding %": _mean(means("encoder.self", "padding"), 100),
        "cross on padding %": _mean(means("decoder.cross", "padding"), 100),
        "end logit from padding": sum(padding) if padding else None,
        "end logit from audio": sum(audio) if audio else None,
    }


def _mean(values: Sequence[float], scale: float = 1) -> float | None:
    return scale * float(np.mean(values)) if values else None


def _compare(results: Results, cell: Cell, other: Cell) -> Difference | None:
    """Compare two cells on the clips that both have; None if these have no words."""
    mine, theirs = results.speech(cell), results.speech(other)
    clips = sorted(set(mine) & set(theirs))
    a, b = [mine[c]["errors"] for c in clips], [theirs[c]["errors"] for c in clips]
    if not total(b).n_words:
        return None
    blocks = results.blocks_of(clips)
    low, high = difference_interval(a, b, blocks, n_draws=N_DRAWS, seed=results.spec.seed)
    is_same = [mine[c]["tokens"] == theirs[c]["tokens"] for c in clips]
    different = {block for block, same in zip(blocks, is_same, strict=True) if not same}
    p = difference_p(a, b, blocks)
    return Difference(
        wer=total(a).wer - total(b).wer,
        low=low if low < high else None,
        high=high if low < high else None,
        p=p,
        n_clips=len(clips),
        n_same=sum(is_same),
        n_blocks=len(set(blocks)),
        max_different=clopper_pearson_upper(len(different), len(set(blocks))),
        p_holm=p,
    )


def holm(ps: dict[Any, float]) -> dict[Any, float]:
    """Apply Holm's correction for multiple comparisons.

    >>> {k: round(p, 2) for k, p in holm({"a": 0.01, "b": 0.04, "c": 0.03}).items()}
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    order = sorted(ps, key=lambda key: ps[key])
    scaled = [min(1.0, (len(ps) - i) * ps[key]) for i, key in enumerate(order)]
    return dict(zip(order, itertools.accumulate(scaled, max), strict=True))


@dataclass(frozen=True)
class Check:
    """The outcome of a control: what must hold, whether it does, and the numbers."""

    name: str
    holds: bool | None  # None: no data, or nothing that must hold
    detail: str


def checks(results: Results) -> list[Check]:
    """Evaluate the controls of a run, for each model."""
    found = []
    for model in results.spec.models:
        both = Cell(model, Policy("mask:both"))
        all_valid, random = replace(both, control="all-valid"), replace(both, control="random")
        trim = Cell(model, Policy("trim"))
        found += [
            _check_same(results, "an all-valid mask changes nothing", both.reference, all_valid),
            _check_same(results, "mask:both is trim", both, trim),
            _check_no_op(results, model),
        ]
        anywhere, padding = results.summaries[random].wer, results.summaries[both].wer
        if anywhere is not None and padding is not None:
            detail = (
                f"WER {100 * anywhere:.1f} % with as many positions hidden anywhere, "
                f"{100 * padding:.1f} % with the padding hidden"
            )
            found.append(Check(f"{model}: random mask, for comparison", None, detail))
    return found


def _check_same(results: Results, name: str, a: Cell, b: Cell) -> Check:
    mine, theirs = results.speech(a), results.speech(b)
    is_same = [mine[c]["tokens"] == theirs[c]["tokens"] for c in set(mine) & set(theirs)]
    detail = f"tokens equal on {sum(is_same)} of {len(is_same)} clips"
    return Check(f"{a.model}: {name}", all(is_same) if is_same else None, detail)


def _check_no_op(results: Results, model: str) -> Check:
    """Check that all policies agree on the 30 s clip, which has no padding."""
    texts: dict[Decoding, list[list[int]]] = defaultdict(list)
    for cell in results.records:
        if cell.model == model and cell.control == "none":
            records = results.of_kind(cell, "half minute").values()
            texts[cell.decoding] += [record["tokens"] for record in records]
    n = sum(map(len, texts.values()))
    holds = all(tokens == several[0] for several in texts.values() for tokens in several)
    detail = (
        f"{n} cells on a 30 s clip: tokens equal" if n and holds else f"{n} cells: tokens differ"
    )
    return Check(f"{model}: without padding every policy is a no-op", holds if n else None, detail)
