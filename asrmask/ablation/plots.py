"""The plots of a report, drawn from results: no model is run."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from asrmask.ablation.spec import Cell
from asrmask.ablation.statistics import Results
from asrmask.evaluation.score import Errors, difference_interval, total
from asrmask.model.policy import Policy
from asrmask.reporting.pages import style_figure

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
MIN_CLIPS = 3  # that a point of a line must average
WIDTH, HEIGHT = 5.8, 4.0  # inches
PERCENT = (0, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
NATS = (0, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)

Points = list[tuple[float, float]]
# draws on the axes, nothing without data; may return more sentences for the caption
Draw = Callable[[Axes, Results, str], str | None]


@dataclass(frozen=True)
class Plot:
    name: str  # file name without prefix and suffix
    title: str
    caption: str
    draw: Draw

    def render(self, results: Results, model: str) -> tuple[Figure | None, str]:
        """Return the figure, None without data, and the caption: what it and its marks mean."""
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        more = self.draw(axes, results, model)
        if not axes.has_data():
            return None, self.caption
        style_figure(figure, self.title)
        return figure, f"{self.caption} {more}" if more else self.caption


PLOTS: list[Plot] = []


def plot(title: str, caption: str) -> Callable[[Draw], Draw]:
    """Add a drawing function to PLOTS, under its own name."""

    def add(draw: Draw) -> Draw:
        PLOTS.append(Plot(draw.__name__, title, caption, draw))
        return draw

    return add


def cells_by_policy(results: Results, model: str, *, defaults: bool = False) -> list[Cell]:
    """Return the cells of a model that differ only in their policy.

    defaults: only policies with the default margin, fill and positions
    """
    return [
        cell
        for cell in results.summaries
        if cell == Cell(model, Policy(cell.policy.kind) if defaults else cell.policy)
        and results.speech(cell)
    ]


def set_ticks(
    axes: Axes, which: str, ticks: Sequence[float], linear: float, low: float | None = None
) -> None:
    """Make an axis linear up to `linear` and logarithmic beyond, with plain numbers as labels.

    which: "x" or "y"
    low:   where the axis starts

    Call it when everything is drawn: ticks outside the visible range are left out.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    getattr(axes, f"set_{which}scale")("symlog", linthresh=linear)
    axes.autoscale_view()  # again: margins depend on the scale
    if low is not None:
        axes.set(**{f"{which}lim": (low, None)})
    start, end = axis.get_view_interval()
    visible = [tick for tick in ticks if start <= tick <= end]
    axis.set_ticks(visible, [f"{tick:g}" for tick in visible])
    axis.set_minor_locator(NullLocator())


def set_percent_ticks(axes: Axes, which: str) -> None:
    set_ticks(axes, which, PERCENT, 20, low=-1)  # below 0: markers at 0 are not cut off


def draw_lines(
    axes: Axes, lines: Mapping[Policy, Points], tolerance: float, has_markers: bool = True
) -> None:
    """Draw each line in the colour of its policy; equal lines once, labelled with all names.

    tolerance: absolute difference that cannot be seen in the plot; 0.2 % of the value is added
    """
    drawn: dict[Policy, list[Policy]] = {}  # policy of a line → policies with an equal line
    for policy, points in lines.items():
        for first, others in drawn.items():
            is_as_long = len(points) == len(lines[first])
            if is_as_long and np.allclose(points, lines[first], 2e-3, tolerance):
                others.append(policy)
                break
        else:
            drawn[policy] = [policy]
    for policy, policies in drawn.items():
        style = "--" if policy.kind in DASHED else "-"
        axes.plot(
            *zip(*lines[policy], strict=True),
            style if policy.fill == "zero" else ":",
            marker=("s" if policy.positions == "last" else "o") if has_markers else "",
            ms=4,
            lw=1.4,
            color=COLOURS[policy.kind],
            label=" = ".join(map(str, policies)),
        )


