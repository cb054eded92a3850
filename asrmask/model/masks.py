"""Attention masks: all of them are built in this module.

A mask is boolean, True = may attend, and broadcasts to (B, H, Q, K): batch, heads, queries, keys.
None means that everything is visible. `attention.attend` applies it: hidden scores become −inf
before the softmax. With virtual padding, one key can represent several positions. The mask is then
a float bias, the log of the number of positions: 0 for one position, −inf for none.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from asrmask.errors import OptionError


def padding(
    lengths: Sequence[int] | Tensor, n_keys: int, *, last: bool = False, sink: int = 0
) -> Tensor:
    """Mask that shows each sample its first `length` keys and hides the padding after them.

    lengths: (B,) ints in 1..n_keys
    last:    show the last `length` keys instead, and hide the padding before them
    sink:    keys at the other end that every sample is shown too
    returns (B, 1, 1, K) bool, for the encoder's self-attention or for cross-attention

    >>> padding([1, 3], 4)[:, 0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 1, 0]]
    >>> padding([1, 3], 4, last=True)[:, 0, 0].int().tolist()
    [[0, 0, 0, 1], [0, 1, 1, 1]]
    >>> padding([1, 3], 5, sink=1)[:, 0, 0].int().tolist()
    [[1, 0, 0, 0, 1], [1, 1, 1, 0, 1]]
    """
    lengths = torch.as_tensor(lengths)
    if lengths.numel() == 0 or int(lengths.min()) < 1 or int(lengths.max()) > n_keys:
        raise OptionError(f"lengths must be in 1..{n_keys}, got {lengths.tolist()}")
    keys = torch.arange(n_keys, device=lengths.device)
    visible = (keys < lengths[:, None]) | (keys >= n_keys - sink)  # (B, K)
    return (visible.flip(-1) if last else visible)[:, None, None, :]


def counted(counts: Tensor) -> Tensor:
    """Bias for keys that represent several positions: log(count), −inf where the count is 0.

    Added to the scores, it gives a key the softmax weight of `count` identical keys.

    counts: (B, K) positions per key, 0 or more
    returns (B, 1, 1, K) float32

    >>> counted(torch.tensor([[1, 0, 2]]))[0, 0, 0].tolist()
    [0.0, -inf, 0.6931471824645996]
    """
    bias = counts.float().clamp(min=1).log_()  # the log of 0 is slow: over a millisecond
    return bias.masked_fill_(counts == 0, -torch.inf)[:, None, None, :]


def causal(n_queries: int, n_keys: int, device: torch.device | None = None) -> Tensor:
    """Causal mask: a query sees itself and earlier keys. Queries are the LAST n_queries keys.

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


def validated(mask: Tensor | None) -> Tensor | None:
    """Check a mask and return it, or None if it is boolean and hides nothing.

    A valid mask has four dimensions, is boolean or a float bias without +inf and NaN, and shows
    every query at least one key. Attention over no keys is undefined: some kernels return zeros,
    others NaN.
    """
    if mask is None:
        return None
    if mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise OptionError(
            f"a mask must be bool (or a float bias) of shape (B, H, Q, K), "
            f"got {mask.dtype} of {tuple(mask.shape)}"
        )
    visible = mask if mask.dtype == torch.bool else mask > -torch.inf
    if not bool(visible.any(dim=-1).all()):
        rows = (~visible.any(dim=-1)).nonzero().tolist()
        raise OptionError(
            f"a mask row must have something visible, got nothing in rows (B, H, Q) {rows[:5]}"
        )
    if mask.dtype == torch.bool:
        return None if bool(mask.all()) else mask
    if not bool((mask < torch.inf).all()):  # also false for NaN
        raise OptionError("a bias must be of numbers and −inf, got +inf or NaN")
    return mask


def visible_span(mask: Tensor | None, n_keys: int) -> tuple[slice, Tensor | None]:
    """Return the smallest slice of keys that holds every visible key, and the mask cut to it.

    Keys outside of it can be dropped to save time: only the order of additions changes.

    mask: valid (see `validated`), for n_keys keys

    >>> span, left = visible_span(padding([2, 3], 5), 5)
    >>> span, left[:, 0, 0].int().tolist()
    (slice(0, 3, None), [[1, 1, 0], [1, 1, 1]])
    """
    if mask is None:
        return slice(0, n_keys), None
    visible = mask if mask.dtype == torch.bool else mask > -torch.inf
    columns = visible.flatten(0, 2).any(dim=0).nonzero()
    span = slice(int(columns[0]), int(columns[-1]) + 1)
    return span, validated(mask[..., span])
