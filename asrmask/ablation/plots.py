"""The plots of a report, drawn from results: no model is run."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from asrmask.ablation.spec import Cell, Decoding, Trailing
from asrmask.ablation.statistics import Results, blocks_of, errors_of
from asrmask.evaluation.score import Errors, difference_interval
from asrmask.model.policy import Policy
from asrmask.reporting.pages import drawn, finish

COLOURS = {
    "full": "#333333",
    "mask:encoder": "#e08a00",
    "mask:cross": "#8a4fbf",
    "mask:both": "#c9302c",
    "trim": "#2c8a4b",
    "virtual": "#1f5fa8",
}
DASHED = ("trim", "virtual")  # they often cover another policy's line, which shows through the gaps
LENGTHS_S = (0, 2, 4, 6, 8, 12, 16, 30)
N_BINS = 10
FEWEST = 3  # clips that a point of a line must average
WIDTH, HEIGHT = 5.8, 4.0  # inches
PERCENT = (0, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
NATS = (0, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)

Points = list[tuple[float, float]]
Lines = dict[Policy, Points]


@dataclass(frozen=True)
class Plot:
    name: str  # file name without prefix and suffix
    title: str
    told: str  # caption: what it shows, in one sentence
    draw: Callable[[Axes, Results, str], bool]  # False: no data
    height: Callable[[Results, str], float] = lambda *_: HEIGHT  # inches
    spots: Callable[[Results, str], "list[Spot]"] = lambda *_: []  # of a scatter plot

    def caption(self, results: Results, model: str) -> str:
        """Return the caption: what the plot shows, and what its marks mean."""
        return " ".join([self.told, *mark_legend(self.spots(results, model))])


def figure_of(plot: Plot, results: Results, model: str) -> Figure | None:
    """Draw a plot as a figure; None if there is nothing to draw."""
    size = (WIDTH, plot.height(results, model))
    figure = Figure(figsize=size, layout="constrained")
    if not plot.draw(figure.subplots(), results, model):
        return None
    finish(figure, plot.title)
    return figure


def render(plot: Plot, results: Results, model: str) -> tuple[bytes, bytes] | None:
    """Draw a plot as SVG and as PNG; None if there is nothing to draw."""
    figure = figure_of(plot, results, model)
    return None if figure is None else (drawn(figure, "svg"), drawn(figure, "png"))


def plain(results: Results, model: str) -> list[Cell]:
    """Return the cells of a model that differ only in their policy."""
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
    """Return the plain cells with the default margin, fill and positions."""
    return [cell for cell in plain(results, model) if cell.policy == Policy(cell.policy.kind)]


def wer_interval(results: Results, cell: Cell) -> tuple[float, float, float]:
    """Return the WER of a cell and its 95 % interval, in per cent."""
    found = results.speech(cell)
    clips = sorted(found)
    ours = [errors_of(found[clip]) for clip in clips]
    none = [Errors(n_words=e.n_words) for e in ours]
    low, high = difference_interval(ours, none, blocks_of(results, clips), n_draws=2000)
    wer = results.summaries[cell].wer
    return 100 * (wer if wer is not None else float("nan")), 100 * low, 100 * high


def numbered(axes: Axes, which: str, ticks: Iterable[float], linear: float) -> None:
    """Make an axis linear up to `linear` and logarithmic beyond, with plain numbers as labels.

    which: "x" or "y"

    Call it when everything is drawn: ticks outside the visible range are left out.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("symlog", linthresh=linear)
    axes.autoscale_view()  # again: margins depend on the scale
    low, high = axis.get_view_interval()
    shown = [tick for tick in ticks if low <= tick <= high]
    axis.set_ticks(shown, [f"{tick:g}" for tick in shown])
    axis.set_minor_locator(NullLocator())


def percents(axes: Axes, which: str) -> None:
    """Make an axis one of error rates, starting at 0."""
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    numbered(axes, which, (), 20)
    set_limits(-1)  # room for the whole marker of a point at 0
    numbered(axes, which, PERCENT, 20)


def joined(lines: Lines, tolerance: float) -> list[tuple[list[Policy], Points]]:
    """Merge lines that look equal: return each line once, with all of its policies.

    tolerance: absolute difference that cannot be seen in the plot; 0.2 % of the value is added
    """
    found: list[tuple[list[Policy], Points]] = []
    for policy, points in lines.items():
        for policies, others in found:
            if len(points) == len(others) and np.allclose(points, others, 2e-3, tolerance):
                policies.append(policy)
                break
        else:
            found.append(([policy], points))
    return found