def draw_spots(axes: Axes, spots: Mapping[Cell, tuple[float, float]]) -> str:
    """Draw each cell as a point in the colour of its policy; return what the marks mean.

    The legend names the policies: labels at the points would overlap. Policies at the same point
    are drawn as rings around each other.
    """

    def has_defaults(cell: Cell) -> bool:
        return cell == Cell(cell.model, Policy(cell.policy.kind))

    for kind, colour in COLOURS.items():
        if any(cell.policy.kind == kind for cell in spots):
            axes.scatter([], [], s=30, color=colour, label=kind)
    places: dict[tuple[float, float], dict[str, Cell]] = defaultdict(dict)
    for cell in sorted(spots, key=has_defaults, reverse=True):
        x, y = spots[cell]
        places[round(x, 1), round(y, 1)].setdefault(cell.policy.kind, cell)
    meanings: Counter[str] = Counter()
    for cells in places.values():
        for n_inside, cell in zip(range(len(cells))[::-1], cells.values(), strict=True):
            policy, is_default = cell.policy, has_defaults(cell)
            is_square, is_diamond = policy.positions == "last", cell.decoding.fallback
            marks = {
                "Rings: policies at the same point.": len(cells) > 1,
                "Small: other settings.": not is_default,
                "Hollow: padding not zero.": policy.fill != "zero",
                "Squares: last positions.": is_square,
                "Diamonds: with fallback.": is_diamond,
            }
            meanings.update(marks)
            axes.plot(
                *spots[cell],
                "D" if is_diamond else "s" if is_square else "o",
                ms=(6 if is_default else 4) + 5 * n_inside,
                clip_on=False,
                color=COLOURS[policy.kind],
                mfc=COLOURS[policy.kind] if policy.fill == "zero" else "white",
                alpha=1 if is_default or len(cells) > 1 else 0.5,
            )
    return " ".join(meaning for meaning, n in meanings.items() if n)


@plot("WER by policy", "What hiding the padding does to errors.")
def wer_by_policy(axes: Axes, results: Results, model: str) -> None:
    cells = cells_by_policy(results, model)
    if not cells:
        return
    assert isinstance(axes.figure, Figure)
    axes.figure.set_figheight(1.4 + 0.22 * len(cells))
    has_intervals = False
    for y, cell in enumerate(cells):
        clips, records = zip(*sorted(results.speech(cell).items()), strict=True)
        errors = [record["errors"] for record in records]
        perfect = [Errors(n_words=e.n_words) for e in errors]
        interval = difference_interval(errors, perfect, results.blocks_of(clips), n_draws=2000)
        low, high = 100 * interval[0], 100 * interval[1]
        wer, colour = 100 * total(errors).wer, COLOURS[cell.policy.kind]
        axes.plot(wer, y, "o", color=colour)
        if low < high:
            has_intervals = True
            axes.errorbar(wer, y, xerr=[[wer - low], [high - wer]], color=colour, capsize=3)
        axes.annotate(f"{wer:.1f}", (high, y), (7, -3), textcoords="offset points", fontsize=8)
    axes.set_yticks(range(len(cells)), [str(cell.policy) for cell in cells])
    axes.set_ylim(len(cells) - 0.5, -0.5)
    set_percent_ticks(axes, "x")
    axes.set_xlabel("WER %, of all words" + ", with 95 % interval" * has_intervals)


@plot("WER against margin", "How much of the padding has to stay visible.")
def wer_against_margin(axes: Axes, results: Results, model: str) -> None:
    lines: dict[Policy, Points] = defaultdict(list)
    for cell in cells_by_policy(results, model):
        wer = results.summaries[cell].wer
        if cell.policy.kind != "full" and wer is not None:
            lines[replace(cell.policy, margin=None)].append((cell.policy.margin or 0.0, 100 * wer))
    lines = {policy: sorted(points) for policy, points in lines.items() if len(points) > 1}
    draw_lines(axes, lines, 0.05)
    full = results.summaries[Cell(model, Policy())].wer
    if lines and full is not None:
        axes.axhline(100 * full, color=COLOURS["full"], lw=0.8, label="full")
    set_ticks(axes, "x", (0, 0.16, 0.64, 1.28, 2.56, 6, 12, 30), 0.16)
    set_percent_ticks(axes, "y")
    axes.set(xlabel="margin: seconds of padding that stay visible", ylabel="WER %")


