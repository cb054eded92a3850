"""What the events of live transcription amount to: delays, errors, flicker, cost; and tables."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby, takewhile
from typing import Any

import numpy as np

from asrmask.errors import counted
from asrmask.evaluation.score import Errors, errors, total
from asrmask.reporting.tables import markdown as markdown_table

Normaliser = Callable[[str], str]
POINTS = 120  # of the plot of delays over time, for each talk
HEADINGS = (
    *("system", "WER %", "offline WER %", "delay, s: mean", "p95", "final text, s: mean", "p95"),
    *("CPU s / s", "changed words, %"),
)
NOTE = (
    "Delay: from the end of a word, by the exact model, to its commitment, computing included. "
    "Final text: from the decision that an utterance ended to its last word. Offline: the whole "
    "file by the same model with --fast. Changed words: shown before they were final and then "
    "changed, per final word."
)


def score(
    files: Sequence[dict[str, Any]],
    references: Sequence[str],
    words: Sequence[Sequence[tuple[str, float]]],
    normalise: Normaliser,
) -> dict[str, Any]:
    """Return the measures of one run.

    files: results of live/replay.py:replay
    words: each recording's words with their ends
    """
    delays: list[list[float]] = []  # [talk, end of the word, delay]
    final_s: list[float] = []
    counts, texts, n_changed, n_final = [], [], 0, 0
    for i, (file, reference) in enumerate(zip(files, references, strict=True)):
        events = file["events"]
        committed = [
            (word, at)
            for kind, text, at in events
            if kind == "committed"
            for word in normalise(text).split()
        ]
        text = "".join(text for kind, text, _ in events if kind == "committed")
        texts.append(text)
        counts.append(asdict(errors(normalise(reference), normalise(text))))
        ends = [(word, end) for text, end in words[i] for word in normalise(text).split()]
        delays += [[i, end, round(at - end, 3)] for end, at in matched(ends, committed)]
        changed, final = flicker(events, normalise)
        n_changed, n_final = n_changed + changed, n_final + final
        final_s += endpoint_seconds(file)
    seconds = sum(file["seconds"] for file in files)
    return {
        "errors": counts,
        "texts": texts,
        "delays": delays,
        "final_s": final_s,
        "cpu": sum(file["cpu_s"] for file in files) / seconds,
        "changed": n_changed / max(n_final, 1),
        "seconds": seconds,
    }


def matched(
    words: Sequence[tuple[str, float]], committed: Sequence[tuple[str, float]]
) -> list[tuple[float, float]]:
    """Return the end and the commitment of each word that both lists have, in order."""
    if not words or not committed:
        return []
    import jiwer

    reference, hypothesis = (" ".join(word for word, _ in one) for one in (words, committed))
    return [
        (words[chunk.ref_start_idx + k][1], committed[chunk.hyp_start_idx + k][1])
        for chunk in jiwer.process_words(reference, hypothesis).alignments[0]
        if chunk.type == "equal"
        for k in range(chunk.ref_end_idx - chunk.ref_start_idx)
    ]


def flicker(events: Sequence[Sequence[Any]], normalise: Normaliser) -> tuple[int, int]:
    """Count the words that were shown before they were final and then changed, and final words."""
    final: list[str] = []
    shown: list[str] = []
    n_changed = 0
    for _, together in groupby(events, key=lambda event: event[2]):  # those of one push
        partial: list[str] = []
        for kind, text, _ in together:
            if kind == "committed":
                final += normalise(text).split()
            partial = normalise(text).split() if kind == "partial" else []
        now = final + partial
        n_same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(shown, now))))  # noqa: B905
        n_changed += len(shown) - n_same
        shown = now
    return n_changed, len(final)


def endpoint_seconds(file: dict[str, Any]) -> list[float]:
    """Return the seconds from each decided endpoint to the final text: computing of its push."""
    ends = {at for kind, _, at in file["events"] if kind == "endpoint"}
    finished = {round(start + seconds, 4): seconds for _, start, seconds in file["pushes"]}
    return [s for end, s in finished.items() if any(abs(end - at) < 0.0005 for at in ends)]


def row_of(run: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Return the row of a run in the main table."""
    label = label_of(run)
    if "error" in run:
        return [label, f"failed: {run['error']}", *[""] * (len(HEADINGS) - 2)]
    delays = [delay for *_, delay in run["delays"]]
    final_s = run["final_s"]
    return [
        label,
        f"{100 * wer(run['errors']):.2f}",
        f"{100 * offline_wer(run, result):.2f}" if run["system"] != "moonshine" else "",
        f"{statistics.mean(delays):.2f}",
        f"{np.percentile(delays, 95):.2f}",
        f"{statistics.mean(final_s):.3f}" if final_s else "",
        f"{np.percentile(final_s, 95):.3f}" if final_s else "",
        f"{run['cpu']:.3f}",
        f"{100 * run['changed']:.0f}",
    ]


