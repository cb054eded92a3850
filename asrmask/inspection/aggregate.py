"""Reduce values per position to one value per sample, over the selected positions only.

x:    (B, N, …), one value per position
mask: (B, N) bool, True = the position counts. Any pattern is allowed: padding after (a text in a
      batch), padding before (`positions=last`), gaps (pauses left out)

A sample without selected positions gives NaN, never 0; `online.Moments` skips NaN.
"""

import math

import torch
from torch import Tensor

from asrmask.audio.constants import POSITIONS_PER_SECOND
from asrmask.errors import OptionError


def last(x: Tensor, mask: Tensor) -> Tensor:
    """Return each sample's value at its last selected position, (B, …).

    >>> x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> last(x, torch.tensor([[True, True, False], [False, False, False]])).tolist()
    [2.0, nan]
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    index = torch.where(mask, positions, -1).amax(dim=1, keepdim=True)  # (B, 1), −1: none
    return mean(x, mask & (positions == index))


def mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each sample's selected positions, (B, …).

    >>> x = torch.tensor([[1.0, 2.0, 9.0], [4.0, 5.0, 6.0]])
    >>> mean(x, torch.tensor([[True, True, False], [True, False, True]])).tolist()
    [1.5, 5.0]
    """
    if mask.dtype != torch.bool or mask.shape != x.shape[:2] or x.ndim < 2:
        raise OptionError(
            f"a mask must be bool of shape (B, N) for x (B, N, …), got {mask.dtype} of "
            f"{tuple(mask.shape)} for {tuple(x.shape)}"
        )
    wide = mask.view(*mask.shape, *[1] * (x.ndim - 2))
    # replace unselected values instead of multiplying by 0: they may be NaN or infinite
    return torch.where(wide, x, 0).sum(dim=1) / wide.sum(dim=1)  # 0 / 0 is NaN


def positions(start_s: float, end_s: float, n: int) -> tuple[int, int]:
    """Convert a time span to encoder positions (first, end), at least one position long.

    n: number of positions; the span is clipped to them

    >>> positions(0.5, 0.61, 1500), positions(2.0, 2.0, 1500), positions(29.99, 31.0, 1500)
    ((25, 31), (100, 101), (1499, 1500))
    """
    first = min(max(math.floor(round(start_s * POSITIONS_PER_SECOND, 6)), 0), n - 1)
    end = min(math.ceil(round(end_s * POSITIONS_PER_SECOND, 6)), n)
    return first, max(end, first + 1)
