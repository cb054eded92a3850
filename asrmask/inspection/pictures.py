"""Plots of an inspection. Missing data is hatched, so that it does not look like 0."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from asrmask.audio.constants import FRAMES_PER_SECOND, N_POSITIONS, POSITIONS_PER_SECOND
from asrmask.inspection.inspection import N_BINS, Inspection, PlottedWindow
from asrmask.inspection.key_labels import KeyLabels
from asrmask.inspection.online import Tally
from asrmask.inspection.quantities import KINDS
from asrmask.reporting.pages import render_figure

INK, BORDER, PADDING, CLEAR, GREY = "#1c1c1c", "#c9302c", "#e08a00", "#1f5fa8", "#999999"
NO_DATA: dict[str, Any] = {"facecolor": "#f4f4f4", "edgecolor": GREY, "hatch": "////"}
CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}
STYLE: Any = {
    "axes.labelsize": 8,
    "axes.titlesize": 9,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 11,
    "legend.frameon": False,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}
Panel = tuple[str, Sequence[tuple[int, int]]]  # title and the (layer, head) pairs to average
MOST_TOKENS = 60  # rows of a cross-attention map
MOST_HEADS = 48  # rows of a comparison; larger models show those that differ most
LABEL_S = 0.3  # shortest distance between word labels above a map


def hatched(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    """Draw a hatched rectangle: no data."""
    axes.add_patch(Rectangle((x, y), width, height, lw=0, **NO_DATA))


def finished(figure: Figure, title: str) -> bytes:
    """Add the title and the legend for missing data; render the figure."""
    figure.suptitle(title, x=0.01, ha="left")
    patch = Patch(label="no data", **NO_DATA)
    figure.legend(handles=[patch], loc="outside lower right", fontsize=8)
    return render_figure(figure)


@rc_context(STYLE)
def heat_maps(tally: Tally, quantity: str, title: str) -> bytes:
    """Plot a quantity for every head: a grid of layers × heads for each kind of attention."""
    n_heads = max((len(moments.n) for moments in tally.moments.values()), default=1)
    grids = {kind: tally.grid(kind, quantity, n_heads) for kind in KINDS}
    values = np.concatenate([grid.ravel() for grid in grids.values()])
    values = values[~np.isnan(values)]
    low, high = (min(values.min(), 0.0), values.max()) if len(values) else (0.0, 1.0)
    diverging = low < 0 < high
    if diverging:
        high = max(-low, high)
        low = -high
    norm = Normalize(low, high if high > low else low + 1)
    figure = Figure(figsize=(11, 1.9 + 0.36 * max(map(len, grids.values()))))
    for axes, (kind, grid) in zip(figure.subplots(1, len(grids)), grids.items(), strict=True):
        colours = "RdBu_r" if diverging else "viridis"
        image = axes.imshow(grid, cmap=colours, norm=norm, aspect="auto")
        for (layer, head), value in np.ndenumerate(grid):
            if math.isnan(value):
                hatched(axes, head - 0.5, layer - 0.5, 1, 1)
            elif n_heads <= 8:
                share = norm(value)
                dark = abs(share - 0.5) > 0.3 if diverging else share < 0.6
                style = {**CENTRED, "fontsize": 7, "color": "white" if dark else INK}
                axes.text(head, layer, f"{value:.2f}", **style)
        ticks = {"xticks": range(n_heads), "yticks": range(len(grid))}
        axes.set(title=KINDS[kind], xlabel="head", **ticks)
    figure.axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=figure.axes, shrink=0.8)
    return finished(figure, title)


@rc_context(STYLE)
def spectrogram(window: PlottedWindow) -> bytes:
    """Plot the log-Mel spectrogram of a window, with the padding shaded."""
    figure = Figure(figsize=(11, 2.3))
    axes = figure.subplots()
    mel = window.features.mel.float().cpu().numpy()
    n_mels, n_frames = mel.shape
    begin, end = window.start_s, window.start_s + n_frames / FRAMES_PER_SECOND
    axes.imshow(mel, origin="lower", aspect="auto", cmap="magma", extent=(begin, end, 0, n_mels))
    border = begin + window.features.n_frames / FRAMES_PER_SECOND
    if border < end:
        style: dict[str, Any] = {"facecolor": PADDING, "edgecolor": "white", "hatch": ".."}
        axes.axvspan(border, end, alpha=0.35, lw=0, **style)
        axes.axvline(border, color="white", lw=1.2)
        axes.text((border + end) / 2, n_mels / 2, "padding", color="white", **CENTRED)
    for one in window.words:
        axes.plot([one.word.start, one.word.end], [2, 2], color="white", lw=2.5)
    axes.set(xlim=(begin, end), xlabel="seconds; white: words", ylabel="Mel band")
    return render_figure(figure)


@rc_context(STYLE)
def cross_maps(window: PlottedWindow, panels: Sequence[Panel]) -> bytes:
    """Plot cross-attention weights, tokens × time; the panels are one below the other."""
    n_tokens = min(len(window.tokens), MOST_TOKENS)
    figure = Figure(figsize=(11, (1.5 + 0.13 * n_tokens) * len(panels)))
    rows = figure.subplots(len(panels), 1, squeeze=False)
    for axes, (title, heads) in zip(rows[:, 0], panels, strict=True):
        weights = [window.measurement.weights[f"decoder.{layer}.cross"][h] for layer, h in heads]
        _cross_map(axes, window, np.mean(weights, axis=0)[:n_tokens])
        axes.set_title(title, loc="left", pad=36)
    return render_figure(figure)


def weights_by_position(weights: np.ndarray, keys: KeyLabels) -> np.ndarray:
    """Spread each key's weight over its positions, (Q, K) → (Q, N_POSITIONS); NaN where hidden."""
    starts, counts = keys.starts[0].cpu().numpy(), keys.counts[0].cpu().numpy().astype(int)
    wide = np.full((len(weights), N_POSITIONS), math.nan)
    for key, (start, n) in enumerate(zip(starts - starts.min(), counts, strict=True)):
        if n:
            wide[:, start : start + n] = weights[:, key : key + 1] / n
    return wide


