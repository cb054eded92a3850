"""Results of a benchmark: medians, ratios and fits, and the tables of its report."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from asrmask.benchmark.parts import ENCODER, N_TOKENS
from asrmask.errors import counted
from asrmask.evaluation.score import Errors, difference_interval, total
from asrmask.reporting.tables import markdown as markdown_table

REFERENCE = "openai-whisper"  # ratios are relative to it, or else to the first system
OTHER = "CTranslate2"  # the library that parts of models are compared with
MEMORY = "peak RSS, MB"
EXACT = "asrmask"  # float32 with full padding, as openai-whisper computes
ALL_SETS = "all data sets together"
# the same at temperature 0 alone, with the other options of the preset
STRICT = "asrmask:preset=fast,full,compute_type=float32"
AXES = {  # of scaling: name with unit, unit of the slope
    "clip": ("length of a clip, s", "s of audio"),
    "file": ("length of a file, minutes", "minute of audio"),
    "batch": ("windows in a batch", "window more"),
}
HEADINGS = (
    *("system", "WER %", "seconds, median (range)", "× real time", "times as fast"),
    *("peak RSS MB", "own MB", "first text from cold, s", "one clip, warm, ms"),
    "audio / Mel / enc / dec, s",
)
NO_DATA = "no data"
Run = dict[str, Any]  # an entry of `runs` in bench.json
Key = tuple[str, str, str, str]  # model, work (name of the clip set), decoding, system
Numbers = Sequence[float] | np.ndarray


class SystemResult:
    """One system on one set of clips, over all rounds. Numbers are None if every round failed."""

    def __init__(self, key: Key, runs: list[Run], reference: list[Run], audio_s: float):
        """
        reference: the runs of the reference system
        audio_s:   length of all clips
        """
        good = [run for run in runs if "seconds" in run]
        self.key = self.model, self.work, self.decoding, self.system = key
        self.failed = next((run["error"] for run in runs if "error" in run), None)
        self.seconds = [run["seconds"] for run in good]  # one per round
        self.median_s = _median(self.seconds)
        self.times_real_time = audio_s / self.median_s if self.median_s else None
        pairs = pair_rounds(good, reference)
        # how many times as fast as the reference, one per round
        self.ratios = [other["seconds"] / run["seconds"] for run, other in pairs]
        self.ratio = _median(self.ratios)
        self.peak_mb = max((run["peak_mb"] for run in good), default=None)  # resident memory (RSS)
        # the same without pages shared with other processes; None: unknown
        own_mb = [run["own_mb"] for run in good if run.get("own_mb") is not None]
        self.own_mb = max(own_mb, default=None)
        self.first_text_s = _median([run["first_text_s"] for run in good])  # from process start
        self.alone_s = _median([s for run in good for s in run["alone_s"]])  # one clip, warm
        names = good[0]["parts"] if good else {}
        self.parts = {name: statistics.median(r["parts"][name] for r in good) for name in names}
        errors = [Errors(**e) for e in good[0]["errors"]] if good else []
        self.errors = total(errors) if errors else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def reference_of(result: dict[str, Any]) -> str:
    """Return the name of the system that ratios are relative to."""
    systems = [run["system"] for run in result["runs"]]
    return REFERENCE if REFERENCE in systems or not systems else systems[0]


def group_runs(result: dict[str, Any]) -> dict[Key, list[Run]]:
    """Return the rounds of each (model, work, decoding, system), in the benchmark's order."""
    groups: dict[Key, list[Run]] = {}
    for run in result["runs"]:
        key = run["model"], run["work"], run["decoding"], run["system"]
        groups.setdefault(key, []).append(run)
    return groups


def title_of(result: dict[str, Any], model: str, *rest: str) -> str:
    """Join the names of something measured. The model is named if there are several."""
    return ", ".join([model, *rest] if has_several_models(result) else rest)


def has_several_models(result: dict[str, Any]) -> bool:
    entries = (*result["runs"], *result.get("parts", []), *result.get("scaling", []))
    return len({entry["model"] for entry in entries}) > 1