@plot(
    "WER against clip length", "Errors by the length of the clip; the rest of its 30 s is padding."
)
def wer_against_length(axes: Axes, results: Results, model: str) -> None:
    lines: dict[Policy, Points] = defaultdict(list)
    for cell in cells_by_policy(results, model, defaults=True):
        for low, high in pairwise(LENGTHS_S):
            inside = [r for r in results.speech(cell).values() if low <= r["seconds"] < high]
            errors = total(record["errors"] for record in inside)
            if errors.n_words:
                seconds = float(np.mean([record["seconds"] for record in inside]))
                lines[cell.policy].append((seconds, 100 * errors.wer))
    draw_lines(axes, lines, 0.05)
    set_percent_ticks(axes, "y")
    axes.set_xlabel("seconds of audio, mean of the clips at a point")
    axes.set_ylabel("WER %, of all their words")


@plot(
    "Insertions against deletions",
    "Which way a policy fails: words that were never said, or words that are missing.",
)
def insertions_against_deletions(axes: Axes, results: Results, model: str) -> str:
    spots = {}
    for cell in cells_by_policy(results, model):
        errors = results.summaries[cell].errors
        spots[cell] = (
            100 * errors.deletions / errors.n_words,
            100 * errors.insertions / errors.n_words,
        )
    meaning = draw_spots(axes, spots)
    set_percent_ticks(axes, "y")
    axes.set_xlabel("deletions, % of reference words")
    axes.set_ylabel("insertions, % of reference words")
    return meaning


@plot("Probability of the end token over steps", "Whether the model sees that it is done.")
def end_over_steps(axes: Axes, results: Results, model: str) -> None:
    lines: dict[Policy, Points] = defaultdict(list)
    n_min = min(MIN_CLIPS, len(results.speech(Cell(model, Policy()))))
    for cell in cells_by_policy(results, model, defaults=True):
        texts = [record["end_logprobs"] for record in results.speech(cell).values()]
        for i in range(max(map(len, texts))):
            logprobs = [text[i] for text in texts if i < len(text)]
            if len(logprobs) >= n_min:
                lines[cell.policy].append((i, float(np.mean(np.exp(logprobs)))))
    draw_lines(axes, lines, 0, has_markers=False)
    axes.set_yscale("log")
    few = f" (steps with {n_min} clips or more)" if n_min > 1 else ""
    axes.set_xlabel(f"step of the decoded text{few}")
    axes.set_ylabel("probability of the end token, mean")


@plot(
    "Change of the reference's log-likelihood by position",
    "What a mask changes before any search amplifies it: the reference is given.",
)
def likelihood_by_position(axes: Axes, results: Results, model: str) -> None:
    full = results.speech(Cell(model, Policy()))
    lines: dict[Policy, Points] = {}
    for cell in cells_by_policy(results, model, defaults=True):
        bins: list[list[float]] = [[] for _ in range(N_BINS)]
        ends = []
        for clip, record in results.speech(cell).items():
            if cell.policy.kind == "full" or clip not in full or not record["reference_logprobs"]:
                continue
            logprobs, others = record["reference_logprobs"], full[clip]["reference_logprobs"]
            for i, (a, b) in enumerate(zip(logprobs, others, strict=True)):
                bins[i * N_BINS // len(logprobs)].append(a - b)
            ends.append(record["reference_end_logprob"] - full[clip]["reference_end_logprob"])
        points = [(100 * (i + 0.5) / N_BINS, float(np.mean(v))) for i, v in enumerate(bins) if v]
        if points:
            lines[cell.policy] = [*points, (106, float(np.mean(ends)))]
    draw_lines(axes, lines, 2e-3)
    if lines:
        axes.axhline(0, color="#999999", lw=0.8)
    set_ticks(axes, "y", sorted({sign * tick for tick in NATS for sign in (1, -1)}), 0.2)
    axes.set_xticks([0, 25, 50, 75, 100, 106], ["0", "25", "50", "75", "100 %", "\nend"])
    axes.set_xlabel("position of the token in the reference; last point: the end token after it")
    axes.set_ylabel("log-likelihood minus full's, nats")


@plot("Time against WER", "What a policy costs, and what it saves.")
def time_against_wer(axes: Axes, results: Results, model: str) -> str:
    spots = {
        cell: (summary.columns["encoder ms"] + summary.columns["decoder ms"], 100 * summary.wer)
        for cell, summary in results.summaries.items()
        if cell.model == model and summary.wer is not None and cell.control == "none"
    }
    meaning = draw_spots(axes, spots)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    set_percent_ticks(axes, "y")
    axes.set(xlabel="milliseconds a clip, encoder and decoder, decoded in batches", ylabel="WER %")
    return meaning
