"""Attention: `attend`, the only function where a mask meets scores, and the projections around it.

Shapes, here and in every docstring: B batch, H heads, Q and K query and key positions, T audio
positions (50 a second), D width, d = D / H.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

# Called with a place ("decoder.2.cross"), a quantity ("scores", "weights", "values", "outputs", or
# "residual" at the place of a layer) and the tensor itself. inspection/recording.py lists all
# places and shapes. The next layer may overwrite the memory of "values": copy it to keep it.
Recorder = Callable[[str, str, Tensor], None]


class Products(Protocol):
    """The matrix products of attention, for keys and values that are not plain floats."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q kᵀ / √d: (B, H, Q, d), (B, H, K, d) → (B, H, Q, K), float32"""
        ...

    def outputs(self, weights: Tensor, v: Tensor) -> Tensor:
        """(B, H, Q, K), (B, H, K, d) → (B, H, Q, d)"""
        ...


class FloatProducts:
    """The products as openai-whisper computes them, and PyTorch's kernel for all of attention."""

    def fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.25  # on both sides: half precision overflows less
        return ((q * scale) @ (k * scale).transpose(-1, -2)).float()

    def outputs(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights.to(v.dtype) @ v


FLOAT_PRODUCTS = FloatProducts()


class KeyValues(NamedTuple):
    """Keys and values of clips that have equally many of them.

    keys, values: (B, H, K, d)
    mask:         see attend
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    record: Recorder | None = None,
    place: str = "",
    products: Products | None = None,
) -> Tensor:
    """softmax(q kᵀ / √d + mask) v

    q:    (B, H, Q, d)
    k, v: (B, H, K, d)
    mask: bool, True = may attend, broadcastable to (B, H, Q, K); a float bias is added to the
          scores instead; None = everything is visible
    returns (B, H, Q, d)

    A fused kernel computes it, unless something is recorded or the products have none. Then the
    softmax is spelled out. Both ways agree to 1e-6 (to 1e-3 with the 16-bit kernel of int8
    models). `record` gets scores, weights (B, H, Q, K),
    values (B, H, K, d) and outputs (B, H, Q, d).
    """
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    products = products or FLOAT_PRODUCTS
    if record is None and isinstance(products, FloatProducts):
        return products.fused(q, k, v, mask)
    scores = products.scores(q, k)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    weights = scores.softmax(dim=-1)
    outputs = products.outputs(weights, v)
    if record is not None:
        record(place, "scores", scores)
        record(place, "weights", weights)
        record(place, "values", v)
        record(place, "outputs", outputs)
    return outputs


def attend_groups(
    q: Tensor,
    groups: Sequence[KeyValues],
    record: Recorder | None = None,
    place: str = "",
    products: Products | None = None,
) -> Tensor:
    """`attend` for each group of clips: the first rows of q belong to the first group.

    q: (B, H, Q, d) of all groups together; returns the same shape

    Groups instead of padded keys: a sum over more keys, though hidden, adds in another order, and
    a clip's result would depend on the other clips of its batch.
    """
    parts = q.split([len(group.keys) for group in groups])
    outputs = [
        attend(part, *group, record=record, place=place, products=products)
        for part, group in zip(parts, groups, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


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
        """Project what may be attended to: (B, K, D) → keys and values, (B, H, K, d) each."""
        return self.split_heads(self.key(x)), self.split_heads(self.value(x))

    def queries(self, x: Tensor) -> Tensor:
        """Project what attends: (B, Q, D) → (B, H, Q, d)."""
        return self.split_heads(self.query(x))

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of self-attention: (B, N, D) → (B, H, N, d) each."""
        return self.queries(x), *self.keys_values(x)

    def forward(
        self,
        q: Tensor,
        groups: Sequence[KeyValues],
        record: Recorder | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Attend and project the output.

        q:        (B·G, H, Q, d): G texts for each clip in the groups, as beams have
        groups:   B clips together
        residual: (B·G, Q, D), added
        returns (B·G, Q, D)
        """
        n_queries = q.shape[2]
        n_clips = sum(len(group.keys) for group in groups)
        n_texts = len(q) // n_clips
        if n_texts > 1:  # as queries of one attention, so that keys are read once: (B, H, G·Q, d)
            q = q.unflatten(0, (n_clips, n_texts)).transpose(1, 2).flatten(2, 3)
        out = self.heads(q, groups, record)
        if n_texts > 1:
            out = out.unflatten(2, (n_texts, n_queries)).transpose(1, 2).flatten(0, 1)
        return self.project_out(out.transpose(1, 2).flatten(2), residual)

    def project_out(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The output projection of all heads: (B, N, D) → (B, N, D), added to `residual`."""
        out = self.out(x)
        return out if residual is None else out.add_(residual)

    def heads(
        self, q: Tensor, groups: Sequence[KeyValues], record: Recorder | None = None
    ) -> Tensor:
        """The output of every head, before the projection: (B, H, Q, d) → (B, H, Q, d)."""
        return attend_groups(q, groups, record, self.place)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, N, D) → (B, H, N, d)"""
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
