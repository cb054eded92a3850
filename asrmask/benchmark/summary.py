"""The results of a benchmark: medians, ratios and fits, as numbers and as Markdown."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asrmask.evaluation.score import Errors, difference_interval, total

REFERENCE = "openai-whisper"  # ratios are relative to it, or else to the first system


@dataclass(frozen=True)
class Line:
    """One system on one set of clips, over all rounds."""

    system: str
    work: str
    decoding: str
    seconds: list[float]  # one per round
    audio_s: float
    ratios: list[float]  # how many times as fast as the reference, one per round
    peak_mb: float | None  # peak resident memory (RSS)
    own_mb: float | None  # the same without pages shared with other processes; None: unknown
    first_text_s: float | None  # from the start of the process
    alone_s: float | None  # one clip by itself, warm
    parts: dict[str, float]
    errors: Errors | None
    failed: str | None = None

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def times_real_time(self) -> float | None:
        return self.audio_s / self.median_s if self.median_s else None

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None


def reference_of(result: dict[str, Any]) -> str:
    systems = list(dict.fromkeys(run["system"] for run in result["runs"]))
    return REFERENCE if REFERENCE in systems or not systems else systems[0]


def lines(result: dict[str, Any]) -> list[Line]:
    """Return a line for each work, decoding and system, in the order of the runs."""
    runs = result["runs"]
    keys = list(dict.fromkeys((r["work"], r["decoding"], r["system"]) for r in runs))
    reference = reference_of(result)
    base = {
        (r["work"], r["decoding"], r["round"]): r["seconds"]
        for r in runs
        if r["system"] == reference and "seconds" in r
    }
    found = []
    for work, decoding, system in keys:
        mine = [
            r for r in runs if (r["work"], r["decoding"], r["system"]) == (work, decoding, system)
        ]
        good = [r for r in mine if "seconds" in r]
        failed = next((r["error"] for r in mine if "error" in r), None)
        known = [Errors(**e) for e in good[0]["errors"]] if good else []
        names = good[0]["parts"] if good else {}
        found.append(
            Line(
                system,
                work,
                decoding,
                [r["seconds"] for r in good],
                result["works"][work]["seconds"],
                [
                    base[work, decoding, r["round"]] / r["seconds"]
                    for r in good
                    if (work, decoding, r["round"]) in base
                ],
                max((r["peak_mb"] for r in good), default=None),
                _most([r.get("own_mb") for r in good]),
                _median([r["first_text_s"] for r in good]),
                _median([s for r in good for s in r["alone_s"]]),
                {name: statistics.median(r["parts"][name] for r in good) for name in names},
                total(known) if known else None,
                failed,
            )
        )
    return found


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def ratios(result: dict[str, Any], system: str) -> dict[tuple[str, str, str], dict[str, float]]:
    """Compare a system with each other one: (work, decoding, other) → quantity → ratio.

    throughput: how many times as fast
    alone:      the same, for one clip, warm
    memory:     its peak as a share of the other's

    Each is the median over rounds of the ratio within a round.
    """
    runs = {
        (r["work"], r["decoding"], r["system"], r["round"]): r
        for r in result["runs"]
        if "seconds" in r
    }
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for (work, decoding, other, number), theirs in runs.items():
        mine = runs.get((work, decoding, system, number))
        if mine is None or other == system:
            continue
        told = found.setdefault((work, decoding, other), {})
        told.setdefault("throughput", []).append(theirs["seconds"] / mine["seconds"])
        alone = statistics.median(theirs["alone_s"]) / statistics.median(mine["alone_s"])
        told.setdefault("alone", []).append(alone)
        told.setdefault("memory", []).append(mine["peak_mb"] / theirs["peak_mb"])
    return {
        key: {name: statistics.median(values) for name, values in told.items()}
        for key, told in found.items()
    }


# ---------------------------------------------------------------- fits


@dataclass(frozen=True)
class Fit:
    """A linear fit, seconds ≈ fixed + each · size, and the exponent of a power law.

    The linear fit is by least squares on relative errors.
    """

    fixed: float
    each: float
    slope: float  # of log seconds over log size: 1 is proportional, 0 is constant

    def at(self, size: float) -> float:
        return self.fixed + self.each * size


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit | None:
    """Fit measurements; None if there are fewer than three.

    >>> fit([1, 2, 4], [3, 5, 9])
    Fit(fixed=1.0, each=2.0, slope=0.79)
    """
    if len(sizes) < 3:
        return None
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    fixed, each = np.linalg.lstsq(design, np.ones_like(y), rcond=None)[0]
    slope = np.polyfit(np.log(x), np.log(y), 1)[0]
    return Fit(round(float(fixed), 6), round(float(each), 6), round(float(slope), 2))


def grown(result: dict[str, Any], axis: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return for each system the sizes along an axis, and the seconds for each size."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for entry in result.get("scaling", []):
        if entry["axis"] == axis and "seconds" in entry:
            sizes, seconds = found.setdefault(entry["system"], ([], []))
            sizes.append(entry["size"])
            seconds.append(entry["seconds"])
    return found


AXES = {
    "clip": ("length of a clip, s", "s of audio"),
    "file": ("length of a file, minutes", "minute of audio"),
    "batch": ("windows in a batch", "window more"),
}


# ---------------------------------------------------------------- Markdown

HEADINGS = (
    *("system", "WER %", "seconds, median (range)", "× real time", "times as fast"),
    *("peak RSS MB", "own MB", "first text from cold, s", "one clip, warm, ms"),
    "audio / Mel / enc / dec, s",
)


def format_median(values: Sequence[float]) -> str:
    """Format a median and, if values differ, their range: 8.56 (8.41 … 8.70)."""
    if not values:
        return "no data"
    text = f"{statistics.median(values):.2f}"
    return text if min(values) == max(values) else f"{text} ({min(values):.2f} … {max(values):.2f})"


def format_rounds(n: int) -> str:
    return "1 round" if n == 1 else f"{n} rounds"


def cells(line: Line) -> list[str]:
    """Format a line as the cells of a table; "no data" where a value is missing."""
    if line.median_s is None:
        return [line.system, f"failed: {line.failed}", *["no data"] * (len(HEADINGS) - 2)]
    parts = [line.parts.get(p, 0.0) for p in ("audio", "spectrogram", "encoder", "decoder")]
    split = " / ".join(f"{s:.2f}" for s in parts) if parts[2] > 0 else f"{parts[0]:.2f} / no data"
    return [
        line.system,
        "no data" if line.errors is None else f"{100 * line.errors.wer:.2f}",
        format_median(line.seconds),
        f"{line.times_real_time:.1f}",
        format_median(line.ratios),
        f"{line.peak_mb:.0f}",
        "no data" if line.own_mb is None else f"{line.own_mb:.0f}",
        f"{line.first_text_s:.1f}",
        f"{1000 * (line.alone_s or 0):.0f}",
        split,
    ]


def tables(result: dict[str, Any]) -> list[tuple[str, list[Line]]]:
    """Return the title and lines of a table for each work and decoding."""
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines(result):
        found.setdefault((line.work, line.decoding), []).append(line)
    told = []
    for (work, decoding), several in found.items():
        about = result["works"][work]
        title = f"{work}: {about['clips']} files, {about['seconds']:.1f} s, {decoding}"
        told.append((title, several))
    return told


def markdown(result: dict[str, Any]) -> str:
    about = result["about"]
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    out = [
        f"# {about['model']} on {about['threads']} threads of {about['processor']}",
        "",
        f"`{about['command']}`, {about['date']}, {format_rounds(about['rounds'])}. {packages}.",
        f"Times as fast: as {reference_of(result)}, in the same round.",
        "Own MB: peak RSS without the pages that other processes share at the end of the run.",
    ]
    for title, several in tables(result):
        out += ["", f"## {title}", "", "| " + " | ".join(HEADINGS) + " |"]
        out.append("|---" * len(HEADINGS) + "|")
        out += ["| " + " | ".join(cells(line)) + " |" for line in several]
    out += ["", *_ratios(result), *_limits(result), *_growth(result)]
    return "\n".join(out).rstrip() + "\n"


def _ratios(result: dict[str, Any]) -> list[str]:
    """Compare each setting of asrmask with the other systems, as Markdown."""
    out: list[str] = []
    for system in dict.fromkeys(r["system"] for r in result["runs"]):
        found = ratios(result, system)
        if not found or not system.startswith("asrmask"):
            continue
        out += [
            f"## {system} beside the others",
            "",
            "| work | system | times the throughput | one clip, times | share of its memory |",
            "|---|---|---|---|---|",
        ]
        for (work, decoding, other), told in found.items():
            out.append(
                f"| {work}, {decoding} | {other} | {told['throughput']:.2f} | {told['alone']:.2f} "
                f"| {told['memory']:.2f} |"
            )
        out.append("")
    return [*out, *_differences(result)]


EXACT = "asrmask"  # float32 with all of the padding, as openai-whisper computes


@dataclass(frozen=True)
class WerDifference:
    """The WER of a system and of the exact one on the same clips, as fractions."""

    wer: float
    exact: float
    low: float  # 95 % interval of the difference, paired, by speaker or clip
    high: float

    @property
    def points(self) -> float:
        return 100 * (self.wer - self.exact)

    def __str__(self) -> str:
        return f"{self.points:+.2f} ({100 * self.low:+.2f} … {100 * self.high:+.2f})"


def difference(
    result: dict[str, Any], works: Sequence[str], decoding: str, system: str
) -> WerDifference | None:
    """Compare a system with the exact one on all clips of some works; None: not measured."""
    runs = {
        (r["work"], r["system"]): [Errors(**e) for e in r["errors"]]
        for r in reversed(result["runs"])  # keeps the first round, as the tables do
        if r.get("errors") and r["decoding"] == decoding
    }
    if any((work, name) not in runs for work in works for name in (system, EXACT)):
        return None
    mine, exact = ([e for work in works for e in runs[work, name]] for name in (system, EXACT))
    blocks = [speaker for work in works for speaker in result["works"][work]["speakers"]]
    low, high = difference_interval(mine, exact, blocks)
    return WerDifference(total(mine).wer, total(exact).wer, low, high)


def _differences(result: dict[str, Any]) -> list[str]:
    """Compare the WER of asrmask's faster settings with the exact one, as Markdown."""
    keys = dict.fromkeys((r["work"], r["decoding"], r["system"]) for r in result["runs"])
    out = []
    for work, decoding, system in keys:
        if system == EXACT or not system.startswith(EXACT):
            continue
        found = difference(result, [work], decoding, system)
        if found is not None:
            out.append(
                f"| {work}, {decoding} | {system} | {100 * found.wer:.2f} | "
                f"{100 * found.exact:.2f} | {found} |"
            )
    if not out:
        return []
    return [
        "## Word error rate beside float32 with all of the padding",
        "",
        "| work | system | WER % | WER %, exact | difference, 95 % interval (paired) |",
        "|---|---|---|---|---|",
        *out,
        "",
    ]


