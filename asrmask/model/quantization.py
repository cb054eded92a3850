"""Int8 weights and activations, for models on a CPU.

Each weight row and each activation row has its own scale, as in CTranslate2. Integer products are
exact, so a row's result does not depend on the rows beside it: a batch gives what its clips give
alone. Attention, layer norms and convolutions stay in float32. Cross-attention attends to the
encoder's features directly (Int8CrossAttention).

A row's scale is set by its largest number, so a few channels that are always large cost all others
their precision. A *rotation* spreads them: for an orthonormal R, (x R) (W R)ᵀ = x Wᵀ, and after it
all channels are alike in size. It costs nothing where R can be multiplied into the weights:

- The residual stream is kept as x R. Layer norms give the same result if R maps the vector of ones
  to itself; their weights are folded into the linear layers that follow.
- A head's values are rotated by the value projection, and back by the output projection. The same
  for queries and keys, where they are quantized.
- After GELU, blocks of 16 channels are rotated when they are quantized: one small product.

So the features and the residual stream of an int8 model are those of the float model, rotated.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import cast

import torch
from torch import Tensor, nn

from asrmask.model.attention import KeyValues, MultiHeadAttention, Recorder, attend_groups
from asrmask.model.blocks import Block, FeedForward
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.decoder import TextDecoder
from asrmask.model.encoder import AudioEncoder
from asrmask.model.whisper import Whisper

MAX_ACTIVATION = 127
MIN_SCALE = 1e-30  # of a row of zeros
BLOCK_CHANNELS = 16  # rotated together after GELU
MAX_FEATURE = 4.5  # rotated features from a layer norm: one in a thousand has a larger channel
MAX_ROWS = 384  # multiplied at a time: more rows take more memory and no less time

Affine = tuple[Tensor, Tensor]  # the weight and bias of a layer norm


@cache
def max_weight() -> int:
    """The largest weight as an integer: 127, or 64 on processors without VNNI.

    Those add pairs of products in 16 bits, which would overflow. A product shows which kind it is.
    """
    x = torch.full((32, 64), MAX_ACTIVATION, dtype=torch.int8)
    got = torch._int_mm(x, torch.full((64, 64), 127, dtype=torch.int8))
    return 127 if bool((got == 64 * MAX_ACTIVATION * 127).all()) else 64


def random_rotation(n: int) -> Tensor:
    """An orthonormal matrix (n, n) that mixes all channels; the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(n, n, generator=generator))[0]


def hadamard(n: int) -> Tensor:
    """The normalised Hadamard matrix (n, n), for n a power of two.

    >>> (hadamard(4) * 2).tolist()[1]
    [1.0, -1.0, 1.0, -1.0]
    """
    two, matrix = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.kron(two, matrix)
    return matrix / math.sqrt(n)


def mean_preserving_rotation(n: int) -> Tensor:
    """A rotation (n, n) that maps the vector of ones to itself, so that layer norms still work."""
    basis = torch.linalg.qr(torch.cat([torch.ones(n, 1), torch.eye(n)[:, 1:]], dim=1))[0]
    return basis @ torch.block_diag(torch.ones(1, 1), random_rotation(n - 1)) @ basis.T