def pair_rounds(runs: list[Run], others: list[Run]) -> list[tuple[Run, Run]]:
    """Pair the runs of two systems in the same round, where neither failed."""
    by_round = {run["round"]: run for run in others if "seconds" in run}
    return [(r, by_round[r["round"]]) for r in runs if "seconds" in r and r["round"] in by_round]


def system_results(result: dict[str, Any]) -> list[SystemResult]:
    """Summarise the rounds of each model, work, decoding and system, in the benchmark's order."""
    groups, reference, works = group_runs(result), reference_of(result), result["works"]
    return [
        SystemResult(key, runs, groups.get((*key[:3], reference), []), works[key[1]]["seconds"])
        for key, runs in groups.items()
    ]


def ratios(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare each setting of asrmask with each other system: medians of the ratios in a round.

    throughput: how many times as fast
    alone:      the same, for one clip, warm
    memory:     its peak as a share of the other's
    cold:       how many times as fast from the start of the process to the text of one clip
    """
    median = statistics.median
    groups = group_runs(result)
    rows = []
    for system in dict.fromkeys(name for *_, name in groups if name.startswith("asrmask")):
        for (model, work, decoding, other), runs in groups.items():
            pairs = pair_rounds(groups.get((model, work, decoding, system), []), runs)
            if other == system or not pairs:
                continue
            row: Run = {"model": model, "work": work, "decoding": decoding}
            row |= {"system": system, "other": other}
            row["throughput"] = median(b["seconds"] / a["seconds"] for a, b in pairs)
            row["alone"] = median(median(b["alone_s"]) / median(a["alone_s"]) for a, b in pairs)
            row["memory"] = median(a["peak_mb"] / b["peak_mb"] for a, b in pairs)
            row["cold"] = median(b["first_text_s"] / a["first_text_s"] for a, b in pairs)
            rows.append(row)
    return rows


def wer_difference(
    result: dict[str, Any],
    model: str,
    works: Sequence[str],
    decoding: str,
    system: str,
    baseline: str = EXACT,
) -> tuple[str, str, str] | None:
    """Format WER % of a system and of another one on some works, and the difference.

    The difference has its 95 % interval, paired, by speaker or clip. None: not measured.
    """
    errors: dict[str, list[Errors]] = {system: [], baseline: []}
    groups = group_runs(result)
    for work, name in product(works, errors):
        runs = groups.get((model, work, decoding, name), [])
        measured = [run["errors"] for run in runs if run.get("errors")]
        if not measured:
            return None
        errors[name] += [Errors(**e) for e in measured[0]]
    blocks = [speaker for work in works for speaker in result["works"][work]["speakers"]]
    wer, exact = 100 * total(errors[system]).wer, 100 * total(errors[baseline]).wer
    low, high = (100 * x for x in difference_interval(errors[system], errors[baseline], blocks))
    return f"{wer:.2f}", f"{exact:.2f}", f"{wer - exact:+.2f} ({low:+.2f} … {high:+.2f})"


def fit(sizes: Numbers, seconds: Numbers) -> tuple[float, float, float] | None:
    """Fit seconds ≈ fixed + each · size, by least squares on relative errors.

    Returns fixed, each, and the slope of log seconds over log size: 1 is proportional, 0 constant.
    None if there are fewer than three measurements.

    >>> fit([1, 2, 4], [3, 5, 9])
    (1.0, 2.0, 0.79)
    """
    if len(sizes) < 3:
        return None
    each, fixed = np.polyfit(sizes, seconds, 1, w=1 / np.asarray(seconds))
    slope, _ = np.polyfit(np.log(sizes), np.log(seconds), 1)
    return round(float(fixed), 6), round(float(each), 6), round(float(slope), 2)


def scaling_points(result: dict[str, Any], axis: str) -> dict[str, dict[float, float]]:
    """Return the seconds at each size along an axis: system, of a model → size → seconds."""
    points: dict[str, dict[float, float]] = {}
    for entry in result.get("scaling", []):
        if entry["axis"] == axis and "seconds" in entry:
            name = entry["system"]
            name += f" of {entry['model']}" if has_several_models(result) else ""
            points.setdefault(name, {})[entry["size"]] = entry["seconds"]
    return points


class PartResult:
    """A part of a model in asrmask and in CTranslate2, over all rounds."""

    def __init__(self, key: tuple[str, str, str], ours: list[Run], theirs: list[Run]):
        """
        key:    model, compute type, part
        theirs: runs of CTranslate2. It has no shorter window, so an encoder pass with virtual
                padding is compared with one over the whole window.
        """
        self.key = self.model, self.compute_type, self.part = key
        other_s = {
            run["round"]: part_values(run).get(self.part, run["parts"][ENCODER]) for run in theirs
        }
        self.ours = statistics.median(part_values(run)[self.part] for run in ours)
        self.theirs = _median([*other_s.values()])  # None: not measured
        # how many times as much CTranslate2 takes, one per round
        self.ratios = [
            other_s[run["round"]] / max(part_values(run)[self.part], 1e-9)
            for run in ours
            if run["round"] in other_s
        ]


def part_values(run: Run) -> dict[str, float]:
    """Return the seconds of each part, and the memory of the process under the name MEMORY."""
    return {**run["parts"], MEMORY: run["peak_mb"]}


def part_results(result: dict[str, Any]) -> list[PartResult]:
    """Compare the parts of asrmask's models with the same weights in CTranslate2."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in result.get("parts", []):
        if "parts" in run:
            key = run["model"], run["compute_type"], run["library"]
            groups.setdefault(key, []).append(run)
    return [
        PartResult((model, compute_type, part), runs, groups.get((model, compute_type, OTHER), []))
        for (model, compute_type, library), runs in groups.items()
        if library != OTHER
        for part in part_values(runs[0])
    ]


# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class ReportTable:
    """A table of the report, with a sentence above it."""

    title: str
    headings: Sequence[str]
    rows: list[list[str]]
    note: str = ""


def report_tables(result: dict[str, Any]) -> list[ReportTable]:
    """Return the tables of the report that have rows or a note, in order."""
    tables = [
        ReportTable(title, HEADINGS, [cells(one) for one in several], alone_note(result, several))
        for title, several in results_by_title(result).items()
    ]
    tables += [_ratio_table(result), _wer_table(result), *parts_tables(result)]
    tables += [_limits_table(result, model) for model in result["machine"]]
    tables += [_scaling_table(result, axis) for axis in AXES]
    return [table for table in tables if table.rows or table.note]


def results_by_title(result: dict[str, Any]) -> dict[str, list[SystemResult]]:
    """Group the results by model, work and decoding, under a title for each."""
    groups: dict[str, list[SystemResult]] = {}
    for one in system_results(result):
        work = result["works"][one.work]
        title = f"{one.work}: {work['clips']} files, {work['seconds']:.1f} s"
        groups.setdefault(title_of(result, one.model, title, one.decoding), []).append(one)
    return groups


def alone_note(result: dict[str, Any], results: list[SystemResult]) -> str:
    """Say how long the clips are that are timed one by one and from cold."""
    seconds = [clip["seconds"] for clip in result.get("alone", {}).get(results[0].work, [])]
    if not seconds:
        return ""
    return (
        f"One clip: {counted(len(seconds), 'clip')} of {min(seconds):.1f} to {max(seconds):.1f} s, "
        f"one at a time. From cold: from the start of the process to the text of one clip of "
        f"{seconds[0]:.1f} s."
    )


def format_median(values: Sequence[float]) -> str:
    """Format a median and, if values differ, their range: 8.56 (8.41 … 8.70)."""
    if not values:
        return NO_DATA
    text = f"{statistics.median(values):.2f}"
    return text if min(values) == max(values) else f"{text} ({min(values):.2f} … {max(values):.2f})"


def cells(result: SystemResult) -> list[str]:
    """Format a result as a row of a table; "no data" where a value is missing."""
    if not result.seconds:
        return [result.system, f"failed: {result.failed}", *[NO_DATA] * (len(HEADINGS) - 2)]
    parts = [result.parts.get(p, 0.0) for p in ("audio", "spectrogram", "encoder", "decoder")]
    return [
        result.system,
        NO_DATA if result.errors is None else f"{100 * result.errors.wer:.2f}",
        format_median(result.seconds),
        f"{result.times_real_time:.1f}",
        format_median(result.ratios),
        f"{result.peak_mb:.0f}",
        NO_DATA if result.own_mb is None else f"{result.own_mb:.0f}",
        f"{result.first_text_s:.2f}",
        f"{1000 * (result.alone_s or 0):.0f}",
        " / ".join(f"{s:.2f}" for s in parts) if parts[2] > 0 else f"{parts[0]:.2f} / {NO_DATA}",
    ]


def _ratio_table(result: dict[str, Any]) -> ReportTable:
    title = "asrmask compared with the other systems"
    headings = (
        *("data set", "asrmask", "other system", "times as fast"),
        *("one clip, warm", "one clip, from cold", "memory share"),
    )
    rows = []
    for row in ratios(result):
        numbers = [f"{row[name]:.2f}" for name in ("throughput", "alone", "cold", "memory")]
        data_set = title_of(result, row["model"], row["work"], row["decoding"])
        rows.append([data_set, row["system"], row["other"], *numbers])
    return ReportTable(title, headings, rows)


def _wer_table(result: dict[str, Any]) -> ReportTable:
    """Compare the WER of asrmask's faster settings with the exact one."""
    title = "Word error rate compared with float32 and full padding"
    headings = (
        *("data set", "system", "WER %", "beside", "its WER %"),
        "difference, 95 % interval (paired)",
    )
    keys: dict[tuple[str, str, str], list[str]] = {}  # model, decoding and system → works
    for model, work, decoding, system in group_runs(result):
        if system.startswith(EXACT) and system not in {EXACT, STRICT}:
            keys.setdefault((model, decoding, system), []).append(work)
    rows = []
    for (model, decoding, system), works in keys.items():
        sets = {work: [work] for work in works} | ({ALL_SETS: works} if len(works) > 1 else {})
        for (name, several), baseline in product(sets.items(), (EXACT, STRICT)):
            if found := wer_difference(result, model, several, decoding, system, baseline):
                wer, exact, difference = found
                data_set = title_of(result, model, name, decoding)
                rows.append([data_set, system, wer, baseline, exact, difference])
    return ReportTable(title, headings, rows)


def parts_tables(result: dict[str, Any]) -> list[ReportTable]:
    """Compare parts of models with CTranslate2: speed, then memory."""
    title = f"Parts of a model, compared with {OTHER}"
    note = (
        "Encoder: one window, from log-Mel frames to features. Decoder: greedily, without "
        "timestamps; the first token with the keys and values of the clips and the prompt, then "
        f"each of the {N_TOKENS} that follow. {OTHER} always encodes the window of 30 s, even "
        "where asrmask has virtual padding."
    )
    failed = [
        f"{title_of(result, run['model'], run['compute_type'], run['library'])}: {run['error']}."
        for run in result.get("parts", [])
        if "error" in run
    ]
    speed, memory = [], []
    for one in part_results(result):
        name = title_of(result, one.model, one.compute_type)
        if one.part == MEMORY:
            theirs = NO_DATA if one.theirs is None else f"{one.theirs:.0f}"
            share = format_median([1 / ratio for ratio in one.ratios])
            memory.append([name, f"{one.ours:.0f}", theirs, share])
        else:
            theirs = NO_DATA if one.theirs is None else f"{1000 * one.theirs:.2f}"
            ratio = format_median(one.ratios)
            speed.append([name, one.part, f"{1000 * one.ours:.2f}", theirs, ratio])
    headings = ("model", "part", "asrmask, ms", f"{OTHER}, ms", "times as fast")
    note = " ".join([note, *failed]) if speed or failed else ""
    peaks = ("model", "asrmask, peak RSS MB", f"{OTHER}, peak RSS MB", "memory share")
    return [
        ReportTable(title, headings, speed, note),
        ReportTable(f"Memory of a model's process, compared with {OTHER}", peaks, memory),
    ]


def _limits_table(result: dict[str, Any], model: str) -> ReportTable:
    title = title_of(result, model, "Limits of the machine")
    headings = ("part of asrmask", "least ms", "takes ms", "share reached")
    machine = result["machine"][model]
    if "limits" not in machine:
        return ReportTable(title, headings, [], f"No data: {machine.get('error', 'not measured')}.")
    limits = machine["limits"]
    note = (
        f"Matrix products: {limits['float32_operations']:.0f} billion operations a second in "
        f"float32, {limits['int8_operations']:.0f} in int8. Memory: {limits['float32_bytes']:.1f} "
        "GB a second read, in amounts of a decoder step in float32, "
        f"{limits['int8_bytes']:.1f} in those of int8. Each is the best of several ways. The least "
        "time of a part follows from its operations and the bytes that it reads."
    )
    rows = []
    for share in machine["shares"]:
        least, taken = (f"{1000 * share[name]:.2f}" for name in ("least_s", "taken_s"))
        rows.append([share["part"], least, taken, f"{100 * share['reached']:.0f} %"])
    return ReportTable(title, headings, rows, note)


def _scaling_table(result: dict[str, Any], axis: str) -> ReportTable:
    name, unit = AXES[axis]
    headings = ("system", f"seconds at each {name}", "fixed s", f"s per {unit}", "slope")
    rows = []
    for system, points in scaling_points(result, axis).items():
        line = fit([*points], [*points.values()])
        fitted = [NO_DATA] * 3 if line is None else "{:.3f} {:.4f} {:.2f}".format(*line).split()
        measured = ", ".join(f"{size:g}: {seconds:.2f}" for size, seconds in points.items())
        rows.append([system, measured, *fitted])
    return ReportTable(f"Cost against the {name.split(',')[0]}", headings, rows)


def markdown(result: dict[str, Any]) -> str:
    """Return the report of a benchmark as Markdown."""
    about = result["about"]
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    rounds = counted(about["rounds"], "round")
    out = [
        f"# {about['model']} on {counted(about['threads'], 'thread')} of {about['processor']}",
        f"\n`{about['command']}`, {about['date']}, {rounds}. {packages}.",
    ]
    if result["runs"]:
        out += [
            f"Times as fast: as {reference_of(result)}, in the same round.",
            "Own MB: peak RSS without the pages that other processes share at the end of the run.",
        ]
    for table in report_tables(result):
        rows = markdown_table(table.headings, table.rows) if table.rows else ""
        out += [f"\n{text}" for text in (f"## {table.title}", table.note, rows) if text]
    return "\n".join(out) + "\n"


def compare_parts(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Compare the parts of models with those of an older benchmark, like compare_benchmarks."""
    before = {one.key: one for one in part_results(old)}
    out = []
    for now in part_results(new):
        then = before.get(now.key)
        if then is None or now.part == MEMORY:
            continue
        text = f"{then.ours / now.ours:.2f} times as fast"
        if now.ratios and then.ratios:
            relative = statistics.median(now.ratios) / statistics.median(then.ratios)
            text += f", {relative:.2f} relative to {OTHER}"
        out.append(f"  {title_of(new, *now.key)}: {text}")
    return out


def compare_benchmarks(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Compare a benchmark with an older one, system by system; above 1 is faster."""
    before = {one.key: one for one in system_results(old)}
    out = [f"against the benchmark of {old['about']['date']} (asrmask {old['about']['asrmask']}):"]
    rates = [
        [
            machine["limits"]["float32_operations"]
            for machine in result["machine"].values()
            if "limits" in machine
        ]
        for result in (new, old)
    ]
    if all(rates):
        rate = max(rates[0]) / max(rates[1])
        out.append(f"  machine, float32 products: {rate:.2f} times as fast")
    for now in system_results(new):
        then = before.get(now.key)
        if then is None or then.median_s is None or now.median_s is None:
            continue
        if new["works"][now.work] != old["works"][now.work]:
            text = "other clips"
        else:
            text = f"{then.median_s / now.median_s:.2f} times as fast"
            if now.ratio and then.ratio and reference_of(new) == reference_of(old):
                text += f", {now.ratio / then.ratio:.2f} relative to {reference_of(new)}"
            if now.peak_mb and then.peak_mb:
                text += f", {now.peak_mb / then.peak_mb:.2f} of its memory"
        out.append(f"  {title_of(new, *now.key)}: {text}")
    out += compare_parts(new, old)
    if len(out) == 1 + bool(all(rates)):
        out.append("  nothing to compare: other models, data sets, settings or systems")
    return out
