"""Masks as pictures: who may attend to what, in characters and as a PNG.

A picture is a matrix of small numbers, queries down and keys across:
0 hidden, 1 visible, 2 visible as part of an average that stands for it, 3 not computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from asrmask import masks
from asrmask.encoding import Plan
from asrmask.files import replacing
from asrmask.policy import N_POSITIONS, POSITIONS_PER_SECOND

HIDDEN, VISIBLE, AVERAGED, ABSENT = range(4)
CHARACTERS = "·█▒ "
MEANINGS = ("hidden", "visible", "stood for by an average", "not computed")
N_SPELLED = 12  # a matrix up to that size is printed as ones and zeros
N_COLUMNS, N_ROWS = 60, 15  # of larger ones, in characters


@dataclass(frozen=True)
class Picture:
    """One mask, of one clip."""

    title: str
    cells: np.ndarray  # (queries, keys)
    labels: Sequence[str] = ()  # of the queries, if they have names


def pictures(plan: Plan, tokens: Sequence[str]) -> list[Picture]:
    """The three masks of the first clip of a plan: encoder, decoder and cross."""
    first, end = plan.positions
    keys = np.full(N_POSITIONS, ABSENT)
    keys[first:end] = _visible(plan.encoder_mask, end - first)
    cross = np.full(N_POSITIONS, ABSENT)
    cross[first:end] = _visible(plan.cross_mask, end - first)
    if plan.virtual is not None:
        own = int(plan.virtual.n_own)
        keys[own:] = cross[own:] = AVERAGED
    encoder = np.tile(keys, (N_POSITIONS, 1))
    encoder[:first] = encoder[end:] = ABSENT  # queries that do not exist
    n = len(tokens)
    causal = masks.causal(n, n)[0, 0].int().numpy()
    return [
        Picture("encoder: audio attends to audio", encoder),
        Picture("decoder: text attends to text", causal, tokens),
        Picture("cross: text attends to audio", np.tile(cross, (n, 1)), tokens),
    ]


def _visible(mask: Tensor | None, n_keys: int) -> np.ndarray:
    """(n_keys,) of the first clip: 1 visible, 0 hidden."""
    if mask is None:
        return np.ones(n_keys, dtype=int)
    row = mask[0, 0, 0, :n_keys]
    return (row > -np.inf if row.is_floating_point() else row).int().numpy()


def text(picture: Picture) -> str:
    """The picture in characters: ones and zeros if it is small, else shrunk."""
    cells = picture.cells
    n_queries, n_keys = cells.shape
    if max(cells.shape) <= N_SPELLED:
        width = max((len(label) for label in picture.labels), default=0)
        names = list(picture.labels) or [""] * n_queries
        rows = [
            f"  {name:>{width}}  " + " ".join(str(int(c)) for c in row)
            for name, row in zip(names, cells, strict=True)
        ]
        return "\n".join(rows)
    rows_at = np.linspace(0, n_queries - 1, min(n_queries, N_ROWS)).round().astype(int)
    columns_at = np.linspace(0, n_keys - 1, min(n_keys, N_COLUMNS)).round().astype(int)
    shrunk = cells[np.ix_(rows_at, columns_at)]
    return "\n".join("  │" + "".join(CHARACTERS[c] for c in row) + "│" for row in shrunk)


def save(drawn: Sequence[Picture], title: str, path: Path) -> None:
    """All pictures side by side, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colours = ["#e4e4e4", "#1f5fa8", "#8fbbe8", "#ffffff"]
    figure = Figure(figsize=(14, 5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, picture in zip(figure.subplots(1, len(drawn)), drawn, strict=True):
        n_queries, n_keys = picture.cells.shape
        axes.imshow(
            picture.cells,
            cmap=ListedColormap(colours),
            norm=BoundaryNorm([-0.5, 0.5, 1.5, 2.5, 3.5], 4),
            aspect="auto",
            interpolation="nearest",
        )
        axes.set_title(picture.title)
        if n_keys == N_POSITIONS:
            seconds = range(0, N_POSITIONS // POSITIONS_PER_SECOND + 1, 5)
            axes.set_xticks(
                [s * POSITIONS_PER_SECOND for s in seconds], [f"{s} s" for s in seconds]
            )
        if n_queries == N_POSITIONS:
            axes.set_yticks(
                [s * POSITIONS_PER_SECOND for s in seconds], [f"{s} s" for s in seconds]
            )
        axes.set_xlabel("keys")
        axes.set_ylabel("queries")
        if picture.labels and n_queries <= 40:
            axes.set_yticks(range(n_queries), picture.labels, fontsize=7)
            if n_keys == n_queries:
                axes.set_xticks(range(n_keys), picture.labels, fontsize=7, rotation=90)
    legend = [
        Patch(facecolor=colour, edgecolor="#888888", label=meaning)
        for colour, meaning in zip(colours, MEANINGS, strict=True)
    ]
    figure.suptitle(title)
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False)
    with replacing(path, binary=True) as file:
        figure.savefig(file, format="png", dpi=110)