def scale_rows(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """x (…, K) divided by each row's scale, so that it reaches ±largest; and the scales (…, 1)."""
    scale = x.abs().amax(dim=-1, keepdim=True).mul_(1 / largest).clamp_(min=MIN_SCALE)
    return x * scale.reciprocal(), scale


def quantize_rows(x: Tensor, largest: int = MAX_ACTIVATION) -> tuple[Tensor, Tensor]:
    """x (…, K) as int8, and each row's scale (…, 1)."""
    scaled, scale = scale_rows(x, largest)
    return scaled.round_().to(torch.int8), scale


def two_digit_int8(x: Tensor, largest: int = MAX_ACTIVATION) -> tuple[Tensor, Tensor]:
    """x (…, N, K) as two int8 digits, (…, 2N, K), and the scale of the first ones, (…, N, 1).

    The second digit counts in units of 1 / (2 · largest) of the first one's scale.
    """
    scaled, scale = scale_rows(x, largest)
    first = scaled.round()
    second = scaled.sub_(first).mul_(2 * largest).round_()
    return torch.cat([first, second], dim=-2).to(torch.int8), scale


def two_digit_product(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x (B, N, K) as two int8 digits times int8 weights, one (K, M) for each of B: (B, N, M)."""
    digits, scale = two_digit_int8(x)
    pairs = zip(digits, weights, strict=True)
    out = torch.stack([torch._int_mm(rows, weight) for rows, weight in pairs]).float()
    first, second = out.chunk(2, dim=1)
    return first.add_(second, alpha=0.5 / MAX_ACTIVATION).mul_(scale)


def split_rows(rows: Tensor) -> tuple[Tensor, ...]:
    """(N, K) → parts of at most MAX_ROWS rows, alike in size."""
    return rows.tensor_split(-(-len(rows) // MAX_ROWS))


def rotate_blocks(rows: Tensor, rotation: Tensor) -> Tensor:
    """(N, K) → (N, K): every n channels in a row multiplied by rotation (n, n)."""
    return (rows.reshape(-1, len(rotation)) @ rotation).view_as(rows)


class Int8Linear(nn.Module):
    """A linear layer with int8 weights (N, K) and a scale for each row.

    rotation:       (K, K), multiplied into the weight; inputs are expected to be rotated too
    block_rotation: (n, n), by which every n channels of the weight and of the inputs are rotated
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor
    block_rotation: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        rotation: Tensor | None = None,
        block_rotation: Tensor | None = None,
    ):
        super().__init__()
        weight = weight.detach()
        scale = torch.empty(len(weight))
        integers = torch.empty(weight.shape, dtype=torch.int8)
        for part in torch.arange(len(weight)).split(4096):  # a whole vocabulary takes much memory
            rows = weight[part].float()
            rows = rows if rotation is None else rows @ rotation
            rows = rows if block_rotation is None else rotate_blocks(rows, block_rotation)
            integers[part], step = quantize_rows(rows, max_weight())
            scale[part] = step[:, 0]
        self.register_buffer("weight", integers)
        self.register_buffer("scale", scale)
        self.register_buffer(
            "bias", torch.zeros_like(scale) if bias is None else bias.detach().float()
        )
        self.register_buffer("block_rotation", block_rotation)

    def dequantize(self) -> Tensor:
        """The weight as floats, (N, K)."""
        return self.weight * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) → (…, N)"""
        rows = x.flatten(0, -2)
        if len(rows) <= MAX_ROWS:
            out = self._product(rows)
        else:
            out = rows.new_empty(len(rows), len(self.bias))
            for part, into in zip(split_rows(rows), split_rows(out), strict=True):
                self._product(part, into)
        return out.unflatten(0, x.shape[:-1])

    def _product(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """(rows, K) → (rows, N)"""
        if self.block_rotation is not None:
            rows = rotate_blocks(rows, self.block_rotation)
        integers, scale = quantize_rows(rows)
        product = torch._int_mm(integers, self.weight.t())
        # converted at once: mixed arithmetic would make a copy of its own
        out = product.float() if out is None else out.copy_(product)
        return torch.addcmul(self.bias, out.mul_(scale), self.scale, out=out)


class Int8FeedForward(FeedForward):
    """A feed-forward part of int8 layers, computed some rows at a time."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        out = torch.empty_like(rows)
        for part, into in zip(split_rows(rows), split_rows(out), strict=True):
            into.copy_(super().forward(part))
        return out.view_as(x)


class Int8SelfAttention(MultiHeadAttention):
    """Self-attention whose query, key and value projections are one int8 product."""

    def __init__(self, attn: MultiHeadAttention, rotation: Tensor, norm: Affine):
        """norm: of the layer norm before it"""
        nn.Module.__init__(self)
        self.n_head = attn.n_head
        self.place = attn.place
        head = rotate_heads(len(rotation), self.n_head)
        parts = [
            fold_layernorm(norm, attn.query.weight, attn.query.bias),
            fold_layernorm(norm, attn.key.weight, None),
            fold_layernorm(norm, head.T @ attn.value.weight, attn.value.bias @ head),
        ]
        weights, biases = (torch.cat(several) for several in zip(*parts, strict=True))
        self.fused = Int8Linear(weights, biases, rotation)
        out = Int8Linear(rotation.T @ attn.out.weight @ head, attn.out.bias @ rotation)
        self.out = out  # type: ignore[assignment]

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.fused(x).chunk(3, dim=-1)
        return self.split_heads(q), self.split_heads(k), self.split_heads(v)


class Int8PerHeadLinear(nn.Module):
    """A linear layer for each head: weights (H, N, K) as two int8 digits, with a scale a row.

    As exact as 16 bits. It projects averages over time, where the errors of single positions no
    longer cancel. The products are small, so the second digit costs little.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        digits, scale = two_digit_int8(weight.detach(), max_weight())
        self.register_buffer("weight", digits)
        self.register_buffer("scale", scale.transpose(1, 2))
        self.register_buffer("bias", torch.zeros_like(scale[..., 0]) if bias is None else bias)

    def dequantize(self) -> Tensor:
        """The weights as floats, (H, N, K)."""
        first, second = self.weight.chunk(2, dim=1)
        return (first + second / (2 * max_weight())) * self.scale.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, Q, K) → (B, H, Q, N)"""
        rows = x.transpose(0, 1).flatten(1, 2)
        first, second = two_digit_product(rows, self.weight.mT.unbind()).chunk(2, dim=2)
        out = first.add_(second, alpha=0.5 / max_weight())
        out = torch.addcmul(self.bias[:, None], out, self.scale)
        return out.unflatten(1, (len(x), -1)).transpose(0, 1)


