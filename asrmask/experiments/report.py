"""The report of a run: a page, tables and plots, from its records alone."""

import csv
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asrmask.alignment import as_html
from asrmask.experiments.plots import PLOTS, render
from asrmask.experiments.spec import Cell
from asrmask.experiments.statistics import (
    Results,
    Summary,
    checks,
    errors_of,
    load,
)
from asrmask.files import replacing
from asrmask.instruments import tables
from asrmask.instruments.quantities import kind_of
from asrmask.pages import SVG, embedded, rendered
from asrmask.policy import Policy
from asrmask.upstream import normalizer

N_WORST = 6
MOST_AUDIO_S = 30
COLUMNS = {
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
    "reference, nats a token": lambda s: _rounded(s.reference_nll, 4),
    "end after reference": lambda s: _rounded(s.end_probability, 4),
    "difference": lambda s: None if s.difference is None else _percent(s.difference.wer),
    "low": lambda s: None if s.difference is None else _percent(s.difference.low),
    "high": lambda s: None if s.difference is None else _percent(s.difference.high),
    "p": lambda s: None if s.difference is None else _rounded(s.difference.p, 5),
    "p Holm": lambda s: None if s.difference is None else _rounded(s.difference.p_holm, 5),
    "same tokens": lambda s: None if s.difference is None else s.difference.n_same,
    "encoder ms": lambda s: None if s.encoder_s is None else round(1000 * s.encoder_s, 1),
    "decoder ms": lambda s: None if s.decoder_s is None else round(1000 * s.decoder_s, 1),
}
INSPECTED = {  # where the spec says `inspect`
    "encoder on padding %": lambda s: _percent(s.on_padding("encoder.self")),
    "cross on padding %": lambda s: _percent(s.on_padding("decoder.cross")),
    "end logit from padding": lambda s: _rounded(s.end_from("end_padding"), 3),
    "end logit from audio": lambda s: _rounded(s.end_from("end_audio"), 3),
}
DIFFERENCE = "to full, 95 % interval, p (Holm)"
SHOWN = (
    *("policy", "WER %", DIFFERENCE, "sub", "del", "ins", "decoding", "trailing", "clips"),
    *("clips above 100 %", "runaways", "fallbacks", "text from nothing %"),
    *("reference, nats a token", "end after reference", "encoder ms", "decoder ms"),
)


def _policy(cell: Cell) -> str:
    return str(cell.policy) if cell.control == "none" else f"mask:{cell.control}"


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 2)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def shown(value: object) -> str:
    return "no data" if value is None else str(value)


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """report.html, summary.csv, summary.md and the plots of one run, or of several side by side."""
    runs = [load(folder) for folder in folders]
    out.mkdir(parents=True, exist_ok=True)
    written = []

    def save(name: str, content: str | bytes) -> None:
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, binary=isinstance(content, bytes)) as file:
            file.write(content)
        written.append(path)

    for i, results in enumerate(runs):
        for model in results.spec.models:
            for plot in PLOTS:
                for form in ("svg", "png"):
                    content = render(plot, results, model, form)
                    if content is not None:
                        prefix = f"{i + 1}-" if len(runs) > 1 else ""
                        save(f"plots/{prefix}{_file(model)}-{plot.name}.{form}", content)
    if any(results.spec.inspect for results in runs):
        written += tables.save({"heads": heads_table(runs)}, out)
    save("summary.csv", table_csv(runs))
    save("summary.md", "\n".join(summary_md(results) for results in runs))
    save("report.html", page(runs))
    return written


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
            writer.writerow([results.folder.name, *map(shown, row)])
    return out.getvalue()


def heads_table(runs: Sequence[Results]) -> tables.Table:
    """Every quantity of every head in every cell: means over clips with their intervals."""
    table = tables.Table({"cell": str, **tables.HEADS})
    for results in runs:
        for summary in results.summaries.values():
            for (place, quantity), moments in summary.heads.moments.items():
                bounds = zip(moments.means(), *moments.interval(), strict=True)
                for head, (mean, low, high) in enumerate(bounds):
                    table.add(
                        cell=str(summary.cell),
                        attention=kind_of(place),
                        layer=int(place.split(".")[1]),
                        head=head,
                        quantity=quantity,
                        clips=int(moments.n[head]),
                        mean=float(mean),
                        low=float(low),
                        high=float(high),
                    )
    return table


def names_of(results: Results) -> tuple[str, ...]:
    """The columns of a table for people."""
    return (*SHOWN, *INSPECTED) if results.spec.inspect else SHOWN


def difference(summary: Summary) -> str:
    """How far from its reference, in words: +2.1 (+0.3 … +4.0), p 0.01."""
    found = summary.difference
    if found is None:
        return "" if summary.cell == summary.cell.reference else "no data"
    text = f"{100 * found.wer:+.2f} ({100 * found.low:+.2f} … {100 * found.high:+.2f})"
    return text if found.p_holm is None else f"{text}, p {found.p_holm:.2g}"


