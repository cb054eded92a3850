"""Int8: weights and activations as whole numbers, for models on a CPU.

Each weight row and each activation row has a scale of its own, as in CTranslate2. The product of
whole numbers is exact, so what a row gives does not depend on the rows beside it: a batch says what
its clips say alone. Attention, norms and convolutions stay in float32; cross-attention is to the
encoder's features, without keys and values of them (Int8Cross).

A row's scale is its largest number, so a few channels that are always large cost all the others
their precision. *Turning* spreads them: an orthonormal R with x R · (W R)ᵀ = x Wᵀ changes no
product, but after it the channels are alike. It costs nothing where R goes into the weights:

- The stream that layers add to is kept as x R. Norms do not mind if R leaves the vector of ones in
  place, and their own weights go into the layers behind them.
- The values of a head are turned by its value projection, and back by the output projection;
  queries and keys alike, where they are quantised.
- Behind GELU, 16 channels at a time are turned when they are quantised: one small product.

So the features and the text's vectors of an int8 model are those of the float model, turned.
"""

import math
from functools import cache
from typing import cast

import torch
from torch import Tensor, nn

from asrmask.attention import (
    Keys,
    MultiHeadAttention,
    Recorder,
    Shared,
    in_own,
    in_shared,
    together,
)
from asrmask.model import Block, FeedForward, Whisper

MOST = 127  # the largest number of an activation
TINY = 1e-30  # the step of a row of zeros
N_MIXED = 16  # channels behind GELU that are turned together
MOST_ROWS = 384  # that are multiplied at a time: more take memory, and no less time

Norm = tuple[Tensor, Tensor]  # the weight and bias of a layer norm


@cache
def most_weight() -> int:
    """The largest number of a weight.

    Processors without VNNI add pairs of products in 16 bits: there weights have one bit less, so
    that no sum overflows. Which kind this is, a product shows.
    """
    x = torch.full((32, 64), MOST, dtype=torch.int8)
    got = torch._int_mm(x, torch.full((64, 64), 127, dtype=torch.int8))
    return 127 if bool((got == 64 * MOST * 127).all()) else 64