def _cross_map(axes: Axes, window: PlottedWindow, weights: np.ndarray) -> None:
    """Plot weights (Q, K) with words and the start of the padding."""
    keys = window.measurement.cross_keys
    wide = weights_by_position(weights, keys)
    n_tokens = len(weights)
    begin = window.start_s + int(keys.starts.min()) / POSITIONS_PER_SECOND
    end = begin + N_POSITIONS / POSITIONS_PER_SECOND
    logs = np.log10(np.clip(wide, 1e-5, None))
    style: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "vmin": -5, "vmax": 0}
    image = axes.imshow(logs, extent=(begin, end, n_tokens, 0), **style)
    hidden = np.flatnonzero(np.diff(np.isnan(wide[0]), prepend=False, append=False))
    for first, stop in hidden.reshape(-1, 2) / POSITIONS_PER_SECOND:
        hatched(axes, begin + first, 0, stop - first, n_tokens)
    n_audio = int(keys.audio.sum())
    for border in (0, n_audio):
        x = window.start_s + border / POSITIONS_PER_SECOND
        if begin < x < end:
            axes.axvline(x, color=BORDER, lw=1.6)
    labelled_s = -math.inf
    for one in window.words:
        axes.axvline(one.word.start, color="white", lw=0.4, alpha=0.7)
        middle = (one.word.start + one.word.end) / 2
        if middle >= labelled_s + LABEL_S:
            axes.text(middle, -0.3, one.word.word.strip(), rotation=60, fontsize=6, va="bottom")
            labelled_s = middle
    tokens = [token.strip() for token in window.tokens[:n_tokens]]
    axes.set_yticks(np.arange(n_tokens) + 0.5, tokens, fontsize=6)
    padded = "; red: the audio ends and padding begins" if n_audio < N_POSITIONS else ""
    axes.set(xlim=(begin, end), xlabel=f"seconds{padded}")
    axes.figure.colorbar(image, ax=axes, shrink=0.8, label="log10 of the weight")