def _limits(result: dict[str, Any]) -> list[str]:
    machine = result.get("machine", {})
    if "limits" not in machine:
        return ["## Limits of the machine", "", f"No data: {machine.get('error', 'none')}.", ""]
    found = machine["limits"]
    out = [
        "## Limits of the machine",
        "",
        f"Products: {found['float32_operations']:.0f} billion operations a second in float32, "
        f"{found['int8_operations']:.0f} in int8. Reading: {found['float32_bytes']:.1f} GB a "
        f"second of float32, {found['int8_bytes']:.1f} of int8.",
        "",
        "| part of asrmask | least ms | takes ms | share reached |",
        "|---|---|---|---|",
    ]
    for share in machine["shares"]:
        out.append(
            f"| {share['part']} | {1000 * share['least_s']:.2f} | {1000 * share['taken_s']:.2f} "
            f"| {100 * share['reached']:.0f} % |"
        )
    return [*out, ""]


def _growth(result: dict[str, Any]) -> list[str]:
    out: list[str] = []
    for axis, (name, unit) in AXES.items():
        found = grown(result, axis)
        if not found:
            continue
        out += [
            f"## How cost grows with the {name.split(',')[0]}",
            "",
            f"| system | seconds at each {name} | fixed s | s a {unit} | slope |",
            "|---|---|---|---|---|",
        ]
        for system, (sizes, seconds) in found.items():
            told = ", ".join(f"{a:g}: {b:.2f}" for a, b in zip(sizes, seconds, strict=True))
            line = fit(sizes, seconds)
            numbers = (
                "no data | no data | no data"
                if line is None
                else f"{line.fixed:.3f} | {line.each:.4f} | {line.slope:.2f}"
            )
            out.append(f"| {system} | {told} | {numbers} |")
        out.append("")
    return out


