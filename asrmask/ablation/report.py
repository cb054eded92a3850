"""The report of a run: HTML page, tables and plots, made from its records only."""

import csv
import html
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

from asrmask.ablation.clips import NO_SPEECH_S
from asrmask.ablation.plots import PLOTS
from asrmask.ablation.spec import Cell
from asrmask.ablation.statistics import (
    Difference,
    Results,
    Summary,
    checks,
    format_clip_count,
    load,
)
from asrmask.audio.constants import N_SAMPLES
from asrmask.audio.recording import as_wav, load_audio
from asrmask.errors import AsrmaskError
from asrmask.evaluation.alignment import as_html
from asrmask.evaluation.score import min_p
from asrmask.inspection.online import heads_table
from asrmask.model.policy import Policy
from asrmask.reporting import tables
from asrmask.reporting.pages import ReportFolder, data_url, render_template
from asrmask.systems.upstream import normalizer

N_WORST = 6
MARKS = {True: "holds, ", False: "FAILS, ", None: ""}  # of checks
# columns of the first table on the page and in summary.md; the second has the rest
MAIN_COLUMNS = (
    *("cell", "WER %", "difference", "low", "high", "p Holm"),
    *("sub", "del", "ins", "runaways", "same tokens"),
)
DECIMALS = {"p": 4, "p Holm": 4, "reference, nats a token": 4, "end after reference": 4}
DECIMALS |= {"encoder ms": 1, "decoder ms": 1}


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write report.html, summary.csv, summary.md and plots, for one run or several side by side."""
    runs = [load(folder) for folder in folders]
    files = ReportFolder(out)
    plots: list[list[dict[str, Any]]] = []  # one list for each run
    for i, results in enumerate(runs):
        prefix = f"{i + 1}-" if len(runs) > 1 else ""
        plots.append([])
        for model, plot in product(results.spec.models, PLOTS):
            figure, caption = plot.render(results, model)
            name = f"plots/{prefix}{_model_name(model)}-{plot.name}"
            svg = None if figure is None else files.save_figure(name, figure)
            plots[-1].append({"plot": plot, "model": model, "svg": svg, "caption": caption})
    if any(results.spec.inspect for results in runs):
        tallies = [(str(s.cell), s.heads) for results in runs for s in results.summaries.values()]
        files.written += tables.save({"heads": heads_table(tallies, "cell", "clips")}, out)
    files.save("summary.csv", summary_csv(runs))
    files.save("summary.md", "\n".join(summary_md(results) for results in runs))
    files.save("report.html", page(runs, plots))
    return files.written


def _model_name(model: str) -> str:
    return Path(model).name or "model"


def format_column(summary: Summary, name: str) -> str:
    """Format a column of a summary for reading, with the same number of decimals in every row."""
    if name == "cell":
        return str(replace(summary.cell, model=_model_name(summary.cell.model)))
    value = summary.columns[name]
    if value is None:
        return "no data"
    if not isinstance(value, float):
        return str(value)
    decimals = DECIMALS.get(name, 2)
    if name in ("p", "p Holm") and value < 10**-decimals:
        return f"<{10**-decimals:.{decimals}f}"
    return f"{value:{'+' if name in ('difference', 'low', 'high') else ''}.{decimals}f}"


def more_columns(results: Results) -> list[str]:
    """Return the columns that are not in the first table."""
    first, *_ = results.summaries.values()
    known = {*MAIN_COLUMNS, "model", "policy", "decoding", "trailing"}
    return ["cell", *(name for name in first.columns if name not in known)]


def summary_csv(runs: Sequence[Results]) -> str:
    """Return one row for each cell of each run."""
    rows: list[dict[str, Any]] = []
    for results in runs:
        for summary in results.summaries.values():
            rows.append({"run": results.folder.name, **summary.columns})
    out = io.StringIO()
    writer = csv.DictWriter(out, max(rows, key=len), restval="no data", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        numbers = {name: f"{x:.6g}" for name, x in row.items() if isinstance(x, float)}
        missing = {name: "no data" for name, x in row.items() if x is None}
        writer.writerow(row | numbers | missing)
    return out.getvalue()


def verdict(results: Results) -> list[str]:
    """Return the answer to the spec's question, as sentences."""
    a, b = results.primary
    one, other = results.summaries[a], results.summaries[b]
    difference = results.differences.get((a, b))
    if one.wer is None or other.wer is None or difference is None:
        return ["No data yet."]
    n_clips = format_clip_count(difference.n_clips, results.about)
    sentences = [
        f"With {a.policy} the word error rate of {a.model} is {100 * one.wer:.1f} %, with "
        f"{b.policy} {100 * other.wer:.1f} %, on {n_clips}.",
        f"The difference is {format_difference(difference)}: {conclusion(results, difference)}.",
        format_test(results, difference),
    ]
    if one.errors.total > other.errors.total:
        sentences.append(
            f"{one.errors.insertions} of the {one.errors.total} errors with {a.policy} are "
            f"insertions, words that were never said; with {b.policy} {other.errors.insertions} of "
            f"{other.errors.total}. {one.columns['runaways']} of {one.n_clips} clips run away."
        )
    ends = [summary.columns["end after reference"] for summary in (one, other)]
    if None not in ends:
        sentences.append(
            f"After the last word of the reference the end token has a probability of "
            f"{ends[0]:.2f}, with {b.policy} {ends[1]:.2f}."
        )
    virtual = results.summaries.get(Cell(a.model, Policy("virtual")))
    if virtual and virtual.cell != a and virtual.difference and virtual.wer is not None:
        sentences.append(
            f"virtual, which computes hardly any padding, has {100 * virtual.wer:.1f} %, to full "
            f"{format_difference(virtual.difference)}; {format_same(results, virtual.difference)}."
        )
    return sentences


