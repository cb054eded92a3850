"""The report of a run: HTML page, tables and plots, made from its records only."""

import csv
import html
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asrmask.ablation.clips import NOTHING_S
from asrmask.ablation.plots import PLOTS, render
from asrmask.ablation.spec import Cell
from asrmask.ablation.statistics import (
    Difference,
    Results,
    Summary,
    checks,
    enough_blocks,
    errors_of,
    load,
)
from asrmask.evaluation.alignment import as_html
from asrmask.inspection.online import heads_table
from asrmask.model.policy import Policy
from asrmask.reporting import tables
from asrmask.reporting.pages import SVG, ReportFolder, data_url, render_template
from asrmask.systems.upstream import normalizer

Drawing = dict[str, Any]  # plot, model, caption, and the SVG as a data: URL (None: no data)
N_WORST = 6
MAX_AUDIO_S = 30
COLUMNS = {  # of summary.csv; the page and summary.md show SHOWN, then MORE
    "model": lambda s: s.cell.model,
    "policy": lambda s: _policy(s.cell),
    "decoding": lambda s: str(s.cell.decoding),
    "trailing": lambda s: str(s.cell.trailing),
    "clips": lambda s: s.n_clips,
    "WER %": lambda s: _percent(s.wer),
    "sub": lambda s: s.errors.substitutions if s.n_clips else None,
    "del": lambda s: s.errors.deletions if s.n_clips else None,
    "ins": lambda s: s.errors.insertions if s.n_clips else None,
    "WER % by clip": lambda s: _percent(s.wer_by_clip),
    "clips above 100 %": lambda s: _percent(s.above_100),
    "runaways": lambda s: s.runaways if s.n_clips else None,
    "fallbacks": lambda s: s.fallbacks if s.n_clips else None,
    "repeated %": lambda s: _percent(s.repeated),
    "text from nothing %": lambda s: _percent(s.invented),
    "reference, nats a token": lambda s: s.reference_nll,
    "end after reference": lambda s: s.end_probability,
    "difference": lambda s: _compared(s, lambda d: 100 * d.wer),
    "low": lambda s: _compared(s, lambda d: NONE if d.low is None else 100 * d.low),
    "high": lambda s: _compared(s, lambda d: NONE if d.high is None else 100 * d.high),
    "p": lambda s: _compared(s, lambda d: d.p),
    "p Holm": lambda s: _compared(s, lambda d: d.p_holm),
    "same tokens": lambda s: _compared(s, lambda d: d.n_same),
    "encoder ms": lambda s: None if s.encoder_s is None else 1000 * s.encoder_s,
    "decoder ms": lambda s: None if s.decoder_s is None else 1000 * s.decoder_s,
}
INSPECTED = {  # added if the spec sets `inspect`
    "encoder on padding %": lambda s: _percent(s.on_padding("encoder.self")),
    "cross on padding %": lambda s: _percent(s.on_padding("decoder.cross")),
    "end logit from padding": lambda s: s.end_from("end_padding"),
    "end logit from audio": lambda s: s.end_from("end_audio"),
}
NONE = ""  # not applicable, which differs from "no data"
SHOWN = (
    *("cell", "WER %", "difference", "low", "high", "p Holm"),
    *("sub", "del", "ins", "runaways", "same tokens"),
)
MORE = (
    *("cell", "clips", "WER % by clip", "clips above 100 %", "fallbacks", "repeated %"),
    *("text from nothing %", "reference, nats a token", "end after reference"),
    *("p", "encoder ms", "decoder ms"),
)
DECIMALS = {"p": 4, "p Holm": 4, "reference, nats a token": 4, "end after reference": 4}
DECIMALS |= {"encoder ms": 1, "decoder ms": 1}


def _policy(cell: Cell) -> str:
    return str(cell.policy) if cell.control == "none" else f"mask:{cell.control}"


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _compared(summary: Summary, value: Callable[[Difference], Any]) -> Any:
    """Return a value of a cell's difference from its reference; NONE for the reference itself."""
    if summary.difference is None:
        return NONE if summary.cell == summary.cell.reference else None
    return value(summary.difference)