def against(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Compare a benchmark with an older one, line by line; above 1 is faster."""
    before = {(x.work, x.decoding, x.system): x for x in lines(old)}
    is_same = new["about"]["model"] == old["about"]["model"]
    out = [f"against the benchmark of {old['about']['date']} (asrmask {old['about']['asrmask']}):"]
    machines = [r.get("machine", {}).get("limits") for r in (new, old)]
    if all(machines):
        rate = machines[0]["float32_operations"] / machines[1]["float32_operations"]
        out.append(f"  machine, float32 products: {rate:.2f} times as fast")
    for line in lines(new):
        then = before.get((line.work, line.decoding, line.system))
        if then is None or then.median_s is None or line.median_s is None:
            continue
        if not is_same or new["works"][line.work] != old["works"][line.work]:
            out.append(
                f"  {line.work}, {line.decoding}, {line.system}: other clips or another model"
            )
            continue
        told = f"  {line.work}, {line.decoding}, {line.system}: "
        told += f"{then.median_s / line.median_s:.2f} times as fast"
        if line.ratio and then.ratio and reference_of(new) == reference_of(old):
            told += f", {line.ratio / then.ratio:.2f} relative to {reference_of(new)}"
        if line.peak_mb and then.peak_mb:
            told += f", {line.peak_mb / then.peak_mb:.2f} of its memory"
        out.append(told)
    return out