def format_difference(difference: Difference) -> str:
    """Format a difference: +2.1 points (95 % interval +0.3 … +4.0)."""
    text = f"{100 * difference.wer:+.1f} points"
    if difference.low is None or difference.high is None:
        return text
    return f"{text} (95 % interval {100 * difference.low:+.1f} … {100 * difference.high:+.1f})"


def conclusion(results: Results, difference: Difference) -> str:
    """Say whether a difference is significant, by the test and alpha fixed before the run."""
    if not results.is_complete:
        return "no verdict before the run is complete"
    if min_p(difference.n_blocks) > results.spec.alpha:
        return f"not enough {results.blocks} to tell"
    return "it holds" if difference.p <= results.spec.alpha else "it may be chance"


def format_test(results: Results, difference: Difference) -> str:
    """Report the numbers of the significance test, and its limits."""
    alpha, blocks = results.spec.alpha, results.blocks
    smallest = min_p(difference.n_blocks)
    text = (
        f"Sign-flip test over {difference.n_blocks} {blocks}: p = {difference.p:.3g}; alpha is "
        f"{alpha:g}. The smallest p that it can give is {smallest:.3g}"
    )
    if smallest > alpha:
        n_enough = next(n for n in count(1) if min_p(n) <= alpha)
        text += f": {n_enough} {blocks} are the fewest that can tell"
    if difference.low is None or difference.high is None:
        same = format_same(results, difference).capitalize()
        return f"{text}." if difference.wer else f"{text}. {same}."
    has_0, holds = difference.low <= 0 <= difference.high, difference.p <= alpha
    if not has_0 and not holds:
        text += (
            f". The interval leaves 0 out, but a bootstrap's interval is too narrow with few "
            f"{blocks}"
        )
    elif has_0 and holds:
        text += ". The interval includes 0, but the verdict is the test's, not the bootstrap's"
    return text + "."


def format_same(results: Results, difference: Difference) -> str:
    """Report how many clips have equal tokens, and an upper bound on the share that differs."""
    is_clips = results.blocks == "clips"
    blocks = "" if is_clips else f" of {difference.n_blocks} {results.blocks}"
    return (
        f"tokens are equal on {difference.n_same} of {difference.n_clips} clips{blocks}, so at "
        f"most {100 * difference.max_different:.0f} % of {'such clips' if is_clips else 'them'} "
        f"have other tokens (at 95 %)"
    )


def summary_md(results: Results) -> str:
    """Return the run as Markdown: the verdict, then tables."""
    lines = [f"# {results.spec.question}", "", *verdict(results), ""]
    if not results.is_complete:
        lines += [f"*{results.n_records} of {results.about['n_records']} records so far.*", ""]
    for names in (MAIN_COLUMNS, more_columns(results)):
        rows = [[format_column(s, name) for name in names] for s in results.summaries.values()]
        lines += [tables.markdown(names, rows, "---:"), ""]
    lines += ["Controls:", ""]
    lines += [f"- {check.name}: {MARKS[check.holds]}{check.detail}" for check in checks(results)]
    if results.about["left_out"]:
        lines += ["", "Left out:", ""]
        lines += [f"- {clip}: {why}" for clip, why in results.about["left_out"].items()]
    return "\n".join(lines) + "\n"


def worst(results: Results) -> list[dict[str, Any]]:
    """Return the clips that lose most in the primary comparison, with their texts side by side."""
    a, b = results.primary
    mine, theirs = results.speech(a), results.speech(b)

    def n_fewer_errors(clip: str) -> int:
        return theirs[clip]["errors"].total - mine[clip]["errors"].total

    found = []
    clips = sorted(set(mine) & set(theirs), key=lambda clip: (n_fewer_errors(clip), clip))
    for clip in clips[:N_WORST]:
        about = results.about["clips"][clip]
        path, normalise = about["path"], normalizer(about["language"])
        reference = normalise(about["text"])
        rows = [("reference", html.escape(reference), "")]
        for cell, record in ((b, theirs[clip]), (a, mine[clip])):
            text = as_html(reference, normalise(record["text"]))
            rows.append((str(cell.policy), text, str(record["errors"])))
        found.append({"clip": clip, "rows": rows, "audio": audio_of(path), "path": path})
    return found


def audio_of(path: str | None) -> str | None:
    """Return a clip as a data: URL that a page can play; None if its file cannot be read."""
    try:
        return None if path is None else data_url(as_wav(load_audio(path)[:N_SAMPLES]), "audio/wav")
    except AsrmaskError:
        return None


def page(runs: Sequence[Results], plots: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return the report as one self-contained HTML page."""
    sections = [
        {
            "results": results,
            "verdict": verdict(results),
            "summaries": list(results.summaries.values()),
            "more_columns": more_columns(results),
            "checks": checks(results),
            "plots": plots[i],
            "worst": worst(results),
            "spec": json.dumps(results.about["spec"], indent=1, ensure_ascii=False),
            "clips": format_clip_count(len(results.speech_clips), results.about),
        }
        for i, results in enumerate(runs)
    ]
    return render_template(
        Path(__file__).parent / "report.html.j2",
        sections=sections,
        columns=MAIN_COLUMNS,
        no_speech_s=f"{NO_SPEECH_S:g}",
        format_column=format_column,
        marks=MARKS,
    )
