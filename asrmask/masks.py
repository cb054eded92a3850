"""Every attention mask is built here, and nowhere else.

A mask is boolean, True = may attend, and broadcasts to (B, H, Q, K): batch, heads, queries, keys.
`None` stands for "everything is visible". `attention.attend` is the one place where a mask meets
scores, as −inf before the softmax.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from asrmask.errors import OptionError


def padding(lengths: Sequence[int] | Tensor, n_keys: int) -> Tensor:
    """Each sample sees its own first `length` keys, and none of the padding behind them.

    lengths: (B,) ints in 1..n_keys
    returns (B, 1, 1, K) bool, for the encoder's self-attention or for cross-attention

    >>> padding([1, 3], 4)[:, 0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 1, 0]]
    """
    lengths = torch.as_tensor(lengths)
    if lengths.numel() == 0 or int(lengths.min()) < 1 or int(lengths.max()) > n_keys:
        raise OptionError(f"lengths must be in 1..{n_keys}, got {lengths.tolist()}")
    visible = torch.arange(n_keys, device=lengths.device) < lengths[:, None]  # (B, K)
    return visible[:, None, None, :]


def cross(audio_lengths: Sequence[int] | Tensor, n_positions: int) -> Tensor:
    """Every text position sees the clip's own audio positions, and none of its padding.

    audio_lengths: (B,) encoder positions of real audio, in 1..n_positions
    returns (B, 1, 1, T) bool
    """
    return padding(audio_lengths, n_positions)


def causal(n_queries: int, n_keys: int, device: torch.device | None = None) -> Tensor:
    """Each query sees itself and what came before; the queries are the LAST n_queries keys.

    returns (1, 1, Q, K) bool

    >>> causal(4, 4)[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    >>> causal(2, 4)[0, 0].int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    if not 1 <= n_queries <= n_keys:
        raise OptionError(f"n_queries must be in 1..{n_keys} (the keys), got {n_queries}")
    visible = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
    return visible.tril(diagonal=n_keys - n_queries)[None, None]


def checked(mask: Tensor) -> Tensor:
    """The same mask, once it is known to be boolean, 4-dimensional and without an empty row.

    A query that may attend to nothing has no defined result: one kernel gives zeros there and
    another NaN.
    """
    if mask.dtype != torch.bool or mask.ndim != 4:
        raise OptionError(
            f"a mask must be bool of shape (B, H, Q, K), got {mask.dtype} of {tuple(mask.shape)}"
        )
    if not bool(mask.any(dim=-1).all()):
        rows = (~mask.any(dim=-1)).nonzero().tolist()
        raise OptionError(
            f"a mask row must have something visible, got nothing in rows (B, H, Q) {rows[:5]}"
        )
    return mask
