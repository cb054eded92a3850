"""The plots of a report, from results alone: drawing runs no model."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asrmask.experiments.spec import Cell, Decoding, Trailing
from asrmask.experiments.statistics import Results, blocks_of, errors_of
from asrmask.page import drawn
from asrmask.policy import Policy
from asrmask.score import Errors, difference_interval

COLOURS = {
    "full": "#333333",
    "mask:encoder": "#e08a00",
    "mask:cross": "#8a4fbf",
    "mask:both": "#c9302c",
    "trim": "#2c8a4b",
    "virtual": "#1f5fa8",
}
LENGTHS_S = (0, 2, 4, 6, 8, 12, 16, 30)
N_BINS = 10
FEWEST = 3  # clips behind a point of a line


@dataclass(frozen=True)
class Plot:
    name: str  # of its files
    title: str
    told: str  # what it shows, in a sentence
    draw: Callable[[Axes, Results, str], bool]  # False: no data
    height: Callable[[Results, str], float] | None = None  # inches; default: 4.2


def render(plot: Plot, results: Results, model: str, form: str) -> bytes | None:
    """The plot as "svg" or "png"; None if there is nothing to draw."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    if not plot.draw(axes, results, model):
        return None
    if plot.height is not None:
        figure.set_size_inches(7.2, plot.height(results, model))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(plot.title, loc="left", fontsize=11)
    return drawn(figure, form)


def plain(results: Results, model: str) -> list[Cell]:
    """The cells of a model that differ in nothing but the policy."""
    return [
        cell
        for cell in results.summaries
        if cell.model == model
        and cell.control == "none"
        and cell.decoding == Decoding()
        and cell.trailing == Trailing()
        and results.speech(cell)
    ]


def usual(results: Results, model: str) -> list[Cell]:
    """Those with the usual margin, fill and positions."""
    return [cell for cell in plain(results, model) if cell.policy == Policy(cell.policy.kind)]


def wer_interval(results: Results, cell: Cell) -> tuple[float, float, float]:
    """A cell's WER and its 95 % interval, in per cent."""
    found = results.speech(cell)
    clips = sorted(found)
    ours = [errors_of(found[clip]) for clip in clips]
    none = [Errors(n_words=e.n_words) for e in ours]
    low, high = difference_interval(ours, none, blocks_of(results, clips), n_draws=2000)
    wer = results.summaries[cell].wer
    return 100 * (wer if wer is not None else float("nan")), 100 * low, 100 * high


def wer_by_policy(axes: Axes, results: Results, model: str) -> bool:
    cells = plain(results, model)
    if not cells:
        return False
    for y, cell in enumerate(cells):
        wer, low, high = wer_interval(results, cell)
        colour = COLOURS[cell.policy.kind]
        axes.errorbar(wer, y, xerr=[[wer - low], [high - wer]], fmt="o", color=colour, capsize=3)
        axes.annotate(f"{wer:.1f}", (high, y), (5, -3), textcoords="offset points", fontsize=7)
    axes.set_yticks(range(len(cells)), [str(cell.policy) for cell in cells], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=20)
    _, right = axes.get_xlim()
    ticks = [tick for tick in (0, 10, 20, 50, 100, 200, 500, 1000, 5000, 20_000) if tick <= right]
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlim(left=0)
    axes.set_xlabel("WER %, of all words, with 95 % interval (bootstrap over speakers)")
    return True


def wer_against_margin(axes: Axes, results: Results, model: str) -> bool:
    lines: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for cell in plain(results, model):
        wer = results.summaries[cell].wer
        if cell.policy.kind != "full" and wer is not None:
            policy = cell.policy
            key = (policy.kind, policy.fill, policy.positions)
            lines[key].append((policy.margin or 0.0, 100 * wer))
    lines = {key: sorted(points) for key, points in lines.items() if len(points) > 1}
    if not lines:
        return False
    for (kind, fill, positions), points in lines.items():
        style = "--" if fill != "zero" else "-"
        marker = "s" if positions == "last" else "o"
        label = ", ".join([kind, fill] + ["last"] * (positions == "last"))
        axes.plot(
            *zip(*points, strict=True), style, marker=marker, color=COLOURS[kind], label=label
        )
    full = results.summaries[Cell(model, Policy())].wer
    if full is not None:
        axes.axhline(100 * full, color=COLOURS["full"], lw=1, ls=":", label="full")
    axes.set_xscale("symlog", linthresh=0.16)
    axes.set_xticks([0, 0.16, 0.64, 1.28, 2.56, 6], ["0", "0.16", "0.64", "1.28", "2.56", "6"])
    axes.set_yscale("log")
    axes.set_xlabel("margin: seconds of padding that stay visible")
    axes.set_ylabel("WER %")
    return True


def wer_against_length(axes: Axes, results: Results, model: str) -> bool:
    drawn = False
    for cell in usual(results, model):
        points = []
        for low, high in pairwise(LENGTHS_S):
            inside = [r for r in results.speech(cell).values() if low <= r["seconds"] < high]
            counts = [errors_of(record) for record in inside]
            n_words = sum(count.n_words for count in counts)
            if n_words:
                seconds = np.mean([record["seconds"] for record in inside])
                points.append((seconds, 100 * sum(c.total for c in counts) / n_words))
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, "o-", color=COLOURS[cell.policy.kind], label=str(cell.policy))
            drawn = True
    axes.set_yscale("symlog", linthresh=20)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds of audio (mean of the clips in a bin)")
    axes.set_ylabel("WER %, of all words in the bin")
    return drawn


