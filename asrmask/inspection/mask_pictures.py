"""Plot attention masks, as text or as a PNG.

A picture is an integer matrix, with queries as rows and keys as columns:
0 hidden, 1 visible, 2 visible as part of an average (virtual padding), 3 not computed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from asrmask.audio.constants import N_POSITIONS, POSITIONS_PER_SECOND
from asrmask.files import atomic_write
from asrmask.model import masks
from asrmask.model.encoding import Plan
from asrmask.reporting.pages import render_figure

HIDDEN, VISIBLE, AVERAGED, ABSENT = range(4)
CHARACTERS = "·█▒ "
MEANINGS = ("hidden", "visible", "from the stored bank", "not computed")
COLOURS = ("#e4e4e4", "#1f5fa8", "#8fbbe8", "#ffffff")
MAX_DIGITS = 12  # matrices up to this size are printed as digits
N_COLUMNS, N_ROWS = 60, 15  # size of larger ones in characters
MAX_LABELS = 40  # queries that are labelled in a plot


class Picture(NamedTuple):
    """One mask of one clip."""

    title: str
    cells: np.ndarray  # (queries, keys)
    labels: Sequence[str] = ()  # names of the queries, if any


def pictures(plan: Plan, tokens: Sequence[str]) -> list[Picture]:
    """Return the masks of the first clip of a plan: encoder, decoder and cross-attention."""
    n = len(tokens)
    encoder = np.tile(_key_row(plan, plan.encoder_mask), (N_POSITIONS, 1))
    absent = np.setdiff1d(np.arange(N_POSITIONS), _computed(plan))
    encoder[absent] = ABSENT  # as queries
    cross = np.tile(_key_row(plan, plan.cross_mask), (n, 1))
    causal = masks.causal(n, n)[0, 0].int().numpy()
    return [
        Picture("encoder: audio attends to audio", encoder),
        Picture("decoder: text attends to text", causal, tokens),
        Picture("cross: text attends to audio", cross, tokens),
    ]


def _computed(plan: Plan) -> np.ndarray:
    """The positions that the encoder computes."""
    return np.r_[slice(*plan.positions), N_POSITIONS - plan.sink : N_POSITIONS]


def _key_row(plan: Plan, mask: Tensor | None) -> np.ndarray:
    """How the queries of the first clip see each position, (N_POSITIONS,)."""
    row = np.full(N_POSITIONS, ABSENT)
    row[_computed(plan)] = VISIBLE
    if mask is not None:
        visible = mask[0, 0, 0, : plan.n_computed]
        row[_computed(plan)] = visible > -np.inf if visible.is_floating_point() else visible
    if plan.virtual is not None:
        row[plan.virtual.n_own :] = AVERAGED
    return row


def text(picture: Picture) -> str:
    """Render a picture as text: digits if it is small, else downsampled block characters."""
    cells = picture.cells
    n_queries, n_keys = cells.shape
    if max(cells.shape) <= MAX_DIGITS:
        labels = list(picture.labels) or [""] * n_queries
        width = max(map(len, labels))
        return "\n".join(
            f"  {label:>{width}}  " + " ".join(str(int(c)) for c in row)
            for label, row in zip(labels, cells, strict=True)
        )
    rows = np.linspace(0, n_queries - 1, min(n_queries, N_ROWS)).round().astype(int)
    columns = np.linspace(0, n_keys - 1, min(n_keys, N_COLUMNS)).round().astype(int)
    sampled = cells[np.ix_(rows, columns)]
    return "\n".join("  │" + "".join(CHARACTERS[c] for c in row) + "│" for row in sampled)


def save(pictures: Sequence[Picture], title: str, path: Path) -> None:
    """Save pictures side by side as a PNG."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(14, 5), layout="constrained")
    for axes, picture in zip(figure.subplots(1, len(pictures)), pictures, strict=True):
        style = {"cmap": ListedColormap(COLOURS), "vmin": HIDDEN, "vmax": ABSENT}
        axes.imshow(picture.cells, aspect="auto", interpolation="nearest", **style)
        axes.set(title=picture.title, xlabel="keys", ylabel="queries")
        for axis, size in zip((axes.yaxis, axes.xaxis), picture.cells.shape, strict=True):
            if size == N_POSITIONS:
                seconds = range(0, N_POSITIONS // POSITIONS_PER_SECOND + 1, 5)
                ticks = [s * POSITIONS_PER_SECOND for s in seconds]
                axis.set_ticks(ticks, [f"{s} s" for s in seconds])
            elif size == len(picture.labels) <= MAX_LABELS:
                axis.set_ticks(range(size), picture.labels, fontsize=7)
                axis.set_tick_params(rotation=90 if axis is axes.xaxis else 0)
    legend = [
        Patch(facecolor=colour, edgecolor="#888888", label=meaning)
        for colour, meaning in zip(COLOURS, MEANINGS, strict=True)
    ]
    figure.suptitle(title)
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False)
    with atomic_write(path, binary=True) as file:
        file.write(render_figure(figure))