@rc_context(STYLE)
def padding_by_position(inspection: Inspection) -> bytes:
    """Plot the attention mass on padding along a clip or text, one line per layer."""
    figure = Figure(figsize=(11, 3.6))
    panels = {"encoder.self": "audio", "decoder.cross": "text"}
    x = 100 * (np.arange(N_BINS) + 0.5) / N_BINS
    for axes, (kind, part) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for policy, profiles in inspection.profiles.items():
            is_first = policy == str(inspection.policy)
            places = [p for p in inspection.tallies[policy].places(kind) if p in profiles]
            for i, place in enumerate(places):
                mean, (low, high) = profiles[place].means(), profiles[place].interval()
                known = ~np.isnan(mean)  # short texts and clips have empty bins
                if not known.any():
                    continue
                colour = colormaps["viridis"](0.9 * i / max(len(places) - 1, 1))
                label = place if inspection.against is None else f"{place}, {policy}"
                line = ".-" if is_first else ".--"
                axes.plot(x[known], mean[known], line, ms=4, color=colour, label=label)
                if is_first:
                    band = (x[known], low[known], high[known])
                    axes.fill_between(*band, color=colour, alpha=0.15, lw=0)
        if axes.lines:
            axes.legend(fontsize=6, ncols=2)
        else:
            hatched(axes, 0, 0, 100, 1)
            axes.text(50, 0.5, "no data", **CENTRED)
        labels = {"xlabel": f"position in the {part}, %", "title": KINDS[kind]}
        axes.set(xlim=(0, 100), ylim=(0, 1), **labels)
        axes.set_ylabel("attention on padding, mean over heads")
        axes.spines[["top", "right"]].set_visible(False)
    return render_figure(figure)


@rc_context(STYLE)
def comparison(differences: Tally, quantity: str, title: str) -> bytes:
    """Plot the difference between two policies for each head, with 95 % intervals."""
    figure = Figure()
    n_rows = 1
    for axes, (kind, name) in zip(figure.subplots(1, len(KINDS)), KINDS.items(), strict=True):
        rows = _difference_rows(differences, kind, quantity)
        if len(rows) > MOST_HEADS:
            largest = sorted(rows, key=lambda row: -abs(np.nan_to_num(row[1])))[:MOST_HEADS]
            rows = [row for row in rows if row in largest]
            name += f", the {MOST_HEADS} that differ most"
        n_rows = max(n_rows, len(rows))
        mean, low, high = np.array([row[1:] for row in rows]).T
        y, known, bounded = np.arange(len(rows)), ~np.isnan(mean), ~np.isnan(low)
        colours = np.where((low > 0) | (high < 0), CLEAR, GREY)
        axes.hlines(y[bounded], low[bounded], high[bounded], colors=colours[bounded])
        axes.scatter(mean[known], y[known], s=9, c=colours[known])
        axes.axvline(0, color=INK, lw=0.8)
        left, right = axes.get_xlim()
        for row in y[~known]:
            hatched(axes, left, row - 0.5, right - left, 1)
        axes.locator_params(axis="x", nbins=5)
        if not known.any():
            axes.set_xticks([])
        axes.set_yticks(y, [row[0] for row in rows], fontsize=6)
        axes.set(xlim=(left, right), ylim=(len(rows) - 0.5, -0.5), title=name)
    figure.axes[0].set_ylabel("layer.head")
    figure.axes[1].set_xlabel("difference; blue: the interval is on one side of 0")
    figure.set_size_inches(11, 1.8 + 0.15 * n_rows)
    return finished(figure, title)


def _difference_rows(
    differences: Tally, kind: str, quantity: str
) -> list[tuple[str, float, float, float]]:
    """Return label, mean and interval of each head; one row of NaN for a layer without data."""
    rows = []
    for place in differences.places(kind):
        layer = place.split(".")[1]
        if differences.has((place, quantity)):
            moments = differences.moments[place, quantity]
            numbers = zip(moments.means(), *moments.interval(), strict=True)
            rows += [(f"{layer}.{head}", *three) for head, three in enumerate(numbers)]
        else:
            rows.append((f"{layer}: all", math.nan, math.nan, math.nan))
    return rows