def shown(summary: Summary, name: str) -> str:
    """Format a column of a summary for reading, with the same number of decimals in every row."""
    if name == "cell":
        return str(replace(summary.cell, model=_file(summary.cell.model)))
    value = (COLUMNS | INSPECTED)[name](summary)
    if value is None:
        return "no data"
    if not isinstance(value, float):
        return str(value)
    decimals = DECIMALS.get(name, 2)
    if name in ("p", "p Holm") and value < 10**-decimals:
        return f"<{10**-decimals:.{decimals}f}"
    return f"{value:{'+' if name in ('difference', 'low', 'high') else ''}.{decimals}f}"


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write report.html, summary.csv, summary.md and plots, for one run or several side by side."""
    runs = [load(folder) for folder in folders]
    files = ReportFolder(out)
    drawings: list[list[Drawing]] = []  # one list for each run
    for i, results in enumerate(runs):
        prefix = f"{i + 1}-" if len(runs) > 1 else ""
        drawings.append([])
        for model in results.spec.models:
            for plot in PLOTS:
                svg, png = render(plot, results, model) or (None, None)
                if svg is not None and png is not None:
                    files.save(f"plots/{prefix}{_file(model)}-{plot.name}.svg", svg)
                    files.save(f"plots/{prefix}{_file(model)}-{plot.name}.png", png)
                address = None if svg is None else data_url(svg, SVG)
                told = plot.caption(results, model)
                drawings[-1].append({"plot": plot, "model": model, "svg": address, "told": told})
    if any(results.spec.inspect for results in runs):
        tallies = [(str(s.cell), s.heads) for results in runs for s in results.summaries.values()]
        files.written += tables.save({"heads": heads_table(tallies, "cell", "clips")}, out)
    files.save("summary.csv", table_csv(runs))
    files.save("summary.md", "\n".join(summary_md(results) for results in runs))
    files.save("report.html", page(runs, drawings))
    return files.written


def _file(model: str) -> str:
    return Path(model).name or "model"


def table_csv(runs: Sequence[Results]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    inspected = any(results.spec.inspect for results in runs)
    columns = {**COLUMNS, **INSPECTED} if inspected else COLUMNS
    writer.writerow(["run", *columns])
    for results in runs:
        for summary in results.summaries.values():
            row = [column(summary) for column in columns.values()]
            writer.writerow([results.folder.name, *map(_csv, row)])
    return out.getvalue()


def _csv(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "no data" if value is None else value


def more_of(results: Results) -> tuple[str, ...]:
    """Return the columns that the page shows on demand."""
    return (*MORE, *INSPECTED) if results.spec.inspect else MORE


def verdict(results: Results) -> list[str]:
    """Return the answer to the spec's question, as sentences."""
    a, b = results.primary
    one, other = results.summaries[a], results.summaries[b]
    found = results.differences.get((a, b))
    if one.wer is None or other.wer is None or found is None:
        return ["No data yet."]
    told = [
        f"With {a.policy} the word error rate of {a.model} is {100 * one.wer:.1f} %, with "
        f"{b.policy} {100 * other.wer:.1f} %, on {results.format_clip_count(found.n_clips)}.",
        f"The difference is {points(found)}: {conclusion(results, found)}.",
        tested(results, found),
    ]
    if one.errors.total > other.errors.total:
        told.append(
            f"{one.errors.insertions} of the {one.errors.total} errors with {a.policy} are "
            f"insertions, words that were never said; with {b.policy} {other.errors.insertions} of "
            f"{other.errors.total}. {one.runaways} of {one.n_clips} clips run away."
        )
    if one.end_probability is not None and other.end_probability is not None:
        told.append(
            f"After the last word of the reference the end token has a probability of "
            f"{one.end_probability:.2f}, with {b.policy} {other.end_probability:.2f}."
        )
    virtual = results.summaries.get(Cell(a.model, Policy("virtual")))
    if virtual and virtual.cell != a and virtual.difference and virtual.wer is not None:
        told.append(
            f"virtual, which computes hardly any padding, has {100 * virtual.wer:.1f} %, to full "
            f"{points(virtual.difference)}; {excluded(results, virtual.difference)}."
        )
    return told


def points(found: Difference) -> str:
    """Format a difference: +2.1 points (95 % interval +0.3 … +4.0)."""
    text = f"{100 * found.wer:+.1f} points"
    if found.low is None or found.high is None:
        return text
    return f"{text} (95 % interval {100 * found.low:+.1f} … {100 * found.high:+.1f})"


def conclusion(results: Results, found: Difference) -> str:
    """Say whether a difference is significant, by the test and alpha fixed before the run."""
    if not results.is_complete:
        return "no verdict before the run is complete"
    if found.min_p > results.spec.alpha:
        return f"not enough {results.blocks} to tell"
    return "it holds" if found.p <= results.spec.alpha else "it may be chance"


