"""The plots of a benchmark, drawn from its saved numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asrmask.benchmark.summary import AXES, Line, fit, grown, reference_of, tables
from asrmask.reporting.pages import drawn, finish

COLOURS = {
    "asrmask": "#1f5fa8",
    "openai-whisper": "#333333",
    "faster-whisper": "#c9302c",
    "whisper.cpp": "#2c8a4b",
    "transformers": "#e08a00",
}
PARTS = {
    "audio": "#9aa5b1",
    "spectrogram": "#e08a00",
    "encoder": "#1f5fa8",
    "decoder": "#c9302c",
    "rest": "#dddddd",
}
STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class BenchmarkPlot:
    name: str  # file name without prefix and suffix
    title: str
    told: str  # caption: what it shows, in one sentence
    draw: Callable[[Axes], None]
    height: float = 4.2


def colour_of(system: str) -> str:
    return COLOURS[system.partition(":")[0]]


def plots(result: dict[str, Any]) -> list[BenchmarkPlot]:
    """Return every plot that a benchmark has data for."""
    found = []
    reference = reference_of(result)
    for number, (title, lines) in enumerate(tables(result), start=1):
        good = [line for line in lines if line.ratios]
        several = any(len(line.ratios) > 1 for line in good)
        height = 1.4 + 0.32 * len(good)
        if good:
            found.append(
                BenchmarkPlot(
                    f"speed-{number}",
                    title,
                    f"How many times as fast as {reference}"
                    + (": the median of the rounds, and their range." if several else "."),
                    lambda axes, good=good: speed(axes, good, reference),  # type: ignore[misc]
                    height,
                )
            )
        timed = [line for line in lines if line.parts.get("encoder")]
        if timed:
            found.append(
                BenchmarkPlot(
                    f"parts-{number}",
                    f"Where the time goes. {title}",
                    "Seconds of each part; systems that do not tell them are left out.",
                    lambda axes, timed=timed: parts(axes, timed),  # type: ignore[misc]
                    1.6 + 0.32 * len(timed),
                )
            )
    for axis, (name, _) in AXES.items():
        if points := grown(result, axis):
            found.append(
                BenchmarkPlot(
                    f"growth-{axis}",
                    f"Seconds against the {name}",
                    "Points are measured; lines are fitted: a fixed part and one for each unit.",
                    lambda axes, points=points, name=name: growth(axes, points, name),  # type: ignore[misc]
                )
            )
    return found


def speed(axes: Axes, lines: list[Line], reference: str) -> None:
    for y, line in enumerate(lines):
        assert line.ratio is not None
        low, high = line.ratio - min(line.ratios), max(line.ratios) - line.ratio
        xerr = [[low], [high]] if len(line.ratios) > 1 else None
        axes.barh(y, line.ratio, color=colour_of(line.system), xerr=xerr, capsize=2)
        axes.annotate(
            f"{line.ratio:.2f}", (max(line.ratios), y), (4, -3), textcoords="offset points", size=7
        )
    axes.axvline(1, color="#999999", lw=0.8, ls=":")
    axes.set_yticks(range(len(lines)), [line.system for line in lines], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"times as fast as {reference}")
    axes.margins(x=0.1)


def parts(axes: Axes, lines: list[Line]) -> None:
    for y, line in enumerate(lines):
        taken = dict(line.parts)
        taken["rest"] = max((line.median_s or 0) - sum(taken.values()), 0)
        left = 0.0
        for name, colour in PARTS.items():
            axes.barh(y, taken[name], left=left, color=colour, label=name if y == 0 else None)
            left += taken[name]
    axes.set_yticks(range(len(lines)), [line.system for line in lines], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")


def growth(axes: Axes, points: dict[str, tuple[list[float], list[float]]], name: str) -> None:
    counts: dict[str, int] = {}
    for system, (sizes, seconds) in points.items():
        kind = system.partition(":")[0]
        style = STYLES[counts.get(kind, 0) % len(STYLES)]
        counts[kind] = counts.get(kind, 0) + 1
        colour = colour_of(system)
        axes.plot(sizes, seconds, "o", color=colour, ms=3)
        line = fit(sizes, seconds)
        if line is not None and min(line.at(min(sizes)), line.at(max(sizes))) > 0:
            grid = np.geomspace(min(sizes), max(sizes), 50)
            axes.plot(grid, [line.at(x) for x in grid], style, color=colour, lw=1, label=system)
        else:
            axes.plot(sizes, seconds, style, color=colour, lw=1, label=system)
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = sorted({size for several, _ in points.values() for size in several})
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(name)
    axes.set_ylabel("seconds")


def render(plot: BenchmarkPlot) -> tuple[bytes, bytes]:
    """Draw a plot as SVG and as PNG."""
    figure = Figure(figsize=(7.2, plot.height), layout="constrained")
    plot.draw(figure.subplots())
    finish(figure, plot.title)
    return drawn(figure, "svg"), drawn(figure, "png")