def insertions_against_deletions(axes: Axes, results: Results, model: str) -> bool:
    cells = plain(results, model)
    for cell in cells:
        counts = results.summaries[cell].errors
        x = 100 * counts.deletions / counts.n_words
        y = 100 * counts.insertions / counts.n_words
        marker = "s" if cell.policy.positions == "last" else "o"
        filled = COLOURS[cell.policy.kind] if cell.policy.fill == "zero" else "none"
        axes.scatter(x, y, marker=marker, facecolors=filled, edgecolors=COLOURS[cell.policy.kind])
        if cell in usual(results, model) or cell.policy.positions == "last":
            axes.annotate(str(cell.policy), (x, y), (4, 4), textcoords="offset points", fontsize=7)
    axes.set_yscale("symlog", linthresh=10)
    axes.set_xlabel("deletions, % of reference words")
    axes.set_ylabel("insertions, % of reference words")
    return bool(cells)


def end_over_steps(axes: Axes, results: Results, model: str) -> bool:
    drawn = False
    for cell in usual(results, model):
        steps: dict[int, list[float]] = defaultdict(list)
        for record in results.speech(cell).values():
            for i, logprob in enumerate(record["end_logprobs"]):
                steps[i].append(logprob)
        fewest = min(FEWEST, len(results.speech(cell)))
        means = [(i, np.mean(np.exp(v))) for i, v in sorted(steps.items()) if len(v) >= fewest]
        if means:
            x, y = zip(*means, strict=True)
            axes.plot(x, y, color=COLOURS[cell.policy.kind], label=str(cell.policy), lw=1.4)
            drawn = True
    axes.set_yscale("log")
    axes.set_xlabel(f"step of the text that was found (steps with {FEWEST} clips or more)")
    axes.set_ylabel("probability of the end token, mean over clips")
    return drawn


def likelihood_by_position(axes: Axes, results: Results, model: str) -> bool:
    full = results.speech(Cell(model, Policy()))
    drawn = False
    for cell in usual(results, model):
        if cell.policy.kind == "full":
            continue
        bins: list[list[float]] = [[] for _ in range(N_BINS)]
        ends = []
        for clip, record in results.speech(cell).items():
            if clip not in full or not record["reference_logprobs"]:
                continue
            mine, theirs = record["reference_logprobs"], full[clip]["reference_logprobs"]
            for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                bins[i * N_BINS // len(mine)].append(a - b)
            ends.append(record["reference_end_logprob"] - full[clip]["reference_end_logprob"])
        points = [(100 * (i + 0.5) / N_BINS, np.mean(v)) for i, v in enumerate(bins) if v]
        if points and ends:
            colour = COLOURS[cell.policy.kind]
            x, y = zip(*points, strict=True)
            axes.plot(x, y, "o-", color=colour, label=str(cell.policy), ms=3)
            axes.plot([106], [np.mean(ends)], "D", color=colour)
            drawn = True
    axes.axhline(0, color="#999999", lw=0.8)
    axes.set_yscale("symlog", linthresh=0.2)
    axes.set_xticks([0, 25, 50, 75, 100, 106], ["0", "25", "50", "75", "100 %", "\nend"])
    axes.set_xlabel("place of the token in the reference; ◆ the end token after it")
    axes.set_ylabel("log-likelihood minus full's, nats")
    return drawn


def time_against_wer(axes: Axes, results: Results, model: str) -> bool:
    cells = [
        cell
        for cell, summary in results.summaries.items()
        if cell.model == model and summary.wer is not None and cell.control == "none"
    ]
    for cell in cells:
        summary = results.summaries[cell]
        x = 1000 * ((summary.encoder_s or 0) + (summary.decoder_s or 0))
        y = 100 * (summary.wer or 0)
        is_plain = cell.decoding == Decoding() and not cell.trailing.seconds
        colour = COLOURS[cell.policy.kind]
        axes.scatter(x, y, s=26 if is_plain else 12, color=colour, alpha=1 if is_plain else 0.4)
        if cell in usual(results, model) or cell.decoding.fallback:
            name = " ".join(str(cell).split()[1:])
            axes.annotate(name, (x, y), (4, 3), textcoords="offset points", fontsize=6)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=20)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("milliseconds a clip, encoder and decoder, decoded in batches")
    axes.set_ylabel("WER %")
    return bool(cells)


PLOTS: Sequence[Plot] = (
    Plot(
        "wer_by_policy", "WER by policy", "What hiding the padding does to errors.", wer_by_policy
    ),
    Plot(
        "wer_against_margin",
        "WER against margin",
        "How much of the padding has to stay visible.",
        wer_against_margin,
    ),
    Plot(
        "wer_against_length",
        "WER against clip length",
        "Short clips are mostly padding.",
        wer_against_length,
    ),
    Plot(
        "insertions_against_deletions",
        "Insertions against deletions",
        "Which way a policy fails: words that were never said, or words that are missing. Filled: "
        "zero padding; squares: last positions.",
        insertions_against_deletions,
    ),
    Plot(
        "end_over_steps",
        "Probability of the end token over steps",
        "Whether the model sees that it is done.",
        end_over_steps,
    ),
    Plot(
        "likelihood_by_position",
        "Change of the reference's log-likelihood by place",
        "What a mask changes before any search amplifies it: the reference is given.",
        likelihood_by_position,
    ),
    Plot(
        "time_against_wer",
        "Time against WER",
        "What a policy costs, and what it saves.",
        time_against_wer,
    ),
)
