"""The report of a comparison: as JSON data, as terminal lines, and one sentence per system."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from asrmask.comparison.divergence import NEAR
from asrmask.comparison.peers import OPENAI, SystemComparison
from asrmask.comparison.run import Compared
from asrmask.comparison.stages import TOLERANCE, Stage
from asrmask.comparison.times import TOLERANCE_S
from asrmask.comparison.transcripts import TIME_S
from asrmask.evaluation.alignment import as_text
from asrmask.evaluation.score import Errors, total
from asrmask.systems.upstream import normalizer

ROW = "{:26}{:{wide}}{:8}{:>9}{:>7}{:>17}{:>9}"
HEADINGS = ("file", "against", "verdict", "of tol.", "words", "WER % (theirs)", "time")
LEGEND = (
    "of tol.: the largest difference of a stage, in units of its tolerance; "
    "words: how many differ; time: theirs to ours, above 1 asrmask is faster"
)
COMPARED = {
    True: f"log-Mel, every module of encoder and decoder, cross keys and values and teacher-forced "
    f"logits of every window to {TOLERANCE:g} (inside layers relative to their size), then "
    f"language, tokens, text, segment and word times (to {TIME_S} s); a choice between logits "
    f"closer than {NEAR:g} is a near tie and counts as equal",
    False: f"normalised text, and the times of words or else of segments to {TOLERANCE_S} s; beam, "
    f"language, task and word times are asked for alike, the rest are the system's own defaults",
}


@dataclass
class Report:
    """All clips compared so far, and those that failed."""

    about: dict[str, Any]
    systems: list[str]
    found: list[Compared] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # file → why

    @property
    def is_equal(self) -> bool:
        return all(compared.is_equal for compared in self.found)

    @property
    def exit_code(self) -> int:
        """0 if all are equal, 1 if any differs, 2 if any file failed."""
        return 2 if self.failed else 0 if self.is_equal else 1

    def beside(self, system: str) -> list[tuple[Compared, SystemComparison]]:
        """Return each clip with its comparison with one system."""
        i = self.systems.index(system)
        return [(compared, compared.against[i]) for compared in self.found]

    def stages(self) -> list[tuple[Stage, str]]:
        """Return the worst stage of each layer over all clips, and the name of its clip."""
        if OPENAI not in self.systems:
            return []
        found: dict[str, tuple[Stage, str]] = {}
        for compared, against in self.beside(OPENAI):
            for stage in against.stages:
                if stage.group not in found or stage.excess > found[stage.group][0].excess:
                    found[stage.group] = stage, compared.clip.path.name if stage.difference else ""
        return list(found.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report as JSON data."""
        return {
            **self.about,
            "equal": self.is_equal and not self.failed,
            "exit_code": self.exit_code,
            "verdict": verdict(self),
            "systems": {name: summary(self, name) for name in self.systems},
            "stages": [
                {**_stage(stage), "group": stage.group, "file": clip}
                for stage, clip in self.stages()
            ],
            "files": [_file(compared) for compared in self.found],
            "failed": self.failed,
        }


def summary(report: Report, system: str) -> dict[str, Any]:
    """Summarise the comparison with one system over all clips."""
    rows = report.beside(system)
    ours = total(c.errors for c, _ in rows if c.errors is not None)
    theirs = total(a.errors for _, a in rows if a.errors is not None)
    n_equal, n_near = sum(a.is_equal for _, a in rows), sum(a.near is not None for _, a in rows)
    n_words = sum(a.n_words_different for _, a in rows)
    our_s, their_s = sum(c.seconds for c, _ in rows), sum(a.seconds for _, a in rows)
    told = f"{system}: {n_equal} of {len(rows)} files equal"
    told += f" ({n_near} of them by a near tie)" if n_near else ""
    told += f", {n_words} words differ"
    if ours.n_words:
        told += f"; WER asrmask {100 * ours.wer:.2f} %, {system} {100 * theirs.wer:.2f} %"
    if our_s:
        took = f"{our_s:.1f} s, {system} {their_s:.1f} s"
        told += f"; asrmask {took}: {their_s / our_s:.2f} times as fast"
    return {
        "told": told,
        "compared": COMPARED[system == OPENAI],
        "files": len(rows),
        "equal": n_equal,
        "near_ties": n_near,
        "words_different": n_words,
        "wer": {"asrmask": ours.wer, system: theirs.wer} if ours.n_words else None,
        "took_s": {"asrmask": our_s, system: their_s},
    }


