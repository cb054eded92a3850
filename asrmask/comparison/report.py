"""The report of a comparison: JSON data, terminal lines, and compare.html."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asrmask.comparison.divergence import NEAR
from asrmask.comparison.run import OPENAI
from asrmask.comparison.stages import TOLERANCE, Record, excess, worst_by_group
from asrmask.comparison.transcripts import OTHERS_TIME_S, TIME_S
from asrmask.evaluation.alignment import as_html, as_text
from asrmask.evaluation.score import Errors, total
from asrmask.reporting.pages import render_template
from asrmask.systems.upstream import normalizer

MOST_TEXTS = 200  # files whose texts are on the page; files that differ come first
ROW = "{:26}{:{width}}{:8}{:>9}{:>7}{:>17}{:>9}"
HEADINGS = ("file", "against", "verdict", "of tol.", "words", "WER % (theirs)", "time")
LEGEND = (
    "of tol.: the largest difference of a stage, in units of its tolerance; "
    "words: how many differ; time: theirs to ours, above 1 asrmask is faster"
)
COMPARED_STAGES = (
    f"log-Mel, every module of encoder and decoder, cross keys and values and teacher-forced "
    f"logits of every window to {TOLERANCE:g} (inside layers relative to their size), then "
    f"language, tokens, text, segment and word times (to {TIME_S} s); a choice between logits "
    f"closer than {NEAR:g} is a near tie and counts as equal"
)
COMPARED_TEXT = (
    f"normalised text, and the times of words or else of segments to {OTHERS_TIME_S} s; all "
    f"systems get the same beam size, language, task and word times, the rest are their defaults"
)


def summarise(
    about: Record, systems: Sequence[str], files: Sequence[Record], failed: Mapping[str, str]
) -> Record:
    """Return the complete report as JSON data.

    about:  command, model and settings
    failed: path → reason of each file that could not be compared
    """
    n_different = sum(not file["equal"] for file in files)
    verdict = f"not equal: {n_different} of {len(files)} files differ"
    if not n_different:
        verdict = "equal within tolerance" if files else "nothing was compared"
    stages = (
        {**stage, "file": file["name"] if stage["difference"] else ""}
        for file in files
        for system in file["against"].values()
        for stage in system["stages"]
    )
    return {
        **about,
        "equal": not n_different and not failed,
        "exit_code": 2 if failed else 1 if n_different else 0,
        "verdict": verdict + (f"; failed: {len(failed)}" if failed else ""),
        "systems": {name: _totals(files, name) for name in systems},
        "stages": worst_by_group(stages),
        "files": files,
        "failed": failed,
    }


def _totals(files: Sequence[Record], system: str) -> Record:
    """Summarise the comparison with one system over all files."""
    theirs = [file["against"][system] for file in files]
    errors, took_s = {}, {}
    for name, records in {"asrmask": [file["asrmask"] for file in files], system: theirs}.items():
        errors[name] = total(Errors(**record["errors"]) for record in records if record["errors"])
        took_s[name] = sum(record["took_s"] for record in records)
    n_equal = sum(record["equal"] for record in theirs)
    n_near = sum(record["near_tie"] is not None for record in theirs)
    n_words = sum(record["words_different"] for record in theirs)
    summary = f"{system}: {n_equal} of {len(files)} files equal"
    summary += f" ({n_near} of them by a near tie)" if n_near else ""
    summary += f", {n_words} words differ"
    wer = None
    if errors["asrmask"].n_words:
        wer = {name: counted.wer for name, counted in errors.items()}
        summary += "; WER " + ", ".join(f"{name} {100 * rate:.2f} %" for name, rate in wer.items())
    if our_s := took_s["asrmask"]:
        summary += "; " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took_s.items())
        summary += f": {took_s[system] / our_s:.2f} times as fast"
    return {
        "summary": summary,
        "compared": COMPARED_STAGES if system == OPENAI else COMPARED_TEXT,
        "files": len(files),
        "equal": n_equal,
        "near_ties": n_near,
        "words_different": n_words,
        "wer": wer,
        "took_s": took_s,
    }


def format_row(systems: Sequence[str], *cells: Any) -> str:
    """Format a row of the terminal table: HEADINGS, or the values below them."""
    return ROW.format(*cells, width=max(14, *map(len, systems)) + 2).rstrip()


def format_file(file: Record) -> Iterator[str]:
    """Yield the terminal lines of a file: a row for each system, followed by its differences."""
    name, ours, normalise = file["name"], file["asrmask"], normalizer(file["language"])
    for system, theirs in file["against"].items():
        excesses = [excess(stage) for stage in theirs["stages"]]
        rates = [f"{100 * r['wer']:.1f}" for r in (ours, theirs) if r["wer"] is not None]
        yield format_row(
            list(file["against"]),
            name if len(name) <= 25 else f"…{name[-24:]}",
            system,
            "equal" if theirs["equal"] else "DIFFERS",
            f"{max(excesses):.2g}" if excesses else "",
            theirs["words_different"],
            f"{rates[0]} ({rates[1]})" if rates else "",
            f"{theirs['speed']:.2f} ×",
        )
        for note in theirs["notes"]:
            yield f"  {note}"
        if theirs["words_different"]:
            texts = normalise(theirs["text"]), normalise(ours["text"])
            yield f"  {system} → asrmask: {as_text(*texts)}"


def format_totals(report: Record) -> Iterator[str]:
    """Yield the last terminal lines: stages, systems, and the verdict."""
    if report["stages"]:
        yield ""
        yield f"{'stage':32}{'largest':>9}{'tolerance':>11}  where"
    for stage in report["stages"]:
        mark = "  " if stage["equal"] else "! "
        where = f"{stage['name']}, {stage['where']}, {stage['file']}" if stage["difference"] else ""
        numbers = f"{stage['difference']:9.1e}{stage['tolerance']:11.1e}"
        yield f"{stage['group']:32}{numbers}{mark}{where}".rstrip()
    if report["files"]:
        yield ""
        yield LEGEND
        for system in report["systems"].values():
            yield system["summary"]
    yield report["verdict"]


def render_page(report: Record) -> str:
    """Return compare.html, one self-contained page."""
    files = sorted(report["files"], key=lambda file: file["equal"])
    return render_template(
        Path(__file__).parent / "compare.html.j2",
        data=report,
        texts=[(file, _aligned_texts(file)) for file in files[:MOST_TEXTS]],
        scored=any(file["reference"] is not None for file in files),
    )


def _aligned_texts(file: Record) -> list[tuple[str, str]]:
    """Return rows of a title "first → second" and the second's text as HTML, differences marked."""
    normalise = normalizer(file["language"])
    ours = normalise(file["asrmask"]["text"])
    theirs = {name: normalise(other["text"]) for name, other in file["against"].items()}
    pairs = []
    if file["reference"] is not None:
        reference = normalise(file["reference"])
        texts = {"asrmask": ours} | {name: text for name, text in theirs.items() if text != ours}
        pairs += [(f"reference → {name}", reference, text) for name, text in texts.items()]
    pairs += [(f"{name} → asrmask", text, ours) for name, text in theirs.items()]
    return [(title, as_html(*texts, both=True)) for title, *texts in pairs]
