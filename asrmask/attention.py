"""Attention: `attend`, the module that serves self- and cross-attention, and the decoder's cache.

Shapes, here and in every docstring: B batch, H heads, Q and K query and key positions, T audio
positions (50 a second), D width, d = D / H.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from asrmask import masks
from asrmask.errors import OptionError

BLOCK = 4  # queries: with a multiple of it, no row's sums depend on how many there are

# Called with a place ("decoder.2.cross"), a quantity ("scores", "weights", "values", "outputs", or
# "residual" at the place of a layer) and the tensor itself. All places and their shapes are listed
# in instruments/recording.py. "values" may be memory that the next layer writes to: copy to keep.
Recorder = Callable[[str, str, Tensor], None]

Keys = Tensor | Sequence[Tensor]  # or values: (B, H, K, d), or parts of a batch with other Ks


@dataclass(frozen=True)
class Shared:
    """Keys and values that all clips of a batch attend to, beside those of their own.

    keys, values: (1, H, K, d)
    mask:         (B, 1, 1, K), a bias that leaves each clip something to see (masks.aside)
    """

    keys: Tensor
    values: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Run:
    """Clips with equally many keys, whose keys and values lie behind each other in a common space.

    A space is (N, H, d), with room for N keys; a clip has a stretch of it, head after head.
    """

    first: int  # where the first clip's stretch begins
    n_clips: int
    n_keys: int  # of each

    @property
    def end(self) -> int:
        return self.first + self.n_clips * self.n_keys

    def of(self, space: Tensor) -> Tensor:
        """Its clips in a space, (clips, H, n_keys, d)."""
        return space[self.first : self.end].view(
            self.n_clips, space.shape[1], self.n_keys, space.shape[2]
        )

    def clips(self) -> "list[Run]":
        """Each clip by itself."""
        return [Run(first, 1, self.n_keys) for first in range(self.first, self.end, self.n_keys)]


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same clips in as few runs as may be.

    >>> joined([Run(0, 1, 64), Run(64, 1, 64), Run(192, 1, 64)])
    (Run(first=0, n_clips=2, n_keys=64), Run(first=192, n_clips=1, n_keys=64))
    """
    found: list[Run] = []
    for run in runs:
        if found and found[-1].end == run.first and found[-1].n_keys == run.n_keys:
            found[-1] = Run(found[-1].first, found[-1].n_clips + run.n_clips, run.n_keys)
        else:
            found.append(run)
    return tuple(found)


def attend(
    q: Tensor,
    k: Keys,
    v: Keys,
    mask: Tensor | None = None,
    *,
    shared: Shared | None = None,
    record: Recorder | None = None,
    place: str = "",
) -> Tensor:
    """softmax(q kᵀ / √d + mask) v: the only place where a mask meets scores (with the parts below).

    q:      (B, H, Q, d)
    k, v:   (B, H, K, d); on a CPU also several of those, of clips with other numbers of keys
    mask:   bool, True = may attend, broadcastable to (B, H, Q, K); a float bias is added to the
            scores instead; None = everything is visible
    shared: more keys and values, as if they stood behind each clip's own
    returns (B, H, Q, d)

    With `record` the softmax is spelled out, and scores, weights (B, H, Q, K), values (B, H, K, d)
    and outputs (B, H, Q, d) are handed over; both ways agree to 1e-6.
    """
    is_whole = isinstance(k, Tensor) and isinstance(v, Tensor)
    if record is None and q.device.type == "cpu" and not (shared is None and is_whole):
        own = in_own(q, k, v, mask)
        return own[0] if shared is None else together(own, in_shared(q, shared))
    if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise OptionError("keys in parts are for a CPU and without a record: take one clip")
    if shared is not None:
        mask = masks.joined_keys(mask, k.shape[2], shared.mask)
        k, v = (
            torch.cat([own, other.expand(len(own), -1, -1, -1)], dim=2)
            for own, other in ((k, shared.keys), (v, shared.values))
        )
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    if record is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scale = q.shape[-1] ** -0.25  # on both sides, as upstream: half precision overflows less
    scores = ((q * scale) @ (k * scale).transpose(-1, -2)).float()
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if hidden else scores + mask
    weights = scores.softmax(dim=-1)
    outputs = weights.to(v.dtype) @ v
    record(place, "scores", scores)
    record(place, "weights", weights)
    record(place, "values", v)
    record(place, "outputs", outputs)
    return outputs