def draw_lines(axes: Axes, lines: Lines, tolerance: float, has_markers: bool = True) -> None:
    """Draw each line in the colour of its policy; equal lines once, labelled with all names."""
    for policies, points in joined(lines, tolerance):
        first = policies[0]
        style = "--" if first.kind in DASHED else "-"
        axes.plot(
            *zip(*points, strict=True),
            style if first.fill == "zero" else ":",
            marker=("s" if first.positions == "last" else "o") if has_markers else "",
            ms=4,
            lw=1.4,
            color=COLOURS[first.kind],
            label=" = ".join(map(str, policies)),
        )


@dataclass(frozen=True)
class Spot:
    """A cell as a point of a scatter plot."""

    cell: Cell
    x: float
    y: float
    is_usual: bool  # default settings; others are drawn small and pale
    marker: str = "o"
    is_filled: bool = True


def by_place(spots: Sequence[Spot]) -> list[list[Spot]]:
    """Group spots at the same point: one for each policy kind, default settings first."""
    places: dict[tuple[float, float], dict[str, Spot]] = defaultdict(dict)
    for spot in sorted(spots, key=lambda spot: not spot.is_usual):
        places[round(spot.x, 1), round(spot.y, 1)].setdefault(spot.cell.policy.kind, spot)
    return [list(there.values()) for there in places.values()]


def mark_legend(spots: Sequence[Spot]) -> list[str]:
    """Return a sentence for each kind of mark that is drawn: rings, sizes and shapes."""
    places = by_place(spots)
    drawn = [spot for several in places for spot in several]
    markers = {spot.marker for spot in drawn}
    told = {
        "Rings: policies at the same point.": any(len(several) > 1 for several in places),
        "Small: other settings.": not all(spot.is_usual for spot in drawn),
        "Hollow: padding not zero.": not all(spot.is_filled for spot in drawn),
        "Squares: last positions.": "s" in markers,
        "Diamonds: with fallback.": "D" in markers,
    }
    return [sentence for sentence, is_there in told.items() if is_there]


def draw_spots(axes: Axes, spots: Sequence[Spot]) -> None:
    """Draw each cell in the colour of its policy.

    The legend names the policies: labels at the points would overlap. Policies at the same point
    are drawn as rings around each other.
    """
    kinds = [kind for kind in COLOURS if any(spot.cell.policy.kind == kind for spot in spots)]
    for kind in kinds:
        axes.scatter([], [], s=30, color=COLOURS[kind], label=kind)
    for several in by_place(spots):
        for n_inside, spot in zip(range(len(several))[::-1], several, strict=True):
            colour = COLOURS[spot.cell.policy.kind]
            size = (6 if spot.is_usual else 4) + 5 * n_inside
            axes.plot(
                *(spot.x, spot.y, spot.marker),
                ms=size,
                clip_on=False,
                color=colour,
                mfc=colour if spot.is_filled else "white",
                alpha=1 if spot.is_usual or len(several) > 1 else 0.5,
            )


def wer_by_policy(axes: Axes, results: Results, model: str) -> bool:
    cells = plain(results, model)
    if not cells:
        return False
    found = [wer_interval(results, cell) for cell in cells]
    for y, (cell, (wer, low, high)) in enumerate(zip(cells, found, strict=True)):
        colour = COLOURS[cell.policy.kind]
        axes.plot(wer, y, "o", color=colour)
        if low < high:
            axes.errorbar(wer, y, xerr=[[wer - low], [high - wer]], color=colour, capsize=3)
        axes.annotate(f"{wer:.1f}", (high, y), (7, -3), textcoords="offset points", fontsize=8)
    axes.set_yticks(range(len(cells)), [str(cell.policy) for cell in cells])
    axes.set_ylim(len(cells) - 0.5, -0.5)
    percents(axes, "x")
    told = ", with 95 % interval" if any(low < high for _, low, high in found) else ""
    axes.set_xlabel(f"WER %, of all words{told}")
    return True


def wer_against_margin(axes: Axes, results: Results, model: str) -> bool:
    found: Lines = defaultdict(list)
    for cell in plain(results, model):
        wer = results.summaries[cell].wer
        if cell.policy.kind != "full" and wer is not None:
            found[replace(cell.policy, margin=None)].append((cell.policy.margin or 0.0, 100 * wer))
    lines = {policy: sorted(points) for policy, points in found.items() if len(points) > 1}
    if not lines:
        return False
    draw_lines(axes, lines, 0.05)
    full = results.summaries[Cell(model, Policy())].wer
    if full is not None:
        axes.axhline(100 * full, color=COLOURS["full"], lw=0.8, label="full")
    numbered(axes, "x", (0, 0.16, 0.64, 1.28, 2.56, 6, 12, 30), 0.16)
    percents(axes, "y")
    axes.set_xlabel("margin: seconds of padding that stay visible")
    axes.set_ylabel("WER %")
    return True


