"""The plots of a benchmark, drawn from its saved numbers."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asrmask.benchmark import summary
from asrmask.benchmark.summary import PartResult, SystemResult
from asrmask.reporting.pages import style_figure

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
    caption: str
    figure: Figure


def plots(result: dict[str, Any]) -> list[BenchmarkPlot]:
    """Draw every plot that a benchmark has data for."""
    drawings: list[BenchmarkPlot] = []

    def axes_for(name: str, title: str, caption: str, height: float = 4.2) -> Axes:
        figure = Figure(figsize=(7.2, height), layout="constrained")
        drawings.append(BenchmarkPlot(name, title, caption, figure))
        return figure.subplots()

    reference = summary.reference_of(result)
    for i, (title, results) in enumerate(summary.results_by_title(result).items(), start=1):
        if good := [one for one in results if one.ratios]:
            has_range = any(len(one.ratios) > 1 for one in good)
            text = ": the median of the rounds, and their range" if has_range else ""
            caption = f"How many times as fast as {reference}{text}."
            axes = axes_for(f"speed-{i}", title, caption, 1.4 + 0.32 * len(good))
            draw_speed(axes, good, reference)
        if timed := [one for one in results if one.parts.get("encoder")]:
            caption = "Seconds in each part, for the systems that report them."
            title = f"Where the time goes. {title}"
            draw_parts(axes_for(f"parts-{i}", title, caption, 1.6 + 0.32 * len(timed)), timed)
    if parts := [one for one in summary.part_results(result) if one.ratios]:
        title = f"Parts of a model, compared with {summary.OTHER}"
        caption = f"How many times as much time or memory {summary.OTHER} takes: the medians."
        axes = axes_for("model-parts", title, caption, 1.4 + 0.2 * len(parts))
        names = [summary.title_of(result, *one.key) for one in parts]
        draw_part_ratios(axes, names, parts)
    for axis, (name, _) in summary.AXES.items():
        if points := summary.scaling_points(result, axis):
            caption = "Points are measured. Lines are fitted: a fixed cost and a cost per unit."
            axes = axes_for(f"growth-{axis}", f"Seconds against the {name}", caption)
            draw_scaling(axes, points, name)
    for plot in drawings:
        style_figure(plot.figure, plot.title)
    return drawings


def colour_of(system: str) -> str:
    """system: with or without settings and model"""
    return COLOURS[re.split("[: ]", system)[0]]


def draw_speed(axes: Axes, results: list[SystemResult], reference: str) -> None:
    for y, one in enumerate(results):
        ratio, low, high = np.median(one.ratios), min(one.ratios), max(one.ratios)
        xerr = [[ratio - low], [high - ratio]] if len(one.ratios) > 1 else None
        axes.barh(y, ratio, color=colour_of(one.system), xerr=xerr, capsize=2)
        axes.annotate(f"{ratio:.2f}", (high, y), (4, -3), textcoords="offset points", size=7)
    axes.axvline(1, color="#999999", lw=0.8, ls=":")
    axes.margins(x=0.1)
    _label_bars(axes, [one.system for one in results], f"times as fast as {reference}")


def draw_part_ratios(axes: Axes, names: list[str], parts: list[PartResult]) -> None:
    ratios = np.array([np.median(one.ratios) for one in parts])
    axes.set_xscale("log")  # half and twice are equally far from 1
    axes.barh(range(len(parts)), ratios - 1, left=1, color=colour_of("asrmask"))
    for y, ratio in enumerate(ratios):
        at = (max(ratio, 1), y)
        axes.annotate(f"{ratio:.2f}", at, (4, -3), textcoords="offset points", size=7)
    axes.margins(x=0.1)
    _label_bars(axes, names, f"times as much in {summary.OTHER}")


def draw_parts(axes: Axes, results: list[SystemResult]) -> None:
    left = np.zeros(len(results))
    totals = np.array([one.median_s or 0 for one in results])
    for name, colour in PARTS.items():
        seconds = np.array([one.parts.get(name, 0.0) for one in results])
        if name == "rest":
            seconds = np.maximum(totals - left, 0)
        axes.barh(range(len(results)), seconds, left=left, color=colour, label=name)
        left += seconds
    _label_bars(axes, [one.system for one in results], "seconds")


def _label_bars(axes: Axes, names: list[str], label: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label)


def draw_scaling(axes: Axes, points: dict[str, dict[float, float]], name: str) -> None:
    n_of_kind: Counter[str] = Counter()  # systems drawn in each colour: their line styles differ
    for system, measured in points.items():
        sizes, seconds = np.array([*measured]), np.array([*measured.values()])
        colour = colour_of(system)
        style = STYLES[n_of_kind[colour] % len(STYLES)]
        n_of_kind[colour] += 1
        axes.plot(sizes, seconds, "o", color=colour, ms=3)
        line = summary.fit(sizes, seconds)
        if line is not None and min(line[0] + line[1] * sizes) > 0:
            sizes = np.geomspace(min(sizes), max(sizes), 50)
            seconds = line[0] + line[1] * sizes
        axes.plot(sizes, seconds, style, color=colour, lw=1, label=system)
    axes.set(xscale="log", yscale="log", xlabel=name, ylabel="seconds")
    ticks = sorted({size for measured in points.values() for size in measured})
    axes.set_xticks(ticks, [f"{size:g}" for size in ticks])
    axes.set_xticks([], minor=True)