# What queries found in some of the keys, (B, H, Q, d), and log Σ exp(scores) there, (B, H, Q)
Part = tuple[Tensor, Tensor]


def in_own(q: Tensor, k: Keys, v: Keys, mask: Tensor | None = None) -> Part:
    """What queries find in the keys of their own clip: as attend, on a CPU.

    Clips with other numbers of keys are computed apart, so that nothing depends on the other clips
    of a batch: a sum over more keys, though hidden, is made in another order.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if isinstance(k, Tensor):
        return flash(q, k, v, attn_mask=None if mask is None else masks.bias(mask, q.dtype))
    if mask is not None:
        raise OptionError("keys in parts are all visible, got a mask: leave hidden ones out")
    several = zip(q.split([len(some) for some in k]), k, v, strict=True)
    parts = [flash(*some) for some in several]
    if len(parts) == 1:
        return parts[0]
    found, sums = (torch.cat(several) for several in zip(*parts, strict=True))
    return found, sums


def in_shared(q: Tensor, shared: Shared) -> Part:
    """What queries find in the keys that all clips share.

    The queries of all clips are as those of one, so that the keys are read once and not copied.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    bias = _repeated(shared.mask, q.shape[2])
    parts = flash(_one_clip(q), shared.keys, shared.values, attn_mask=bias.to(q.dtype))
    found, sums = (
        x[0, :, : len(q) * q.shape[2]].unflatten(1, (len(q), -1)).transpose(0, 1) for x in parts
    )
    return found, sums


def together(own: Part, other: Part) -> Tensor:
    """What the same queries find in the keys of both: each weighed by its sum."""
    # for each number, not each row: so that no row's weight depends on where it stands in a batch
    weight = (other[1] - own[1])[..., None].expand_as(own[0]).sigmoid()
    return own[0].lerp(other[0], weight.to(own[0].dtype))


@lru_cache(maxsize=1)  # it is that of all layers, and of many steps
def _repeated(mask: Tensor, n_queries: int) -> Tensor:
    """A bias (B, 1, 1, K) for that many queries of each clip, as those of one clip."""
    return _one_clip(mask.expand(-1, -1, n_queries, -1))


def _one_clip(x: Tensor) -> Tensor:
    """(B, H, Q, n) → (1, H, B·Q, n), with zeros up to a whole number of blocks."""
    rows = x.transpose(0, 1).flatten(1, 2)[None]
    return pad(rows, (0, 0, 0, -rows.shape[2] % BLOCK))


