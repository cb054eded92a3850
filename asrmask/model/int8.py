"""The int8 modules that replace those of the float model (see quantization.py).

Each weight row and each activation row has its own scale, as in CTranslate2. Integer products are
exact, so a row's result does not depend on the rows beside it: a batch gives what its clips give
alone. Cross-attention attends to the encoder's features directly (Int8CrossAttention).

Where asrmask/kernels runs, a module is one call of it, and its weights are stored as it reads them.
Elsewhere PyTorch's operations give the same: the same integers, up to the rounding of floats.

Constructors make empty modules of given sizes, for weights that are loaded. `of` quantizes floats.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrmask import kernels
from asrmask.kernels import PackedFeatures
from asrmask.model.attention import (
    FloatProducts,
    KeyValues,
    MultiHeadAttention,
    Recorder,
    attend_groups,
)
from asrmask.model.blocks import FeedForward, gelu
from asrmask.model.calibration import BlockMoments, Compensation
from asrmask.model.rotation import (
    BLOCK_CHANNELS,
    Affine,
    fold_layernorm,
    rotate_blocks,
    rotate_heads,
)

MAX_ACTIVATION = 127
MIN_SCALE = 1e-30  # of a row of zeros
MAX_FEATURE = 4.5  # rotated features from a layer norm: one in a thousand has a larger channel
FEATURE_STEP = MAX_FEATURE / MAX_ACTIVATION
CLOSE_LOGIT = 1.0  # below the largest: the error of an int8 product is a tenth of this
MAX_ROWS = 384  # multiplied at a time: more rows take more memory and no less time


@cache
def max_weight() -> int:
    """The largest weight as an integer: 127, or 64 on processors without VNNI.

    Those add pairs of products in 16 bits, which would overflow. A product shows which kind it is.
    """
    x = torch.full((32, 64), MAX_ACTIVATION, dtype=torch.int8)
    got = torch._int_mm(x, torch.full((64, 64), 127, dtype=torch.int8))
    return 127 if bool((got == 64 * MAX_ACTIVATION * 127).all()) else 64


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


class Int8Linear(nn.Module):
    """A linear layer with int8 weights (N, K) and a scale for each row.

    in_blocks:  every 16 channels of the weight and of the inputs are rotated
    normalizes: a layer norm, without weight and bias, comes first
    two_digits: inputs have two 8-bit digits instead of one

    weight: (N, K) int8, or packed for the kernels; scale, bias: (N), then padded
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(
        self,
        n_out: int,
        n_in: int,
        *,
        in_blocks: bool = False,
        normalizes: bool = False,
        two_digits: bool = False,
    ):
        super().__init__()
        self.in_blocks, self.normalizes, self.two_digits = in_blocks, normalizes, two_digits
        self.n_out = n_out
        self.is_packed = kernels.available() and n_in % BLOCK_CHANNELS == 0
        if self.is_packed:
            weight = kernels.empty(n_out, n_in)
            n_out = len(weight) * kernels.BLOCK
        else:
            weight = torch.empty(n_out, n_in, dtype=torch.int8)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.empty(n_out))
        self.register_buffer("bias", torch.empty(n_out))

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        rotation: Tensor | None = None,
        moments: Tensor | None = None,
        **flags: bool,
    ) -> "Int8Linear":
        """Quantize a weight (N, K).

        rotation: (K, K), multiplied into the weight; inputs are expected to be rotated too
        moments:  (K, K) of the inputs before any rotation, if they are known (calibration.py)
        flags:    in_blocks, normalizes, two_digits
        """
        layer = cls(*weight.shape, **flags)
        weight = weight.detach()
        scale = torch.empty(len(weight))
        integers = torch.empty(weight.shape, dtype=torch.int8)
        compensation = None
        if moments is not None:
            moments = moments if rotation is None else rotation.T @ moments @ rotation
            moments = rotate_blocks(rotate_blocks(moments).T) if layer.in_blocks else moments
            compensation = Compensation.of(moments)
        for part in torch.arange(len(weight)).split(4096):  # a whole vocabulary takes much memory
            rows = weight[part].float()
            rows = rows if rotation is None else rows @ rotation
            rows = rotate_blocks(rows) if layer.in_blocks else rows
            rows, step = scale_rows(rows, max_weight())
            rows = rows.round_() if compensation is None else compensation.round(rows, max_weight())
            integers[part], scale[part] = rows.to(torch.int8), step[:, 0]
        bias = torch.zeros_like(scale) if bias is None else bias.detach().float()
        if layer.is_packed:
            integers, scale, bias = kernels.pack(integers), kernels.pad(scale), kernels.pad(bias)
        layer.weight, layer.scale, layer.bias = integers, scale, bias
        return layer

    @property
    def matrix(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.scale, self.bias

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight as floats: (…) → (…, K)."""
        if self.is_packed:
            integers = kernels.packed_rows(self.weight, indices)
        else:
            integers = self.weight[indices]
        return integers * self.scale[indices][..., None]

    def dequantize(self) -> Tensor:
        """The weight as floats, (N, K)."""
        return self.rows(torch.arange(self.n_out))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """(…, K) → (…, N); residual: (…, N), added"""
        if self.is_packed:
            flags = kernels.NORMALIZE * self.normalizes | kernels.ROTATE * self.in_blocks
            flags |= kernels.TWO_DIGITS * self.two_digits
            return kernels.linear(x, *self.matrix, self.n_out, flags, residual)
        if self.normalizes:
            x = F.layer_norm(x, x.shape[-1:])
        rows = x.flatten(0, -2)
        if len(rows) <= MAX_ROWS:
            out = self._product(rows)
        else:
            out = rows.new_empty(len(rows), len(self.bias))
            for part, into in zip(split_rows(rows), split_rows(out), strict=True):
                self._product(part, into)
        out = out.unflatten(0, x.shape[:-1])
        return out if residual is None else out.add_(residual)

    def _product(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """(rows, K) → (rows, N)"""
        if self.in_blocks:
            rows = rotate_blocks(rows)
        if self.two_digits:
            product = two_digit_product(rows[None], [self.weight.t()])[0]
            return torch.addcmul(self.bias, product, self.scale, out=out)
        integers, scale = quantize_rows(rows)
        product = torch._int_mm(integers, self.weight.t())
        # converted at once: mixed arithmetic would make a copy of its own
        out = product.float() if out is None else out.copy_(product)
        return torch.addcmul(self.bias, out.mul_(scale), self.scale, out=out)


class Int8FeedForward(FeedForward):
    """A feed-forward part of int8 layers, of which the first normalizes."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        up, down = cast("Int8Linear", self[0]), cast("Int8Linear", self[2])
        if up.is_packed and x is residual:
            flags = kernels.TWO_DIGITS * up.two_digits
            return kernels.feed_forward(x, up.matrix, down.matrix, flags)
        rows = x.flatten(0, -2)
        out = torch.empty_like(rows)
        for part, into in zip(split_rows(rows), split_rows(out), strict=True):
            into.copy_(down(gelu(up(part))))
        return out.view_as(x).add_(residual)


class Int8Attention(MultiHeadAttention):
    """Attention with an int8 output projection."""

    out: Int8Linear  # type: ignore[assignment]

    def project_out(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.out(x, residual)


class Int16Products(FloatProducts):
    """Attention of the encoder: in 16-bit integers where the kernels run."""

    def fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = kernels.attention(q, k, v, mask)
        return super().fused(q, k, v, mask) if out is None else out


class Int8SelfAttention(Int8Attention):
    """Self-attention whose query, key and value projections are one int8 product."""

    products = Int16Products()

    def __init__(self, width: int, n_head: int, place: str, two_digits: bool = False):
        nn.Module.__init__(self)
        self.n_head, self.place = n_head, place
        self.fused = Int8Linear(3 * width, width, normalizes=True, two_digits=two_digits)
        self.out = Int8Linear(width, width, two_digits=two_digits)

    @classmethod
    def of(
        cls,
        attn: MultiHeadAttention,
        rotation: Tensor,
        norm: Affine,
        moments: BlockMoments | None = None,
        two_digits: bool = False,
    ) -> "Int8SelfAttention":
        """norm: of the layer norm before it, which is part of the product"""
        layer = cls(len(rotation), attn.n_head, attn.place, two_digits)
        head = rotate_heads(len(rotation), attn.n_head)
        parts = [
            fold_layernorm(norm, attn.query.weight, attn.query.bias),
            fold_layernorm(norm, attn.key.weight, None),
            fold_layernorm(norm, head.T @ attn.value.weight, attn.value.bias @ head),
        ]
        weights, biases = (torch.cat(several) for several in zip(*parts, strict=True))
        seen = moments or BlockMoments()
        layer.fused = Int8Linear.of(
            weights, biases, rotation, seen.attn, normalizes=True, two_digits=two_digits
        )
        out = None if seen.attn_out is None else head.T @ seen.attn_out @ head
        weight, bias = rotation.T @ attn.out.weight @ head, attn.out.bias @ rotation
        layer.out = Int8Linear.of(weight, bias, moments=out, two_digits=two_digits)
        return layer

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.fused(x).chunk(3, dim=-1)
        return self.split_heads(q), self.split_heads(k), self.split_heads(v)

    def heads(
        self, q: Tensor, groups: Sequence[KeyValues], record: Recorder | None = None
    ) -> Tensor:
        return attend_groups(q, groups, record, self.place, self.products)


class Int8PerHeadLinear(nn.Module):
    """A linear layer for each head: weights (H, N, K) as two int8 digits, with a scale a row.

    As exact as 16 bits. It projects averages over time, where the errors of single positions no
    longer cancel. The products are small, so the second digit costs little.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, n_head: int, n_out: int, n_in: int):
        super().__init__()
        self.register_buffer("weight", torch.empty(n_head, 2 * n_out, n_in, dtype=torch.int8))
        self.register_buffer("scale", torch.empty(n_head, 1, n_out))
        self.register_buffer("bias", torch.empty(n_head, n_out))

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> "Int8PerHeadLinear":
        layer = cls(*weight.shape)
        layer.weight, scale = two_digit_int8(weight.detach(), max_weight())
        layer.scale = scale.transpose(1, 2)
        layer.bias = torch.zeros_like(scale[..., 0]) if bias is None else bias
        return layer

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


class HalfPerHeadLinear(nn.Module):
    """The same with float16 weights (H, K, N), as the kernels read them."""

    weight: Tensor
    bias: Tensor

    def __init__(self, n_head: int, n_out: int, n_in: int):
        super().__init__()
        # as integers, because converting a model's floats must not change them
        self.register_buffer("weight", torch.empty(n_head, n_in, n_out, dtype=torch.int16))
        self.register_buffer("bias", torch.empty(n_head, n_out))

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> "HalfPerHeadLinear":
        layer = cls(*weight.shape)
        layer.weight = weight.detach().mT.contiguous().half().view(torch.int16)
        bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias
        layer.bias = bias.detach().float().contiguous()
        return layer

    def dequantize(self) -> Tensor:
        """The weights as floats, (H, N, K)."""
        return self.weight.view(torch.half).mT.float()

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, Q, K) → (B, H, Q, N)"""
        return x @ self.weight.view(torch.half).float() + self.bias[:, None]


class Int8CrossAttention(Int8Attention):
    """Cross-attention to the encoder's features directly: no keys and values are computed.

    With a head's key and value projections K and V, a score is q · (K f) = (Kᵀ q) · f, and the
    output is Σ w (V f) = V (Σ w f). So the few queries are projected instead of all features in
    every layer. A clip takes the memory of its features only, which are int8 (Int8TextDecoder). For
    `attend`, all heads are queries of one wide head, and this class has its products.
    """

    query: Int8Linear  # type: ignore[assignment]
    inward: Int8PerHeadLinear | HalfPerHeadLinear
    outward: Int8PerHeadLinear | HalfPerHeadLinear

    def __init__(self, width: int, n_head: int, place: str):
        nn.Module.__init__(self)
        self.n_head, self.place = n_head, place
        n_channels = width // n_head
        self.is_packed = kernels.available() and n_channels == kernels.HEAD_WIDTH
        self.query = Int8Linear(width, width, normalizes=True, two_digits=True)
        linear = HalfPerHeadLinear if self.is_packed else Int8PerHeadLinear
        self.inward = linear(n_head, width, n_channels)
        self.outward = linear(n_head, n_channels, width)
        self.out = Int8Linear(width, width, two_digits=True)

    @classmethod
    def of(
        cls, attn: MultiHeadAttention, rotation: Tensor, norm: Affine, source: Affine
    ) -> "Int8CrossAttention":
        """norm, source: of the layer norms before the queries and before the features"""
        layer = cls(len(rotation), attn.n_head, attn.place)
        shape = attn.n_head, len(rotation) // attn.n_head  # (H, d)
        head = rotate_heads(len(rotation), attn.n_head)
        weight, bias = fold_layernorm(norm, head.T @ attn.query.weight, attn.query.bias @ head)
        layer.query = Int8Linear.of(weight, bias, rotation, normalizes=True, two_digits=True)
        # the bias of keys adds the same to all scores of a query: softmax ignores it
        keys, _ = fold_layernorm(source, head.T @ attn.key.weight, None)
        values, bias = fold_layernorm(source, head.T @ attn.value.weight, attn.value.bias @ head)
        # `attend` divides by the root of the width, which is H times that of a head
        keys = (keys @ rotation).view(*shape, -1).transpose(1, 2) * math.sqrt(attn.n_head)
        layer.inward = layer.inward.of(keys)
        layer.outward = layer.outward.of((values @ rotation).view(*shape, -1), bias.view(shape))
        weight, bias = rotation.T @ attn.out.weight @ head, attn.out.bias @ rotation
        layer.out = Int8Linear.of(weight, bias, two_digits=True)
        return layer

    def group(self, features: Tensor, mask: Tensor | None) -> KeyValues:
        """Int8 features (B, K, D) as keys and values of one wide head."""
        if self.is_packed:
            packed = cast("Tensor", PackedFeatures.of(features, mask))
            return KeyValues(packed, packed, mask)
        return KeyValues(features[:, None], features[:, None], mask)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, 1, H·Q, D), (B, 1, K, D) int8 → (B, 1, H·Q, K)"""
        step = FEATURE_STEP * q.shape[-1] ** -0.5
        return two_digit_product(q[:, 0], k[:, 0].mT.unbind()).mul_(step)[:, None]

    def outputs(self, weights: Tensor, v: Tensor) -> Tensor:
        """(B, 1, H·Q, K), (B, 1, K, D) int8 → (B, 1, H·Q, D)"""
        return two_digit_product(weights[:, 0], v[:, 0].unbind()).mul_(FEATURE_STEP)[:, None]

    def heads(
        self, q: Tensor, groups: Sequence[KeyValues], record: Recorder | None = None
    ) -> Tensor:
        """q: (B, H, Q, d); groups: of one wide head; returns (B, H, Q, d)."""
        if self.is_packed and record is None:
            features = [cast("PackedFeatures", group.keys) for group in groups]
            weights = self.inward.weight, self.outward.weight, self.outward.bias
            return kernels.cross_attention(q, features, *weights, FEATURE_STEP)
        if self.is_packed:
            groups = [unpacked(group) for group in groups]
        wide = self.inward(q).flatten(1, 2)[:, None]  # (B, 1, H·Q, D)
        seen = attend_groups(wide, groups, record and self._per_head(record), self.place, self)
        out = self.outward(seen[:, 0].unflatten(1, (self.n_head, -1)))
        if record is not None:
            record(self.place, "outputs", out)
        return out

    def _per_head(self, record: Recorder) -> Recorder:
        """A recorder for the wide head that records scores, weights and values of every head.

        A recorder may say in `quantities` which ones it takes: values take time.
        """
        quantities = getattr(record, "quantities", {"scores", "weights", "values"})

        def recorded(place: str, quantity: str, x: Tensor) -> None:
            if quantity not in quantities:
                return
            if quantity in {"scores", "weights"}:  # (B, 1, H·Q, K) → (B, H, Q, K)
                record(place, quantity, x[:, 0].unflatten(1, (self.n_head, -1)))
            elif quantity == "values":  # (B, 1, K, D) → (B, H, K, d)
                values = dequantize_features(x) @ self.outward.dequantize().transpose(1, 2)
                record(place, quantity, values + self.outward.bias[:, None])

        return recorded


def unpacked(group: KeyValues) -> KeyValues:
    """A group of packed features as a group of int8 features."""
    features = cast("PackedFeatures", group.keys).unpack()[:, None]
    return KeyValues(features, features, group.mask)


class Int8TokenEmbedding(nn.Module):
    """The table of tokens, in and out: tokens to rotated vectors, and those to logits.

    Logits are an int8 product. The largest of them are computed again, from float16 rows: a token
    is often chosen by less than int8 tells apart.
    """

    table: Tensor
    weight: Tensor
    bias: Tensor
    half_weight: Tensor

    def __init__(self, n_vocab: int, width: int):
        super().__init__()
        self.linear = Int8Linear(n_vocab, width)
        # halves as integers, because converting a model's floats must not change them
        self.register_buffer("table", torch.empty(n_vocab, width, dtype=torch.int16))
        self.register_buffer("weight", torch.empty(width, width))
        self.register_buffer("bias", torch.empty(width))
        self.is_packed = self.linear.is_packed and width % kernels.BLOCK == 0
        if self.is_packed:
            half_weight = torch.empty(width, width, dtype=torch.int16)
            self.register_buffer("half_weight", half_weight)

    @classmethod
    def of(cls, table: Tensor, rotation: Tensor, norm: Affine) -> "Int8TokenEmbedding":
        layer = cls(*table.shape)
        layer.linear = Int8Linear.of(table, None, rotation)
        parts = table.detach().split(4096)  # a whole vocabulary takes much memory
        layer.table = torch.cat([(part.float() @ rotation).half() for part in parts]).view(
            torch.int16
        )
        # the norm's weights stay between: they cannot go into a table that is read from both sides
        weight = rotation.T @ norm[0].diag() @ rotation
        layer.weight, layer.bias = weight, norm[1] @ rotation
        if layer.is_packed:
            layer.half_weight = weight.T.contiguous().half().view(torch.int16)
        return layer

    def forward(self, tokens: Tensor) -> Tensor:
        """(…) → (…, D)"""
        return self.table[tokens].view(torch.half).float()

    def token_direction(self, token: int) -> tuple[Tensor, Tensor]:
        """Two vectors e and s (D,) such that the token's logit is e · (x + s)."""
        return self(torch.tensor(token)) @ self.weight, torch.linalg.solve(self.weight, self.bias)

    def logits(self, x: Tensor) -> Tensor:
        """(…, D) → (…, n_vocab)"""
        rows = x.flatten(0, -2)
        if self.is_packed:
            rows = kernels.project(rows, self.half_weight, self.bias)
        else:  # a product for each row: in one for all, sums would depend on the number of rows
            weights = self.weight.t().expand(len(rows), -1, -1)
            rows = torch.baddbmm(self.bias.expand_as(rows[:, None]), rows[:, None], weights)[:, 0]
        logits = self.linear(rows)
        if self.is_packed:
            kernels.refine(logits, rows, self.table, CLOSE_LOGIT)
        else:
            text, token = (logits >= logits.amax(1, keepdim=True) - CLOSE_LOGIT).nonzero().unbind(1)
            logits[text, token] = (rows[text] * self(token)).sum(dim=1)
        return logits.unflatten(0, x.shape[:-1])


def quantize_features(features: Tensor) -> Tensor:
    """Rotated features (B, T, D) as int8. They come from a layer norm, so one scale serves all."""
    scaled = features / FEATURE_STEP
    return scaled.round_().clamp_(-MAX_ACTIVATION, MAX_ACTIVATION).to(torch.int8)


def dequantize_features(features: Tensor) -> Tensor:
    return features * FEATURE_STEP
