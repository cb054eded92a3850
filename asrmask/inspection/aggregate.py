"""Reduce values per position to one value per sample, over the selected positions only.

x:    (B, N, …), one value per position
mask: (B, N) bool, True = the position counts. Any pattern is allowed: padding after (a text in a
      batch), padding before (`positions=last`), gaps (pauses left out)

A sample without selected positions gives NaN, never 0; `online.Moments` skips NaN. A missing mask
is an error: use `everything` to select all positions.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from asrmask.audio.constants import POSITIONS_PER_SECOND
from asrmask.errors import OptionError


def everything(x: Tensor) -> Tensor:
    """Return the mask that selects every position, (B, N)."""
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


def last(x: Tensor, mask: Tensor) -> Tensor:
    """Return each sample's value at its last selected position, (B, …).

    >>> x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> last(x, torch.tensor([[True, True, False], [False, False, False]])).tolist()
    [2.0, nan]
    """
    x, mask = _checked(x, mask)
    places = torch.arange(mask.shape[1], device=mask.device)
    index = torch.where(mask, places, -1).amax(dim=1)  # (B,), −1: none
    rows = torch.arange(len(x), device=x.device)
    return _or_nan(x[rows, index.clamp(min=0)], index >= 0)


def mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each sample's selected positions, (B, …).

    >>> x = torch.tensor([[1.0, 2.0, 9.0], [4.0, 5.0, 6.0]])
    >>> mean(x, torch.tensor([[True, True, False], [True, False, True]])).tolist()
    [1.5, 5.0]
    """
    x, mask = _checked(x, mask)
    wide = mask.view(*mask.shape, *[1] * (x.ndim - 2))
    # replace unselected values instead of multiplying by 0: they may be NaN or infinite
    sums = torch.where(wide, x, 0).sum(dim=1)
    counts = mask.sum(dim=1)
    divided = sums / counts.clamp(min=1).view(-1, *[1] * (x.ndim - 2))
    return _or_nan(divided, counts > 0)


def spans(x: Tensor, mask: Tensor, bounds: Sequence[Sequence[tuple[int, int]]]) -> list[Tensor]:
    """Return for each sample the means over its spans (words or segments), (spans, …).

    bounds: for each sample the (first, end) positions of its spans; means are over selected ones
    """
    x, mask = _checked(x, mask)
    if len(bounds) != len(x):
        raise OptionError(f"bounds must be one list a sample, {len(x)}, got {len(bounds)}")
    n = x.shape[1]
    found = []
    for row, counts, pairs in zip(x, mask, bounds, strict=True):
        for first, end in pairs:
            if not 0 <= first < end <= n:
                raise OptionError(f"a span must lie in 0..{n}, got {first}..{end}")
        means = [mean(row[None, a:b], counts[None, a:b])[0] for a, b in pairs]
        found.append(torch.stack(means) if means else x.new_empty(0, *x.shape[2:]))
    return found


def positions(start_s: float, end_s: float, n: int) -> tuple[int, int]:
    """Convert a time span to encoder positions (first, end), at least one position long.

    n: number of positions; the span is clipped to them

    >>> positions(0.5, 0.61, 1500), positions(2.0, 2.0, 1500), positions(29.99, 31.0, 1500)
    ((25, 31), (100, 101), (1499, 1500))
    """
    first = min(max(math.floor(round(start_s * POSITIONS_PER_SECOND, 6)), 0), n - 1)
    end = min(math.ceil(round(end_s * POSITIONS_PER_SECOND, 6)), n)
    return first, max(end, first + 1)


def _or_nan(values: Tensor, has: Tensor) -> Tensor:
    """Replace the values (B, …) of samples without data by NaN."""
    return torch.where(has.view(-1, *[1] * (values.ndim - 1)), values, torch.nan)


def _checked(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if mask is None:
        raise OptionError(
            "a mask must say which positions count, got none: aggregate.everything(x) is the mask "
            "under which all do"
        )
    if mask.dtype != torch.bool or mask.shape != x.shape[:2] or x.ndim < 2:
        raise OptionError(
            f"a mask must be bool of shape (B, N) for x (B, N, …), got {mask.dtype} of "
            f"{tuple(mask.shape)} for {tuple(x.shape)}"
        )
    return x if x.is_floating_point() else x.double(), mask