class Int8CrossAttention(MultiHeadAttention):
    """Cross-attention to the encoder's features directly: no keys and values are computed.

    With a head's key and value projections K and V, a score is q · (K f) = (Kᵀ q) · f, and the
    output is Σ w (V f) = V (Σ w f). So the few queries are projected instead of all features in
    every layer. A clip takes the memory of its features only, which are int8 (Int8TextDecoder). For
    `attend`, all heads are queries of one wide head, and this class has its products.
    """

    def __init__(self, attn: MultiHeadAttention, rotation: Tensor, norm: Affine, source: Affine):
        """norm, source: of the layer norms before the queries and before the features"""
        nn.Module.__init__(self)
        self.n_head = attn.n_head
        self.place = attn.place
        shape = self.n_head, len(rotation) // self.n_head  # (H, d)
        head = rotate_heads(len(rotation), self.n_head)
        weight, bias = fold_layernorm(norm, head.T @ attn.query.weight, attn.query.bias @ head)
        self.query = Int8Linear(weight, bias, rotation)  # type: ignore[assignment]
        # the bias of keys adds the same to all scores of a query: softmax ignores it
        keys, _ = fold_layernorm(source, head.T @ attn.key.weight, None)
        values, bias = fold_layernorm(source, head.T @ attn.value.weight, attn.value.bias @ head)
        # `attend` divides by the root of the width, which is H times that of a head
        keys = (keys @ rotation).view(*shape, -1).transpose(1, 2) * math.sqrt(self.n_head)
        self.inward = Int8PerHeadLinear(keys)
        self.outward = Int8PerHeadLinear((values @ rotation).view(*shape, -1), bias.view(shape))
        out = Int8Linear(rotation.T @ attn.out.weight @ head, attn.out.bias @ rotation)
        self.out = out  # type: ignore[assignment]

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The features themselves, as keys and values of one wide head: (B, 1, K, D) both."""
        return x[:, None], x[:, None]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, 1, H·Q, D), (B, 1, K, D) int8 → (B, 1, H·Q, K)"""
        step = MAX_FEATURE / MAX_ACTIVATION * q.shape[-1] ** -0.5
        return two_digit_product(q[:, 0], k[:, 0].mT.unbind()).mul_(step)[:, None]

    def outputs(self, weights: Tensor, v: Tensor) -> Tensor:
        """(B, 1, H·Q, K), (B, 1, K, D) int8 → (B, 1, H·Q, D)"""
        step = MAX_FEATURE / MAX_ACTIVATION
        return two_digit_product(weights[:, 0], v[:, 0].unbind()).mul_(step)[:, None]

    def heads(
        self, q: Tensor, groups: Sequence[KeyValues], record: Recorder | None = None
    ) -> Tensor:
        """q: (B, H, Q, d); groups: of one wide head; returns (B, H, Q, d)."""
        wide = self.inward(q).flatten(1, 2)[:, None]  # (B, 1, H·Q, D)
        seen = attend_groups(wide, groups, record and self._per_head(record), self.place, self)
        out = self.outward(seen[:, 0].unflatten(1, (self.n_head, -1)))
        if record is not None:
            record(self.place, "outputs", out)
        return out

    def _per_head(self, record: Recorder) -> Recorder:
        """A recorder for the wide head that records scores, weights and values of every head."""

        def recorded(place: str, quantity: str, x: Tensor) -> None:
            if quantity in {"scores", "weights"}:  # (B, 1, H·Q, K) → (B, H, Q, K)
                record(place, quantity, x[:, 0].unflatten(1, (self.n_head, -1)))
            elif quantity == "values":  # (B, 1, K, D) → (B, H, K, d)
                values = dequantize_features(x) @ self.outward.dequantize().transpose(1, 2)
                record(place, quantity, values + self.outward.bias[:, None])

        return recorded


class Int8TokenEmbedding(nn.Module):
    """The table of tokens, in and out: tokens to rotated vectors, and those to logits."""

    weight: Tensor
    bias: Tensor

    def __init__(self, table: Tensor, rotation: Tensor, norm: Affine):
        super().__init__()
        self.linear = Int8Linear(table, None, rotation)
        # the norm's weights stay between: they cannot go into a table that is read from both sides
        self.register_buffer("weight", rotation.T @ norm[0].diag() @ rotation)
        self.register_buffer("bias", norm[1] @ rotation)

    def forward(self, tokens: Tensor) -> Tensor:
        """(…) → (…, D)"""
        return self.linear.weight[tokens] * self.linear.scale[tokens][..., None]

    def token_direction(self, token: int) -> tuple[Tensor, Tensor]:
        """Two vectors e and s (D,) such that the token's logit is e · (x + s)."""
        return self(torch.tensor(token)) @ self.weight, torch.linalg.solve(self.weight, self.bias)

    def logits(self, x: Tensor) -> Tensor:
        """(…, D) → (…, n_vocab)"""
        rows = x.flatten(0, -2)[:, None]
        # a product for each row: in one for all, sums would depend on the number of rows
        weights = self.weight.t().expand(len(rows), -1, -1)
        scaled = torch.baddbmm(self.bias.expand_as(rows), rows, weights)
        return self.linear(scaled.view_as(x))