def tested(results: Results, found: Difference) -> str:
    """Report the numbers of the significance test, and its limits."""
    alpha = results.spec.alpha
    told = (
        f"Sign-flip test over {found.n_blocks} {results.blocks}: p = {found.p:.3g}; alpha is "
        f"{alpha:g}. The smallest p that it can give is {found.min_p:.3g}"
    )
    if found.min_p > alpha:
        told += f": {enough_blocks(alpha)} {results.blocks} are the fewest that can tell"
    if found.low is None or found.high is None:
        return f"{told}." if found.wer else f"{told}. {excluded(results, found).capitalize()}."
    has_0, holds = found.low <= 0 <= found.high, found.p <= alpha
    if not has_0 and not holds:
        told += (
            f". The interval leaves 0 out, but a bootstrap's interval is too narrow with few "
            f"{results.blocks}"
        )
    elif has_0 and holds:
        told += ". The interval has 0 in it: it is a bootstrap's, the verdict is the test's"
    return told + "."


def excluded(results: Results, found: Difference) -> str:
    """Report how many clips have equal tokens, and an upper bound on the share that differs."""
    who = "of them have" if results.blocks != "clips" else "of such clips have"
    of = "" if results.blocks == "clips" else f" of {found.n_blocks} {results.blocks}"
    return (
        f"tokens are equal on {found.n_same} of {found.n_clips} clips{of}, so at most "
        f"{100 * found.most_blocks:.0f} % {who} other tokens (at 95 %)"
    )


def summary_md(results: Results) -> str:
    """Return the run as Markdown: the verdict, then tables."""
    lines = [f"# {results.spec.question}", "", *verdict(results), ""]
    if not results.is_complete:
        lines += [f"*{results.n_records} of {results.about['n_records']} records so far.*", ""]
    for names in (SHOWN, more_of(results)):
        lines += ["| " + " | ".join(names) + " |", "|---" + "|---:" * (len(names) - 1) + "|"]
        for summary in results.summaries.values():
            lines.append("| " + " | ".join(shown(summary, name) for name in names) + " |")
        lines.append("")
    lines += ["Controls:", ""]
    lines += [f"- {check.name}: {mark(check.holds)}{check.told}" for check in checks(results)]
    if results.about["left_out"]:
        lines += ["", "Left out:", ""]
        lines += [f"- {clip}: {why}" for clip, why in results.about["left_out"].items()]
    return "\n".join(lines) + "\n"


def mark(holds: bool | None) -> str:
    return {True: "holds, ", False: "FAILS, ", None: ""}[holds]


def worst(results: Results) -> list[dict[str, Any]]:
    """Return the clips that lose most in the primary comparison, with their texts side by side."""
    a, b = results.primary
    mine, other = results.speech(a), results.speech(b)
    both = sorted(
        set(mine) & set(other),
        key=lambda clip: errors_of(other[clip]).total - errors_of(mine[clip]).total,
    )
    found = []
    for clip in both[:N_WORST]:
        about = results.about["clips"][clip]
        normalise = normalizer(about["language"])
        said = normalise(about["text"])
        rows = [("reference", html.escape(said), "")]
        for cell, record in ((b, other[clip]), (a, mine[clip])):
            rows.append(
                (str(cell.policy), as_html(said, normalise(record["text"])), str(errors_of(record)))
            )
        found.append({"clip": clip, "rows": rows, "audio": audio_of(about), "path": about["path"]})
    return found


def audio_of(about: dict[str, Any]) -> str | None:
    """Return a clip as a data: URL that a page can play; None if its file cannot be read."""
    from asrmask.audio.constants import SAMPLE_RATE
    from asrmask.audio.recording import as_wav, load_audio
    from asrmask.errors import AsrmaskError

    if not about["path"] or not Path(about["path"]).is_file():
        return None
    try:
        samples = load_audio(about["path"])[: MAX_AUDIO_S * SAMPLE_RATE]
    except AsrmaskError:
        return None
    return data_url(as_wav(samples), "audio/wav")


def page(runs: Sequence[Results], drawings: Sequence[Sequence[Drawing]]) -> str:
    """Return the report as one self-contained HTML page."""
    sections = []
    for results, plots in zip(runs, drawings, strict=True):
        sections.append(
            {
                "results": results,
                "verdict": verdict(results),
                "summaries": list(results.summaries.values()),
                "checks": checks(results),
                "plots": plots,
                "worst": worst(results),
                "spec": json.dumps(results.about["spec"], indent=1, ensure_ascii=False),
                "clips": results.format_clip_count(
                    sum(c["kind"] == "speech" for c in results.about["clips"].values())
                ),
            }
        )
    return render_template(
        Path(__file__).parent / "report.html.j2",
        sections=sections,
        columns=SHOWN,
        more_of=more_of,
        nothing_s=f"{NOTHING_S:g}",
        shown=shown,
        mark=mark,
    )
