"""Plot attention masks, as text or as a PNG.

A picture is an integer matrix, with queries as rows and keys as columns:
0 hidden, 1 visible, 2 visible as part of an average (virtual padding), 3 not computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from asrmask.audio.constants import N_POSITIONS, POSITIONS_PER_SECOND
from asrmask.files import atomic_write
from asrmask.model import masks
from asrmask.model.encoding import Plan
from asrmask.reporting.pages import drawn

HIDDEN, VISIBLE, AVERAGED, ABSENT = range(4)
CHARACTERS = "·█▒ "
MEANINGS = ("hidden", "visible", "from the stored bank", "not computed")
N_SPELLED = 12  # matrices up to this size are printed as digits
N_COLUMNS, N_ROWS = 60, 15  # size of larger ones in characters


@dataclass(frozen=True)
class Picture:
    """One mask of one clip."""

    title: str
    cells: np.ndarray  # (queries, keys)
    labels: Sequence[str] = ()  # names of the queries, if any


def pictures(plan: Plan, tokens: Sequence[str]) -> list[Picture]:
    """Return the masks of the first clip of a plan: encoder, decoder and cross-attention."""
    first, end = plan.positions
    keys = np.full(N_POSITIONS, ABSENT)
    keys[first:end] = _visible(plan.encoder_mask, end - first)
    cross = np.full(N_POSITIONS, ABSENT)
    cross[first:end] = _visible(plan.cross_mask, end - first)
    if plan.virtual is not None:
        keys[plan.virtual.n_own :] = AVERAGED
        cross[plan.virtual.n_own :] = AVERAGED
    encoder = np.tile(keys, (N_POSITIONS, 1))
    encoder[:first] = encoder[end:] = ABSENT  # queries that are not computed
    n = len(tokens)
    causal = masks.causal(n, n)[0, 0].int().numpy()
    return [
        Picture("encoder: audio attends to audio", encoder),
        Picture("decoder: text attends to text", causal, tokens),
        Picture("cross: text attends to audio", np.tile(cross, (n, 1)), tokens),
    ]


def _visible(mask: Tensor | None, n_keys: int) -> np.ndarray:
    """Mask row of the first clip, (n_keys,): 1 visible, 0 hidden."""
    if mask is None:
        return np.ones(n_keys, dtype=int)
    row = mask[0, 0, 0, :n_keys]
    return (row > -np.inf if row.is_floating_point() else row).int().numpy()


def text(picture: Picture) -> str:
    """Render a picture as text: digits if it is small, else downsampled block characters."""
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


def save(several: Sequence[Picture], title: str, path: Path) -> None:
    """Save pictures side by side as a PNG."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colours = ["#e4e4e4", "#1f5fa8", "#8fbbe8", "#ffffff"]
    figure = Figure(figsize=(14, 5), layout="constrained")
    for axes, picture in zip(figure.subplots(1, len(several)), several, strict=True):
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
    with atomic_write(path, binary=True) as file:
        file.write(drawn(figure))
