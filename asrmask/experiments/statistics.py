"""From records to numbers: each cell summed up, and compared with its reference.

WER is weighted by words (all errors ÷ all reference words) unless it is said to be by clip. What
has no data is None, never 0.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from asrmask.decoding import MOST_COMPRESSION
from asrmask.experiments.records import RecordsError, read
from asrmask.experiments.spec import Cell, Decoding, Spec, Trailing, of
from asrmask.instruments.online import Tally
from asrmask.instruments.quantities import flat, kind_of
from asrmask.policy import Policy
from asrmask.score import Errors, difference_interval, total

N_DRAWS = 10_000


@dataclass(frozen=True)
class Difference:
    """A cell beside its reference, on the clips that both have."""

    wer: float  # WER minus the reference's, of all words
    low: float  # its 95 % interval, paired bootstrap over speakers (or clips)
    high: float
    p: float | None  # of a matched-pairs test; None: no clip differs in its errors
    n_clips: int
    n_same: int  # clips with the same tokens
    p_holm: float | None = None  # corrected for all cells of the run


@dataclass(frozen=True)
class Summary:
    """All clips of a cell."""

    cell: Cell
    n_clips: int
    errors: Errors
    wer_by_clip: float | None  # the mean over clips
    above_100: float | None  # share of clips with more errors than words
    runaways: int  # no end, repetition, times past the end, or unsure
    no_end: int
    fallbacks: int
    repeated: float | None  # share of clips
    invented: float | None  # share of clips without speech that became text
    reference_nll: float | None  # nats a token of the reference, of all tokens
    end_probability: float | None  # mean over clips, after the reference's last word
    encoder_s: float | None  # mean over clips
    decoder_s: float | None
    heads: Tally  # what the instruments said, if they were asked
    difference: Difference | None = None

    @property
    def wer(self) -> float | None:
        return self.errors.wer if self.errors.n_words else None

    def on_padding(self, kind: str) -> float | None:
        """The share of attention on padding: mean over clips, then over the heads of a kind."""
        return _mean(self._means(kind, "padding"))

    def end_from(self, quantity: str) -> float | None:
        """The end token's logit from padding or audio: mean over clips, sum over heads."""
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
    """A run, as far as it has come."""

    folder: Path
    spec: Spec
    about: dict[str, Any]
    records: dict[Cell, dict[str, dict[str, Any]]]  # by cell and clip
    summaries: dict[Cell, Summary]

    @property
    def n_records(self) -> int:
        return sum(map(len, self.records.values()))

    @property
    def is_complete(self) -> bool:
        return self.n_records == self.about["n_records"]

    def kind(self, clip: str) -> str:
        return self.about["clips"][clip]["kind"]

    def speech(self, cell: Cell) -> dict[str, dict[str, Any]]:
        """The records of a cell's clips that have speech and a transcript."""
        found = self.records.get(cell, {})
        return {clip: record for clip, record in found.items() if self.kind(clip) == "speech"}


def load(folder: Path) -> Results:
    """The results in a folder, complete or not."""
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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
    bare = Results(folder, spec, about, dict(records), {})
    summaries = {cell: summed(bare, cell) for cell in spec.cells()}
    compared = {cell: _difference(bare, cell) for cell in summaries if cell != cell.reference}
    return Results(folder, spec, about, dict(records), _corrected(summaries, compared))


def errors_of(record: dict[str, Any]) -> Errors:
    return Errors(*record["errors"]) if record["errors"] is not None else Errors()


def summed(results: Results, cell: Cell) -> Summary:
    """A cell's clips, without the comparison."""
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
        repeated=_mean([record["compression_ratio"] > MOST_COMPRESSION for record in speech]),
        invented=_mean([bool(record["text"].strip()) for record in nothing]),
        reference_nll=None if not logprobs else -sum(logprobs) / len(logprobs),
        end_probability=_mean(ends),
        encoder_s=_mean([record["encoder_s"] for record in speech]),
        decoder_s=_mean([record["decoder_s"] for record in speech]),
        heads=tallied(speech),
    )


def tallied(records: Sequence[dict[str, Any]]) -> Tally:
    """What the instruments said of clips, each of equal weight."""
    tally = Tally()
    for record in records:
        if "heads" in record:
            tally.add(flat(record["heads"]))
    return tally


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def blocks_of(results: Results, clips: Sequence[str]) -> list[str]:
    """What the bootstrap draws: speakers, or clips where no speaker is known."""
    about = results.about["clips"]
    return [about[clip]["speaker"] or clip for clip in clips]


def _difference(results: Results, cell: Cell) -> Difference | None:
    mine, theirs = results.speech(cell), results.speech(cell.reference)
    clips = sorted(set(mine) & set(theirs))
    ours, full = [errors_of(mine[c]) for c in clips], [errors_of(theirs[c]) for c in clips]
    if not total(full).n_words:
        return None
    blocks = blocks_of(results, clips)
    low, high = difference_interval(ours, full, blocks, n_draws=N_DRAWS, seed=results.spec.seed)
    return Difference(
        total(ours).wer - total(full).wer,
        low,
        high,
        matched_pairs([a.total - b.total for a, b in zip(ours, full, strict=True)]),
        len(clips),
        sum(mine[c]["tokens"] == theirs[c]["tokens"] for c in clips),
    )


def matched_pairs(differences: Sequence[int]) -> float | None:
    """p of the matched-pairs test of Gillick and Cox (1989), with clips as the segments.

    The mean difference in errors a clip, over its standard error, against the normal distribution;
    two-sided. None where no clip differs.
    """
    values = np.asarray(differences, dtype=float)
    if len(values) < 2 or not values.any():
        return None
    error = values.std(ddof=1) / math.sqrt(len(values))
    if error == 0:
        return 0.0
    return math.erfc(abs(values.mean() / error) / math.sqrt(2))


def holm(ps: dict[Any, float]) -> dict[Any, float]:
    """Holm's correction: p-values that may be held against one level together.

    >>> {k: round(p, 2) for k, p in holm({"a": 0.01, "b": 0.04, "c": 0.03}).items()}
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected = {}
    most = 0.0
    for i, (key, p) in enumerate(sorted(ps.items(), key=lambda item: item[1])):
        most = max(most, min(1.0, (len(ps) - i) * p))
        corrected[key] = most
    return corrected


def _corrected(
    summaries: dict[Cell, Summary], compared: dict[Cell, Difference | None]
) -> dict[Cell, Summary]:
    ps = {cell: d.p for cell, d in compared.items() if d is not None and d.p is not None}
    by_holm = holm(ps)
    done = {}
    for cell, summary in summaries.items():
        difference = compared.get(cell)
        if difference is not None:
            difference = replace(difference, p_holm=by_holm.get(cell))
        done[cell] = replace(summary, difference=difference)
    return done


@dataclass(frozen=True)
class Check:
    """A control: what must hold, whether it does, and the numbers."""

    name: str
    holds: bool | None  # None: no data
    told: str


def checks(results: Results) -> list[Check]:
    """The controls of a run, model by model."""
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
    """The 30 s clip, where there is no padding: every policy of one way of decoding is equal."""
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