class MultiHeadAttention(nn.Module):
    """Projections around `attend`, with the parameter names of openai-whisper."""

    def __init__(self, n_state: int, n_head: int, place: str):
        super().__init__()
        self.n_head = n_head
        self.place = place
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What others may attend to: (B, K, D) → keys and values, (B, H, K, d) each."""
        return self._split(self.key(x)), self._split(self.value(x))

    def queries(self, x: Tensor) -> Tensor:
        """What attends: (B, Q, D) → (B, H, Q, d)."""
        return self._split(self.query(x))

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of self-attention: (B, N, D) → (B, H, N, d) each."""
        return self.queries(x), *self.keys_values(x)

    def forward(
        self,
        q: Tensor,
        keys: Keys,
        values: Keys,
        mask: Tensor | None = None,
        record: Recorder | None = None,
        shared: Shared | None = None,
    ) -> Tensor:
        """q: (B, H, Q, d); keys, values: (B, H, K, d); returns (B, Q, D). The others: see attend.

        q may have more rows than keys and values: G in a row for each of theirs, as the beams of
        one clip are. They become queries of one attention, so that the keys are read once.
        """
        n_queries = q.shape[2]
        n_clips = len(keys) if isinstance(keys, Tensor) else sum(map(len, keys))
        n_texts = len(q) // n_clips
        if n_texts > 1:
            q = q.unflatten(0, (n_clips, n_texts)).transpose(1, 2).flatten(2, 3)  # (B, H, G·Q, d)
            if mask is not None and mask.shape[2] != 1:
                mask = mask.repeat(1, 1, n_texts, 1)
        out = self.found(q, keys, values, mask, record, shared)
        if n_texts > 1:
            out = out.unflatten(2, (-1, n_queries)).transpose(1, 2).flatten(0, 1)
        return self.merged(out)

    def found(
        self,
        q: Tensor,
        keys: Keys,
        values: Keys,
        mask: Tensor | None,
        record: Recorder | None,
        shared: Shared | None,
    ) -> Tensor:
        """What the heads find, (B, H, Q, d)."""
        return attend(q, keys, values, mask, shared=shared, record=record, place=self.place)

    def merged(self, out: Tensor) -> Tensor:
        """What the heads found, projected: (B, H, Q, d) → (B, Q, D)"""
        return self.out(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """(B, N, D) → (B, H, N, d)"""
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)


@dataclass(frozen=True)
class KVCache:
    """Keys and values of the text decoded so far: a value that each decoder call returns anew.

    keys, values: one tensor a layer, (B, H, capacity, d); the first `length` positions are filled.
    Calls share the memory behind it, so only the newest value is good.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    length: int = 0

    @classmethod
    def empty(cls, n_layer: int, shape: tuple[int, int, int, int], like: Tensor) -> "KVCache":
        """Room for shape = (B, H, capacity, d) in each of n_layer layers."""
        keys = tuple(like.new_empty(shape) for _ in range(n_layer))
        values = tuple(like.new_empty(shape) for _ in range(n_layer))
        return cls(keys, values)

    @property
    def n_rows(self) -> int:
        return self.keys[0].shape[0]

    def with_room(self, n: int) -> "KVCache":
        """The cache with room for n more positions: itself, or one of twice the capacity."""
        capacity = self.keys[0].shape[2]
        if self.length + n <= capacity:
            return self

        def grown(buffer: Tensor) -> Tensor:
            n_rows, n_head, _, width = buffer.shape
            larger = buffer.new_empty(n_rows, n_head, max(2 * capacity, self.length + n), width)
            larger[:, :, : self.length] = buffer[:, :, : self.length]
            return larger

        return KVCache(tuple(map(grown, self.keys)), tuple(map(grown, self.values)), self.length)

    def put(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Everything that `layer` may attend to, once (B, H, Q, d) more positions are in."""
        end = self.length + keys.shape[2]
        self.keys[layer][:, :, self.length : end] = keys
        self.values[layer][:, :, self.length : end] = values
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def advanced(self, n: int) -> "KVCache":
        """The cache after every layer has put n positions."""
        return replace(self, length=self.length + n)

    def select(self, rows: Tensor) -> "KVCache":
        """The cache whose row i is this one's rows[i]: beams moved, or finished clips left out."""

        def moved(buffer: Tensor) -> Tensor:
            filled = buffer[:, :, : self.length].index_select(0, rows)
            if len(rows) > len(buffer):
                buffer = buffer.new_empty(len(rows), *buffer.shape[1:])
            buffer[: len(rows), :, : self.length] = filled
            return buffer[: len(rows)]

        return KVCache(tuple(map(moved, self.keys)), tuple(map(moved, self.values)), self.length)