def wer_against_length(axes: Axes, results: Results, model: str) -> bool:
    lines: Lines = {}
    for cell in usual(results, model):
        points = []
        for low, high in pairwise(LENGTHS_S):
            inside = [r for r in results.speech(cell).values() if low <= r["seconds"] < high]
            counts = [errors_of(record) for record in inside]
            n_words = sum(count.n_words for count in counts)
            if n_words:
                seconds = float(np.mean([record["seconds"] for record in inside]))
                points.append((seconds, 100 * sum(c.total for c in counts) / n_words))
        if points:
            lines[cell.policy] = points
    draw_lines(axes, lines, 0.05)
    percents(axes, "y")
    axes.set_xlabel("seconds of audio, mean of the clips at a point")
    axes.set_ylabel("WER %, of all their words")
    return bool(lines)


def error_spots(results: Results, model: str) -> list[Spot]:
    spots = []
    for cell in plain(results, model):
        counts = results.summaries[cell].errors
        policy = cell.policy
        spots.append(
            Spot(
                cell,
                100 * counts.deletions / counts.n_words,
                100 * counts.insertions / counts.n_words,
                policy == Policy(policy.kind),
                "s" if policy.positions == "last" else "o",
                policy.fill == "zero",
            )
        )
    return spots


def insertions_against_deletions(axes: Axes, results: Results, model: str) -> bool:
    spots = error_spots(results, model)
    draw_spots(axes, spots)
    percents(axes, "y")
    axes.set_xlabel("deletions, % of reference words")
    axes.set_ylabel("insertions, % of reference words")
    return bool(spots)


def end_over_steps(axes: Axes, results: Results, model: str) -> bool:
    lines: Lines = {}
    fewest = min(FEWEST, len(results.speech(Cell(model, Policy()))))
    for cell in usual(results, model):
        steps: dict[int, list[float]] = defaultdict(list)
        for record in results.speech(cell).values():
            for i, logprob in enumerate(record["end_logprobs"]):
                steps[i].append(logprob)
        means: Points = [
            (i, float(np.mean(np.exp(v)))) for i, v in sorted(steps.items()) if len(v) >= fewest
        ]
        if means:
            lines[cell.policy] = means
    draw_lines(axes, lines, 0, has_markers=False)
    axes.set_yscale("log")
    few = f" (steps with {fewest} clips or more)" if fewest > 1 else ""
    axes.set_xlabel(f"step of the text that was found{few}")
    axes.set_ylabel("probability of the end token, mean")
    return bool(lines)


def likelihood_by_position(axes: Axes, results: Results, model: str) -> bool:
    full = results.speech(Cell(model, Policy()))
    lines: Lines = {}
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
        points = [(100 * (i + 0.5) / N_BINS, float(np.mean(v))) for i, v in enumerate(bins) if v]
        if points and ends:
            lines[cell.policy] = [*points, (106, float(np.mean(ends)))]
    draw_lines(axes, lines, 2e-3)
    axes.axhline(0, color="#999999", lw=0.8)
    numbered(axes, "y", sorted({sign * tick for tick in NATS for sign in (1, -1)}), 0.2)
    axes.set_xticks([0, 25, 50, 75, 100, 106], ["0", "25", "50", "75", "100 %", "\nend"])
    axes.set_xlabel("place of the token in the reference; last point: the end token after it")
    axes.set_ylabel("log-likelihood minus full's, nats")
    return bool(lines)


def time_spots(results: Results, model: str) -> list[Spot]:
    return [
        Spot(
            cell,
            1000 * ((summary.encoder_s or 0) + (summary.decoder_s or 0)),
            100 * summary.wer,
            cell.decoding == Decoding()
            and cell.trailing == Trailing()
            and cell.policy == Policy(cell.policy.kind),
            "D" if cell.decoding.fallback else "o",
        )
        for cell, summary in results.summaries.items()
        if cell.model == model and summary.wer is not None and cell.control == "none"
    ]


def time_against_wer(axes: Axes, results: Results, model: str) -> bool:
    spots = time_spots(results, model)
    draw_spots(axes, spots)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    percents(axes, "y")
    axes.set_xlabel("milliseconds a clip, encoder and decoder, decoded in batches")
    axes.set_ylabel("WER %")
    return bool(spots)


PLOTS: Sequence[Plot] = (
    Plot(
        "wer_by_policy",
        "WER by policy",
        "What hiding the padding does to errors.",
        wer_by_policy,
        lambda results, model: 1.4 + 0.22 * len(plain(results, model)),
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
        "Errors by the length of the clip; the rest of its 30 s is padding.",
        wer_against_length,
    ),
    Plot(
        "insertions_against_deletions",
        "Insertions against deletions",
        "Which way a policy fails: words that were never said, or words that are missing.",
        insertions_against_deletions,
        spots=error_spots,
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
        spots=time_spots,
    ),
)
