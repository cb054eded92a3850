"""Every attention mask is built here, and nowhere else.

A mask is boolean, True = may attend, and broadcasts to (B, H, Q, K): batch, heads, queries, keys.
`None` stands for "everything is visible". `attention.attend` is the one place where a mask meets
scores, as −inf before the softmax. Where a key stands for several positions (virtual padding) the
mask is a bias instead: log of how many, which is 0 for one and −inf for none.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from asrmask.errors import OptionError

NEXT_TO_NOTHING = -10_000.0  # as a bias: exp of it is 0 in every precision, and all can hold it


def padding(lengths: Sequence[int] | Tensor, n_keys: int, *, last: bool = False) -> Tensor:
    """Each sample sees its own first `length` keys, and none of the padding behind them.

    lengths: (B,) ints in 1..n_keys
    last:    its own keys are the last ones, and the padding lies before them
    returns (B, 1, 1, K) bool, for the encoder's self-attention or for cross-attention

    >>> padding([1, 3], 4)[:, 0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 1, 0]]
    >>> padding([1, 3], 4, last=True)[:, 0, 0].int().tolist()
    [[0, 0, 0, 1], [0, 1, 1, 1]]
    """
    lengths = torch.as_tensor(lengths)
    if lengths.numel() == 0 or int(lengths.min()) < 1 or int(lengths.max()) > n_keys:
        raise OptionError(f"lengths must be in 1..{n_keys}, got {lengths.tolist()}")
    visible = torch.arange(n_keys, device=lengths.device) < lengths[:, None]  # (B, K)
    return (visible.flip(-1) if last else visible)[:, None, None, :]


def cross(audio_lengths: Sequence[int] | Tensor, n_positions: int) -> Tensor:
    """Every text position sees the clip's own audio positions, and none of its padding.

    audio_lengths: (B,) encoder positions of real audio, in 1..n_positions
    returns (B, 1, 1, T) bool
    """
    return padding(audio_lengths, n_positions)


def counted(counts: Tensor) -> Tensor:
    """The bias of keys that stand for several positions each: log of how many, −inf for none.

    A softmax over scores and this bias gives a key the mass of `count` keys like it.

    counts: (B, K), 0 or more
    returns (B, 1, 1, K) float32

    >>> counted(torch.tensor([[1, 0, 2]]))[0, 0, 0].tolist()
    [0.0, -inf, 0.6931471824645996]
    """
    bias = counts.float().clamp(min=1).log_()  # of 0 it would be slow, a millisecond and more
    return bias.masked_fill_(counts == 0, -torch.inf)[:, None, None, :]


def aside(mask: Tensor) -> Tensor:
    """The bias of keys that stand apart from each clip's own, with something visible in every row.

    A softmax over nothing is undefined, so a clip that sees none of them sees them all, by a weight
    that is 0 beside its own.

    >>> aside(counted(torch.tensor([[0, 1], [0, 0]])))[:, 0, 0].tolist()
    [[-inf, 0.0], [-10000.0, -10000.0]]
    """
    is_blind = (mask == -torch.inf).all(dim=-1, keepdim=True)
    return mask.masked_fill(is_blind, NEXT_TO_NOTHING)


def bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as a bias: 0 for what is visible, −inf for what is not."""
    if mask.is_floating_point():
        return mask.to(dtype)
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, -torch.inf)


def joined_keys(mask: Tensor | None, n_keys: int, other: Tensor) -> Tensor:
    """One bias for a clip's own n_keys keys and for others behind them.

    mask:  of its own, (B, 1, 1, n_keys); None: it sees them all
    other: a bias (B, 1, 1, K)
    """
    if mask is None:
        mask = torch.ones(*other.shape[:3], n_keys, dtype=torch.bool, device=other.device)
    return torch.cat([bias(mask, other.dtype), other], dim=-1)


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


def checked(mask: Tensor | None) -> Tensor | None:
    """The same mask, once it is known to be good; None if it hides nothing.

    Good is boolean, or a bias of float numbers and −inf, of four dimensions and without an empty
    row. A query that may attend to nothing has no defined result: one kernel gives zeros there and
    another NaN.
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
    if not bool((mask < torch.inf).all()):  # NaN is not below it either
        raise OptionError("a bias must be of numbers and −inf, got +inf or NaN")
    return mask


def seen(mask: Tensor | None, n_keys: int) -> tuple[slice, Tensor | None]:
    """The stretch of keys outside of which nobody sees any, and the mask of that stretch.

    Leaving the others out changes nothing but the order of additions, and saves their time.

    mask: good (see `checked`), for n_keys keys

    >>> stretch, left = seen(padding([2, 3], 5), 5)
    >>> stretch, left[:, 0, 0].int().tolist()
    (slice(0, 3, None), [[1, 1, 0], [1, 1, 1]])
    """
    if mask is None:
        return slice(0, n_keys), None
    visible = mask if mask.dtype == torch.bool else mask > -torch.inf
    columns = visible.flatten(0, 2).any(dim=0).nonzero()
    stretch = slice(int(columns[0]), int(columns[-1]) + 1)
    return stretch, checked(mask[..., stretch])