class RotatedAudioEncoder(AudioEncoder):
    """An encoder whose layers work on the rotated residual stream."""

    rotation: Tensor

    def __init__(self, encoder: AudioEncoder, rotation: Tensor):
        nn.Module.__init__(self)
        self.conv1, self.conv2 = encoder.conv1, encoder.conv2
        self.register_buffer(
            "positional_embedding", encoder.positional_embedding.float() @ rotation
        )
        self.register_buffer("rotation", rotation)
        self.blocks, self.ln_post = encoder.blocks, encoder.ln_post

    def add_positions(self, x: Tensor, first: int) -> Tensor:
        return super().add_positions(x @ self.rotation, first)


class Int8TextDecoder(TextDecoder):
    """A decoder of int8 layers that attends to int8 features."""

    def __init__(self, decoder: TextDecoder):
        nn.Module.__init__(self)
        self.n_ctx = decoder.n_ctx
        for name, module in decoder.named_children():
            setattr(self, name, module)
        self.positional_embedding = decoder.positional_embedding

    def cross_attention_cache(
        self, features: Tensor, mask: Tensor | None = None
    ) -> CrossAttentionCache:
        return super().cross_attention_cache(quantize_features(features), mask)


def quantize_features(features: Tensor) -> Tensor:
    """Rotated features (B, T, D) as int8. They come from a layer norm, so one scale serves all."""
    scaled = features * (MAX_ACTIVATION / MAX_FEATURE)
    return scaled.round_().clamp_(-MAX_ACTIVATION, MAX_ACTIVATION).to(torch.int8)


def dequantize_features(features: Tensor) -> Tensor:
    return features * (MAX_FEATURE / MAX_ACTIVATION)


def rotate_heads(width: int, n_head: int) -> Tensor:
    """A rotation (width, width) within each head."""
    return torch.block_diag(*[random_rotation(width // n_head)] * n_head)


def fold_layernorm(norm: Affine, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A linear layer's weight and bias, multiplied with those of the layer norm before it."""
    shift = weight @ norm[1]
    return weight * norm[0], shift if bias is None else shift + bias


def take_affine(norm: nn.LayerNorm) -> Affine:
    """Extract the weight and bias of a layer norm, and reset them to identity."""
    taken = norm.weight.detach().float().clone(), norm.bias.detach().float().clone()
    norm.weight.fill_(1.0)
    norm.bias.zero_()
    return taken


@torch.no_grad()
def quantize(model: Whisper) -> None:
    """Replace the modules of a model on the CPU by int8 ones, in place. Float weights are freed."""
    encoder, decoder = model.encoder, model.decoder
    rotation = mean_preserving_rotation(model.dims.n_audio_state)
    source = take_affine(encoder.ln_post)
    for block in (*encoder.blocks, *decoder.blocks):
        block.float()
        _quantize_block(block, rotation, source)
    model.encoder = RotatedAudioEncoder(encoder, rotation)
    decoder.positional_embedding.data = decoder.positional_embedding.float() @ rotation
    table = decoder.token_embedding.weight
    embedding = Int8TokenEmbedding(table, rotation, take_affine(decoder.ln))
    decoder.token_embedding = embedding  # type: ignore[assignment]
    model.decoder = Int8TextDecoder(decoder)
    model.float()


def _quantize_block(block: Block, rotation: Tensor, source: Affine) -> None:
    block.attn = Int8SelfAttention(block.attn, rotation, take_affine(block.attn_ln))
    if hasattr(block, "cross_attn"):
        norm = take_affine(block.cross_attn_ln)
        block.cross_attn = Int8CrossAttention(block.cross_attn, rotation, norm, source)
    up, down = cast("nn.Linear", block.mlp[0]), cast("nn.Linear", block.mlp[2])
    mixing = hadamard(math.gcd(down.weight.shape[1], BLOCK_CHANNELS))
    block.mlp = Int8FeedForward(
        Int8Linear(*fold_layernorm(take_affine(block.mlp_ln), up.weight, up.bias), rotation),
        nn.GELU(),
        Int8Linear(rotation.T @ down.weight, down.bias @ rotation, block_rotation=mixing),
    )
