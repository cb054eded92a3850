"""Plots of an inspection. Missing data is hatched, so that it does not look like 0."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from asrmask.audio.constants import CHUNK_LENGTH, FRAMES_PER_SECOND, POSITIONS_PER_SECOND
from asrmask.inspection.inspection import N_BINS, Inspection, Shown
from asrmask.inspection.online import Tally
from asrmask.inspection.quantities import DEFINED, KINDS, QUANTITIES
from asrmask.reporting.pages import drawn

INK, BORDER, PADDING, NO_DATA = "#1c1c1c", "#c9302c", "#e08a00", "#999999"
Panel = tuple[str, Sequence[tuple[int, int]]]  # title and the (layer, head) pairs to average
POLICY_STYLES = ("-", "--")
LAYER_COLOURS = "viridis"
MOST_TOKENS = 60  # rows of a cross-attention map
MOST_HEADS = 48  # rows of a comparison; larger models show those that differ most
LABEL_S = 0.3  # shortest distance between word labels above a map


def hatched(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    """Draw a hatched rectangle: no data."""
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor="#f4f4f4", edgecolor=NO_DATA, hatch="////", lw=0)
    )


def legend(figure: Figure) -> None:
    patch = Patch(facecolor="#f4f4f4", edgecolor=NO_DATA, hatch="////", label="no data")
    figure.legend(handles=[patch], loc="outside lower right", frameon=False, fontsize=8)


def places_of(tally: Tally, kind: str) -> list[str]:
    """Return the places of one kind of attention, in the order of layers."""
    part, what = kind.split(".")
    names = dict.fromkeys(place for place, _ in tally.expected)
    return [p for p in names if p.startswith(f"{part}.") and p.endswith(f".{what}")]


def n_heads_of(tally: Tally) -> int:
    return max((len(moments.n) for moments in tally.moments.values()), default=1)


def heat_maps(tally: Tally, quantity: str, title: str) -> bytes:
    """Plot a quantity for every head: a grid of layers × heads for each kind of attention."""
    n_heads = n_heads_of(tally)
    grids = {
        kind: tally.grid(places_of(tally, kind), quantity, n_heads)
        for kind in KINDS
        if quantity in DEFINED[kind]
    }
    n_layers = max(len(places_of(tally, kind)) for kind in KINDS)
    figure = Figure(figsize=(11, 1.9 + 0.36 * n_layers), layout="constrained")
    values = np.concatenate([grid.ravel() for grid in grids.values()])
    known = values[~np.isnan(values)]
    low, high = (known.min(), known.max()) if len(known) else (0.0, 1.0)
    diverging = low < 0 < high
    if diverging:
        high = max(-low, high)
        low = -high
    elif low >= 0:
        low = 0.0
    image = None
    for axes, (kind, name) in zip(figure.subplots(1, len(KINDS)), KINDS.items(), strict=True):
        n = len(places_of(tally, kind))
        grid = grids.get(kind, np.full((n, n_heads), math.nan))
        image = axes.imshow(
            grid,
            cmap="RdBu_r" if diverging else "viridis",
            vmin=low,
            vmax=high if high > low else low + 1,
            aspect="auto",
        )
        for layer, head in np.argwhere(np.isnan(grid)):
            hatched(axes, head - 0.5, layer - 0.5, 1, 1)
        if n_heads <= 8:
            for (layer, head), value in np.ndenumerate(grid):
                if not math.isnan(value):
                    share = (value - low) / ((high - low) or 1)
                    dark = abs(share - 0.5) > 0.3 if diverging else share < 0.6
                    axes.annotate(
                        f"{value:.2f}",
                        (head, layer),
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="white" if dark else INK,
                    )
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("head", fontsize=8)
        axes.set_xticks(range(n_heads))
        axes.set_yticks(range(n), [str(i) for i in range(n)])
        axes.tick_params(labelsize=7)
    figure.axes[0].set_ylabel("layer", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=figure.axes, shrink=0.8).ax.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    legend(figure)
    return drawn(figure)


def spectrogram(shown: Shown) -> bytes:
    """Plot the log-Mel spectrogram of a window, with the padding shaded."""
    figure = Figure(figsize=(11, 2.3), layout="constrained")
    axes = figure.subplots()
    mel = shown.features.mel.float().cpu().numpy()
    begin = shown.start_s
    end = begin + mel.shape[1] / FRAMES_PER_SECOND
    axes.imshow(
        mel, origin="lower", aspect="auto", cmap="magma", extent=(begin, end, 0, mel.shape[0])
    )
    border = begin + shown.features.n_frames / FRAMES_PER_SECOND
    if border < end:
        axes.axvspan(
            border, end, facecolor=PADDING, alpha=0.35, hatch="..", edgecolor="white", lw=0
        )
        axes.axvline(border, color="white", lw=1.2)
        middle = (border + end) / 2
        axes.text(middle, mel.shape[0] / 2, "padding", color="white", ha="center", va="center")
    for seen in shown.words:
        axes.plot([seen.word.start, seen.word.end], [2, 2], color="white", lw=2.5)
    axes.set_xlim(begin, end)
    axes.set_ylabel("Mel band", fontsize=8)
    axes.set_xlabel("seconds; white: words", fontsize=8)
    axes.tick_params(labelsize=7)
    return drawn(figure)


def cross_maps(shown: Shown, heads: Sequence[Panel]) -> bytes:
    """Plot cross-attention weights, tokens × time, with words and the start of the padding.

    heads: the panels, one below the other
    """
    found = shown.measurement
    tokens = shown.tokens[:MOST_TOKENS]
    height = 1.5 + 0.13 * len(tokens)
    figure = Figure(figsize=(11, height * len(heads)), layout="constrained")
    ground = found.ground
    starts, counts = ground.starts[0].cpu().numpy(), ground.counts[0].cpu().numpy()
    n_audio = int(ground.audio.sum())
    first = int(starts.min())
    n_all = CHUNK_LENGTH * POSITIONS_PER_SECOND
    panels = np.atleast_1d(np.asarray(figure.subplots(len(heads), 1)))
    for axes, (title, pairs) in zip(panels, heads, strict=True):
        rows = np.stack([found.weights[f"decoder.{layer}.cross"][head] for layer, head in pairs])
        weights = rows.mean(axis=0)[: len(tokens)]
        # weights by position: a key's weight is spread over its positions; NaN where hidden
        wide = np.full((len(tokens), n_all), math.nan)
        for key, (start, count) in enumerate(zip(starts - first, counts, strict=True)):
            n = int(count)
            if n:
                wide[:, start : start + n] = weights[:, key : key + 1] / n
        begin = shown.start_s + first / POSITIONS_PER_SECOND
        end = begin + n_all / POSITIONS_PER_SECOND
        with np.errstate(divide="ignore"):
            image = axes.imshow(
                np.log10(np.clip(wide, 1e-5, None)),
                aspect="auto",
                cmap="viridis",
                vmin=-5,
                vmax=0,
                extent=(begin, end, len(tokens), 0),
                interpolation="nearest",
            )
        edges = np.flatnonzero(np.diff(np.isnan(wide[0]), prepend=False, append=False))
        for a, b in zip(edges[::2], edges[1::2], strict=True):
            x, width = begin + a / POSITIONS_PER_SECOND, (b - a) / POSITIONS_PER_SECOND
            hatched(axes, x, 0, width, len(tokens))
        for border in {0, n_audio}:
            x = shown.start_s + border / POSITIONS_PER_SECOND
            if begin < x < end:
                axes.axvline(x, color=BORDER, lw=1.6)
        labelled_s = -math.inf
        for seen in shown.words:
            axes.axvline(seen.word.start, color="white", lw=0.4, alpha=0.7)
            middle = (seen.word.start + seen.word.end) / 2
            if middle >= labelled_s + LABEL_S:
                text = seen.word.word.strip()
                axes.text(middle, -0.3, text, rotation=60, fontsize=6, ha="left", va="bottom")
                labelled_s = middle
        axes.set_xlim(begin, end)
        axes.set_yticks(np.arange(len(tokens)) + 0.5, [t.strip() for t in tokens], fontsize=6)
        axes.tick_params(axis="x", labelsize=7)
        ends = "; red: the audio ends and padding begins" if n_audio < n_all else ""
        axes.set_xlabel(f"seconds{ends}", fontsize=8)
        axes.set_title(title, loc="left", fontsize=9, pad=36)
        bar = figure.colorbar(image, ax=axes, shrink=0.8)
        bar.set_label("log10 of the weight", fontsize=7)
        bar.ax.tick_params(labelsize=7)
    return drawn(figure)


def padding_by_position(inspection: Inspection) -> bytes:
    """Plot the attention mass on padding along a clip or text, one line per layer."""
    from matplotlib import colormaps

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = {"encoder.self": "place in the audio, %", "decoder.cross": "place in the text, %"}
    x = 100 * (np.arange(N_BINS) + 0.5) / N_BINS
    for axes, (kind, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        has_data = False
        for style, (policy, profiles) in zip(
            POLICY_STYLES, inspection.profiles.items(), strict=False
        ):
            places = places_of(inspection.tallies[policy], kind)
            for i, place in enumerate(places):
                colour = colormaps[LAYER_COLOURS](0.9 * i / max(len(places) - 1, 1))
                if place in profiles:
                    name = f"{place}, {policy}" if len(inspection.profiles) > 1 else place
                    mean = profiles[place].means()
                    known = ~np.isnan(mean)  # short texts and clips have empty bins
                    axes.plot(
                        x[known], mean[known], style, marker=".", ms=4, color=colour, label=name
                    )
                    if style == "-":
                        low, high = (bound[known] for bound in profiles[place].interval())
                        axes.fill_between(x[known], low, high, color=colour, alpha=0.15, lw=0)
                    has_data = True
        if has_data:
            axes.legend(fontsize=6, frameon=False, ncols=2)
        else:
            hatched(axes, 0, 0, 100, 1)
            axes.text(50, 0.5, "no data", ha="center", va="center")
        axes.set_title(KINDS[kind], fontsize=9)
        axes.set_xlabel(label, fontsize=8)
        axes.set_ylabel("attention on padding, mean over heads", fontsize=8)
        axes.set_xlim(0, 100)
        axes.set_ylim(0, 1)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return drawn(figure)


def comparison(differences: Tally, quantity: str, title: str) -> bytes:
    """Plot the difference between two policies for each head, with 95 % intervals."""
    figure = Figure(layout="constrained")
    n_rows = 1
    for axes, (kind, name) in zip(figure.subplots(1, len(KINDS)), KINDS.items(), strict=True):
        rows = []
        for place in places_of(differences, kind):
            layer = place.split(".")[1]
            if not differences.has((place, quantity)):
                rows.append((f"{layer}: all", math.nan, math.nan, math.nan))
                continue
            moments = differences.moments[place, quantity]
            bounds = zip(moments.means(), *moments.interval(), strict=True)
            for head, numbers in enumerate(bounds):
                mean, low, high = map(float, numbers)
                rows.append((f"{layer}.{head}", mean, low, high))
        if len(rows) > MOST_HEADS:
            kept = sorted(rows, key=lambda row: -abs(np.nan_to_num(row[1])))[:MOST_HEADS]
            rows = [row for row in rows if row in kept]
            name += f", the {MOST_HEADS} that differ most"
        n_rows = max(n_rows, len(rows))
        marks = []
        for y, (_, mean, low, high) in enumerate(rows):
            if math.isnan(mean):
                marks.append(y)
                continue
            clear = not math.isnan(low) and (low > 0 or high < 0)
            colour = "#1f5fa8" if clear else NO_DATA
            if not math.isnan(low):
                axes.plot([low, high], [y, y], color=colour, lw=1.5)
            axes.plot([mean], [y], "o", ms=3, color=colour)
        axes.axvline(0, color=INK, lw=0.8)
        left, right = axes.get_xlim()
        for y in marks:
            hatched(axes, left, y - 0.5, right - left, 1)
        axes.set_xlim(left, right)
        axes.locator_params(axis="x", nbins=5)
        if len(marks) == len(rows):  # no data
            axes.set_xticks([])
        axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=6)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(name, fontsize=9)
    figure.axes[0].set_ylabel("layer.head", fontsize=8)
    figure.axes[1].set_xlabel("difference; blue: the interval is on one side of 0", fontsize=8)
    figure.set_size_inches(11, 1.8 + 0.15 * n_rows)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    legend(figure)
    return drawn(figure)


def titles(inspection: Inspection) -> dict[str, str]:
    """Return the title of each quantity's heat map."""
    n = inspection.n_windows
    windows = "1 window" if n == 1 else f"mean of {n} windows"
    return {
        name: f"{text[0].upper()}{text[1:]}: {inspection.policy}, {windows}"
        for name, text in QUANTITIES.items()
    }