def label_of(run: dict[str, Any]) -> str:
    options = ", ".join(f"{name} {value}" for name, value in run["options"].items())
    return f"{run.get('package', run['system'])} ({options})"


def wer(counts: Sequence[dict[str, int]]) -> float:
    return total(Errors(**one) for one in counts).wer


def offline_wer(run: dict[str, Any], result: dict[str, Any]) -> float:
    """Return the word error rate of the whole files, for the model and recordings of a run."""
    for entry in result["offline"]:
        if (entry["model"], entry["work"]) == (run["model"], run["work"]):
            return wer(entry["errors"])
    return float("nan")


def tables(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tables of the report: title, note, headings, rows."""
    found: list[dict[str, Any]] = []
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in result["runs"]:
        groups.setdefault((run["model"], run["work"]), []).append(run)
    for (model, work), runs in groups.items():
        rows = [row_of(run, result) for run in runs]
        found.append(table(f"{model}, {work}", NOTE if not found else "", HEADINGS, rows))
    streams = [
        [row["model"], row["streams"], f"{row['lag_p95']:.2f}", row["late"]]
        for row in result["streams"]
        if "error" not in row
    ]
    headings: tuple[str, ...] = ("model", "streams", "lag p95, s", "pushes that were late")
    note = "Streams in one process. Lag: from the audio of a push to the end of its computing."
    found.append(table("Streams together", note, headings, streams))
    rows = cut_rows(result["cuts"])
    headings = ("model", "clips, cut", "texts equal, %", "runaways virtual", "runaways full")
    note = "The same audio, cut at 40 and 70 %, under virtual and full padding."
    found.append(table("Audio that ends within a word", note, headings, rows))
    return [one for one in found if one["rows"]]


def cut_rows(cuts: Sequence[dict[str, Any]]) -> list[list[Any]]:
    rows = []
    for model in dict.fromkeys(one["model"] for one in cuts):
        mine = [one for one in cuts if one["model"] == model and "texts" in one]
        n_equal = sum(one["texts"][0] == one["texts"][1] for one in mine)
        runaways = [sum(one["runaways"][i] is not None for one in mine) for i in (0, 1)]
        if mine:
            rows.append([model, len(mine), f"{100 * n_equal / len(mine):.0f}", *runaways])
    return rows


def table(
    title: str, note: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    return {"title": title, "note": note, "headings": headings, "rows": rows}


def markdown(result: dict[str, Any]) -> str:
    """Return all tables as Markdown."""
    about = result["about"]
    lines = [f"# Live transcription, {', '.join(about['models'])}", ""]
    lines += [
        f"{counted(about['threads'], 'thread')} of {about['processor']}; `{about['command']}`",
        "",
    ]
    for one in tables(result):
        lines += [f"## {one['title']}", ""]
        lines += [one["note"], ""] if one["note"] else []
        lines += [markdown_table(one["headings"], one["rows"], "---:"), ""]
    return "\n".join(lines)


def step_points(result: dict[str, Any], model: str) -> list[tuple[float, float, float]]:
    """Return (step, mean delay, WER) of each step that was measured with default commitment."""
    points = {}
    for run in result["runs"]:
        mine = run["system"] == "asrmask" and run["model"] == model and "error" not in run
        if mine and set(run["options"]) == {"step"} and run["work"] == result["runs"][0]["work"]:
            delays = [delay for *_, delay in run["delays"]]
            points[run["options"]["step"]] = (statistics.mean(delays), 100 * wer(run["errors"]))
    return [(step, *point) for step, point in sorted(points.items())]


def running_means(delays: Sequence[Sequence[float]], talk: int) -> tuple[list[float], list[float]]:
    """Return times and the delays of words around them, for the plot over time."""
    points = sorted((end, delay) for one, end, delay in delays if one == talk)
    size = max(len(points) // POINTS, 1)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return (
        [statistics.mean(end for end, _ in part) for part in parts],
        [statistics.mean(delay for _, delay in part) for part in parts],
    )