def value_of(summary: Summary, name: str) -> object:
    """What a table for people has in a column."""
    if name == DIFFERENCE:
        return difference(summary)
    return (COLUMNS | INSPECTED)[name](summary)


def verdict(results: Results) -> list[str]:
    """The answer to the question, in words and numbers."""
    model = results.spec.models[0]
    a, b = (Cell(model, Policy.parse(text)) for text in results.spec.primary)
    one, other = results.summaries[a], results.summaries[b]
    if one.wer is None or other.wer is None:
        return ["No data yet."]
    told = [
        f"With {a.policy} the word error rate of {model} is {100 * one.wer:.1f} %, with {b.policy} "
        f"{100 * other.wer:.1f} %, on {one.n_clips} clips."
    ]
    found = one.difference
    if found is not None and b == a.reference:
        is_clear = found.low > 0 or found.high < 0
        corrected = "" if found.p_holm is None else f"; p = {found.p_holm:.2g} after Holm"
        told.append(
            f"The difference is {100 * found.wer:+.1f} points (95 % interval "
            f"{100 * found.low:+.1f} … {100 * found.high:+.1f}{corrected}): "
            + ("it holds." if is_clear else "it may be chance.")
        )
        more = one.errors.insertions - other.errors.insertions
        rest = one.errors.total - other.errors.total
        if rest > 0:
            told.append(
                f"{more} of the {rest} additional errors are insertions: words that were never "
                f"said. {one.runaways} of {one.n_clips} clips run away."
            )
    if one.end_probability is not None and other.end_probability is not None:
        told.append(
            f"After the last word of the reference the end token has a probability of "
            f"{one.end_probability:.2f}, with {b.policy} {other.end_probability:.2f}."
        )
    virtual = results.summaries.get(Cell(model, Policy("virtual")))
    if virtual is not None and virtual.difference is not None and virtual.wer is not None:
        found = virtual.difference
        word = "is within" if found.low <= 0 <= found.high else "is outside"
        told.append(
            f"virtual, which computes hardly any padding, has {100 * virtual.wer:.1f} %: full "
            f"{word} its interval ({100 * found.low:+.1f} … {100 * found.high:+.1f} points), "
            f"tokens equal on {found.n_same} of {found.n_clips} clips."
        )
    return told


def summary_md(results: Results) -> str:
    """The run as a Markdown table, the verdict first."""
    lines = [f"# {results.spec.question}", "", *verdict(results), ""]
    if not results.is_complete:
        lines += [f"*{results.n_records} of {results.about['n_records']} records so far.*", ""]
    names = names_of(results)
    lines += ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for summary in results.summaries.values():
        lines.append("| " + " | ".join(shown(value_of(summary, name)) for name in names) + " |")
    lines += ["", "Controls:", ""]
    lines += [f"- {check.name}: {mark(check.holds)}{check.told}" for check in checks(results)]
    if results.about["left_out"]:
        lines += ["", "Left out:", ""]
        lines += [f"- {clip}: {why}" for clip, why in results.about["left_out"].items()]
    return "\n".join(lines) + "\n"


def mark(holds: bool | None) -> str:
    return {True: "holds, ", False: "FAILS, ", None: ""}[holds]


def worst(results: Results) -> list[dict[str, Any]]:
    """The clips that lose most in the primary comparison, with their texts side by side."""
    model = results.spec.models[0]
    a, b = (Cell(model, Policy.parse(text)) for text in results.spec.primary)
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
    """The clip as a data: address that a page can play; None if its file is not there."""
    from asrmask.audio import SAMPLE_RATE, as_wav, load_audio
    from asrmask.errors import AsrmaskError

    if not about["path"] or not Path(about["path"]).is_file():
        return None
    try:
        samples = load_audio(about["path"])[: MOST_AUDIO_S * SAMPLE_RATE]
    except AsrmaskError:
        return None
    return embedded(as_wav(samples), "audio/wav")


def page(runs: Sequence[Results]) -> str:
    """The whole report as one page that needs nothing else."""
    sections = []
    for results in runs:
        plots = []
        for model in results.spec.models:
            for plot in PLOTS:
                svg = render(plot, results, model, "svg")
                drawing = None if svg is None else embedded(svg, SVG)
                plots.append({"plot": plot, "model": model, "svg": drawing})
        sections.append(
            {
                "results": results,
                "verdict": verdict(results),
                "summaries": list(results.summaries.values()),
                "checks": checks(results),
                "plots": plots,
                "worst": worst(results),
                "spec": json.dumps(results.about["spec"], indent=1, ensure_ascii=False),
                "n_clips": sum(c["kind"] == "speech" for c in results.about["clips"].values()),
            }
        )
    return rendered(
        Path(__file__).parent / "report.html.j2",
        sections=sections,
        names_of=names_of,
        value_of=value_of,
        shown=shown,
        mark=mark,
    )