def orthonormal(n: int) -> Tensor:
    """Some rotation (n, n) that mixes all channels, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(n, n, generator=generator))[0]


def evenly(n: int) -> Tensor:
    """The rotation (n, n) that gives every channel as much of every other: n is a power of two.

    >>> (evenly(4) * 2).tolist()[1]
    [1.0, -1.0, 1.0, -1.0]
    """
    two, found = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.ones(1, 1)
    while len(found) < n:
        found = torch.kron(two, found)
    return found / math.sqrt(n)


def ones_kept(n: int) -> Tensor:
    """A rotation (n, n) of the kind that a norm does not mind: the vector of ones is its own."""
    basis = torch.linalg.qr(torch.cat([torch.ones(n, 1), torch.eye(n)[:, 1:]], dim=1))[0]
    return basis @ torch.block_diag(torch.ones(1, 1), orthonormal(n - 1)) @ basis.T


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8: (N, K), with a scale a row.

    turn: (K, K), by which the weight is turned; its inputs are expected to be so too
    mix:  (n, n), by which each n channels in a row are turned, of the weight and of the inputs
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor
    mix: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        turn: Tensor | None = None,
        mix: Tensor | None = None,
    ):
        super().__init__()
        weight = weight.detach()
        scale = torch.empty(len(weight))
        numbers = torch.empty(weight.shape, dtype=torch.int8)
        for part in torch.arange(len(weight)).split(4096):  # a vocabulary at once takes memory
            rows = weight[part].float()
            rows = rows if turn is None else rows @ turn
            rows = rows if mix is None else mixed(rows, mix)
            numbers[part], step = whole(rows, most_weight())
            scale[part] = step[:, 0]
        self.register_buffer("weight", numbers)
        self.register_buffer("scale", scale)
        self.register_buffer(
            "bias", torch.zeros_like(scale) if bias is None else bias.detach().float()
        )
        self.register_buffer("mix", mix)

    @property
    def floats(self) -> Tensor:
        """Its weight as the numbers that it stands for, (N, K)."""
        return self.weight * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) → (…, N)"""
        rows = x.flatten(0, -2)
        if len(rows) <= MOST_ROWS:
            out = self._product(rows)
        else:
            out = rows.new_empty(len(rows), len(self.bias))
            for some, into in zip(split(rows), split(out), strict=True):
                self._product(some, into)
        return out.unflatten(0, x.shape[:-1])

    def _product(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """(rows, K) → (rows, N)"""
        numbers, step = whole(rows if self.mix is None else mixed(rows, self.mix))
        product = torch._int_mm(numbers, self.weight.t())
        # converted at once: arithmetic of both kinds would make a copy of its own
        out = product.float() if out is None else out.copy_(product)
        return torch.addcmul(self.bias, out.mul_(step), self.scale, out=out)


def in_steps(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """x (…, K) counted in steps, up to `most` in each row, and the steps themselves, (…, 1)."""
    step = x.abs().amax(dim=-1, keepdim=True).mul_(1 / most).clamp_(min=TINY)
    return x * step.reciprocal(), step


def whole(x: Tensor, most: int = MOST) -> tuple[Tensor, Tensor]:
    """x (…, K) in whole steps, and the steps, (…, 1)."""
    counts, step = in_steps(x, most)
    return counts.round_().to(torch.int8), step


def split(rows: Tensor) -> tuple[Tensor, ...]:
    """(N, K) → as few parts as may be, alike in size."""
    return rows.tensor_split(-(-len(rows) // MOST_ROWS))


def mixed(rows: Tensor, mix: Tensor) -> Tensor:
    """(N, K) → (N, K), every n channels in a row turned by mix (n, n)."""
    return (rows.reshape(-1, len(mix)) @ mix).view_as(rows)


class Int8FeedForward(FeedForward):
    """The same of int8 layers, some rows at a time."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        out = torch.empty_like(rows)
        for some, into in zip(split(rows), split(out), strict=True):
            into.copy_(super().forward(some))
        return out.view_as(x)


class Int8Attention(MultiHeadAttention):
    """Self-attention whose query, key and value projections are one int8 product."""

    def __init__(self, attn: MultiHeadAttention, turn: Tensor, norm: Norm):
        """norm: what stands before it"""
        nn.Module.__init__(self)
        self.n_head = attn.n_head
        self.place = attn.place
        head = torch.block_diag(*[orthonormal(len(turn) // self.n_head)] * self.n_head)
        parts = [
            behind(norm, attn.query.weight, attn.query.bias),
            behind(norm, attn.key.weight, None),
            behind(norm, head.T @ attn.value.weight, attn.value.bias @ head),
        ]
        weights, biases = (torch.cat(several) for several in zip(*parts, strict=True))
        self.fused = Int8Linear(weights, biases, turn)
        out = Int8Linear(turn.T @ attn.out.weight @ head, attn.out.bias @ turn)
        self.out = out  # type: ignore[assignment]

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.fused(x).chunk(3, dim=-1)
        return self._split(q), self._split(k), self._split(v)


def digits(x: Tensor, most: int = MOST) -> tuple[Tensor, Tensor]:
    """x (…, N, K) in two digits of int8, (…, 2N, K), and the steps of the first ones, (…, N, 1).

    A second digit counts parts of such a step, which has 2 · most of them.
    """
    counts, step = in_steps(x, most)
    first = counts.round()
    second = counts.sub_(first).mul_(2 * most).round_()
    return torch.cat([first, second], dim=-2).to(torch.int8), step


class Int8Heads(nn.Module):
    """A linear layer for each head: weights (H, N, K), with a scale a row, in two digits.

    As exact as 16 bits: it projects what is an average over time already, where errors of single
    moments do not cancel any more. The numbers are few, so it costs little.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        numbers, step = digits(weight.detach(), most_weight())
        self.register_buffer("weight", numbers)
        self.register_buffer("scale", step.transpose(1, 2))
        self.register_buffer("bias", torch.zeros_like(step[..., 0]) if bias is None else bias)

    @property
    def floats(self) -> Tensor:
        """Its weights as the numbers that they stand for, (H, N, K)."""
        first, second = self.weight.chunk(2, dim=1)
        return (first + second / (2 * most_weight())) * self.scale.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, Q, K) → (B, H, Q, N)"""
        numbers, step = digits(x.transpose(0, 1).flatten(1, 2))
        several = zip(numbers, self.weight.transpose(1, 2), strict=True)
        out = torch.stack([torch._int_mm(some, weight) for some, weight in several]).float()
        first, second = out.chunk(2, dim=1)  # of the inputs
        first, second = first.add_(second, alpha=0.5 / MOST).chunk(2, dim=2)  # of the weights
        found = first.add_(second, alpha=0.5 / most_weight()).mul_(step)
        found = torch.addcmul(self.bias[:, None], found, self.scale)
        return found.unflatten(1, (len(x), -1)).transpose(0, 1)


class Int8Cross(MultiHeadAttention):
    """Cross-attention to the encoder's features as they are: keys and values are never made.

    For the projections K and V of a head's keys and values, a score is q · (K f) = (Kᵀ q) · f, and
    what is seen Σ w (V f) = V (Σ w f). So the few queries are projected instead of all features, in
    every layer: the encoder ends earlier, and a clip takes the room of its features, an eighth of
    what keys and values take in four layers. To `attend`, every head is a query of one wide head.
    """

    def __init__(self, attn: MultiHeadAttention, turn: Tensor, norm: Norm, source: Norm):
        """norm, source: what stands before the queries, and before the features"""
        nn.Module.__init__(self)
        self.n_head = attn.n_head
        self.place = attn.place
        heads = self.n_head, len(turn) // self.n_head  # (H, d)
        head = torch.block_diag(*[orthonormal(heads[1])] * self.n_head)
        weight, bias = behind(norm, head.T @ attn.query.weight, attn.query.bias @ head)
        self.query = Int8Linear(weight, bias, turn)  # type: ignore[assignment]
        # the norm's bias adds the same to all scores of a query
        keys, _ = behind(source, head.T @ attn.key.weight, None)
        values, bias = behind(source, head.T @ attn.value.weight, attn.value.bias @ head)
        # attend divides by the root of a wide query's length, which has H times as many numbers
        keys = (keys @ turn).view(*heads, -1).transpose(1, 2) * math.sqrt(self.n_head)
        self.inward = Int8Heads(keys)
        self.outward = Int8Heads((values @ turn).view(*heads, -1), bias.view(heads))
        out = Int8Linear(turn.T @ attn.out.weight @ head, attn.out.bias @ turn)
        self.out = out  # type: ignore[assignment]

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As they would be, from the same weights."""
        wide = x[:, None]
        keys = wide @ (self.inward.floats / math.sqrt(self.n_head))
        values = wide @ self.outward.floats.transpose(1, 2) + self.outward.bias[:, None]
        return keys, values

    def found(
        self,
        q: Tensor,
        keys: Keys,
        values: Keys,
        mask: Tensor | None,
        record: Recorder | None,
        shared: Shared | None,
    ) -> Tensor:
        """keys, values: features, as of one wide head, (B, 1, K, D)"""
        if record is not None:  # of each head's own
            if isinstance(keys, Tensor):
                keys, values = self.keys_values(keys[:, 0])
            return super().found(q, keys, values, mask, record, shared)
        wide = self.inward(q).flatten(1, 2)[:, None]  # (B, 1, H·Q, D)
        seen, sums = (
            x[:, 0].unflatten(1, (self.n_head, -1)) for x in in_own(wide, keys, values, mask)
        )
        own = self.outward(seen)
        return own if shared is None else together((own, sums), in_shared(q, shared))


class Int8Vocabulary(nn.Module):
    """The table of tokens, in and out: tokens to turned vectors, and those to logits."""

    weight: Tensor
    bias: Tensor

    def __init__(self, table: Tensor, turn: Tensor, norm: Norm):
        super().__init__()
        self.linear = Int8Linear(table, None, turn)
        # the norm's weights between: they cannot go into a table that is read from both sides
        self.register_buffer("weight", turn.T @ norm[0].diag() @ turn)
        self.register_buffer("bias", norm[1] @ turn)

    def forward(self, tokens: Tensor) -> Tensor:
        """(…) → (…, D)"""
        return self.linear.weight[tokens] * self.linear.scale[tokens][..., None]

    def reader(self, token: int) -> tuple[Tensor, Tensor]:
        """Two vectors e and s (D,) by which a token's logit is e · (x + s)."""
        return self(torch.tensor(token)) @ self.weight, torch.linalg.solve(self.weight, self.bias)

    def logits(self, x: Tensor) -> Tensor:
        """(…, D) → (…, n_vocab)"""
        rows = x.flatten(0, -2)[:, None]
        # a product for each row: in one for all, sums would depend on how many there are
        weights = self.weight.t().expand(len(rows), -1, -1)
        scaled = torch.baddbmm(self.bias.expand_as(rows), rows, weights)
        return self.linear(scaled.view_as(x))


def behind(norm: Norm, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A layer's weight and bias, with those of the norm before it."""
    shift = weight @ norm[1]
    return weight * norm[0], shift if bias is None else shift + bias


def bared(norm: nn.LayerNorm) -> Norm:
    """A norm's weights, which it loses."""
    kept = norm.weight.detach().float().clone(), norm.bias.detach().float().clone()
    norm.weight.fill_(1.0)
    norm.bias.zero_()
    return kept


@torch.no_grad()
def quantise(model: Whisper) -> None:
    """Bring a model on the CPU to int8, for good: its float weights are let go."""
    encoder, decoder = model.encoder, model.decoder
    turn = ones_kept(model.dims.n_audio_state)
    source = bared(encoder.ln_post)
    for block in (*encoder.blocks, *decoder.blocks):
        block.float()
        _quantise_block(block, turn, source)
    enter = nn.Linear(len(turn), len(turn), bias=False).requires_grad_(False)
    enter.weight.copy_(turn.T)
    encoder.enter = enter
    encoder.positional_embedding = encoder.positional_embedding.float() @ turn
    decoder.positional_embedding.data = decoder.positional_embedding.float() @ turn
    table = decoder.token_embedding.weight
    decoder.token_embedding = Int8Vocabulary(table, turn, bared(decoder.ln))
    decoder.attends_to_features = True
    model.float()


def _quantise_block(block: Block, turn: Tensor, source: Norm) -> None:
    block.attn = Int8Attention(block.attn, turn, bared(block.attn_ln))
    if hasattr(block, "cross_attn"):
        norm = bared(block.cross_attn_ln)
        block.cross_attn = Int8Cross(block.cross_attn, turn, norm, source)
    up, down = cast("nn.Linear", block.mlp[0]), cast("nn.Linear", block.mlp[2])
    mix = evenly(math.gcd(down.weight.shape[1], N_MIXED))
    block.mlp = Int8FeedForward(
        Int8Linear(*behind(bared(block.mlp_ln), up.weight, up.bias), turn),
        nn.GELU(),
        Int8Linear(turn.T @ down.weight, down.bias @ turn, mix=mix),
    )