def _file(compared: Compared) -> dict[str, Any]:
    return {
        "path": str(compared.clip.path),
        "name": compared.clip.path.name,
        "duration_s": compared.duration_s,
        "equal": compared.is_equal,
        "language": compared.language,
        "reference": compared.clip.text,
        "asrmask": _side(compared.heard, compared.seconds, compared.errors),
        "against": {
            found.system: {
                "equal": found.is_equal,
                "first_difference": found.different,
                "then": found.then,
                "near_tie": found.near,
                "words_different": found.n_words_different,
                "stages": [_stage(stage) for stage in found.stages],
                "times": found.times and {**asdict(found.times), "told": str(found.times)},
                "speed": found.seconds / compared.seconds,
                **_side(found.heard, found.seconds, found.errors),
            }
            for found in compared.against
        },
    }


def _stage(stage: Stage) -> dict[str, Any]:
    return {**asdict(stage), "equal": stage.is_equal}


def _side(heard: Any, seconds: float, errors: Errors | None) -> dict[str, Any]:
    return {
        **asdict(heard),
        "took_s": seconds,
        "wer": None if errors is None or not errors.n_words else errors.wer,
    }


def head(systems: Sequence[str]) -> str:
    """Return the heading of the table whose rows `lines` yields."""
    return ROW.format(*HEADINGS, wide=_wide(systems))


def _wide(systems: Sequence[str]) -> int:
    return max(14, *map(len, systems)) + 2


def lines(compared: Compared) -> Iterator[str]:
    """Yield the terminal lines of a clip: a row for each system, followed by its differences."""
    wide = _wide([found.system for found in compared.against])
    for found in compared.against:
        largest = max((stage.excess for stage in found.stages), default=None)
        yield ROW.format(
            _short(compared.clip.path.name),
            found.system,
            "equal" if found.is_equal else "DIFFERS",
            "" if largest is None else f"{largest:.2g}",
            found.n_words_different,
            ""
            if found.errors is None
            else f"{_percent(compared.errors)} ({_percent(found.errors)})",
            f"{found.seconds / compared.seconds:.2f} ×",
            wide=wide,
        ).rstrip()
        differences = {"first difference": found.different, "then": found.then, "near": found.near}
        for word, told in differences.items():
            if told is not None:
                yield f"  {word}: {told}"
        if found.times is not None and found.is_equal:
            yield f"  {found.times}"
        if found.n_words_different:
            normalise = normalizer(compared.language)
            texts = normalise(found.heard.text), normalise(compared.heard.text)
            yield f"  {found.system} → asrmask: {as_text(*texts)}"


def _short(name: str, most: int = 25) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _percent(errors: Errors | None) -> str:
    return "" if errors is None or not errors.n_words else f"{100 * errors.wer:.1f}"


def ending(report: Report) -> Iterator[str]:
    """Yield the last terminal lines: stages, systems, and the verdict."""
    if found := report.stages():
        yield ""
        yield f"{'stage':32}{'largest':>9}{'tolerance':>11}  where"
        for stage, clip in found:
            mark = "  " if stage.is_equal else "! "
            where = f"{stage.name}, {stage.where}, {clip}" if stage.difference else ""
            numbers = f"{stage.difference:9.1e}{stage.tolerance:11.1e}"
            yield f"{stage.group:32}{numbers}{mark}{where}".rstrip()
    if report.found:
        yield ""
        yield LEGEND
        for system in report.systems:
            yield str(summary(report, system)["told"])
    yield verdict(report)


def verdict(report: Report) -> str:
    n_different = sum(not compared.is_equal for compared in report.found)
    told = f"not equal: {n_different} of {len(report.found)} files differ"
    if not n_different:
        told = "equal within tolerance" if report.found else "nothing was compared"
    return told + (f"; failed: {len(report.failed)}" if report.failed else "")
