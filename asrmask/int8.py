"""Int8: weights and activations as whole numbers, for models on a CPU.

Each weight row and each activation row has a scale of its own, as in CTranslate2. The product of
whole numbers is exact, so what a row gives does not depend on the rows beside it: a batch says what
its clips say alone. Attention, norms and convolutions stay in float32.
"""

from functools import cache
from typing import cast

import torch
from torch import Tensor, nn

from asrmask.attention import MultiHeadAttention
from asrmask.model import Block, Whisper

MOST = 127  # the largest number of an activation
TINY = 1e-30  # a row of zeros is divided by it


@cache
def most_weight() -> int:
    """The largest number of a weight.

    Processors without VNNI add pairs of products in 16 bits: there weights have one bit less, so
    that no sum overflows. Which kind this is, a product shows.
    """
    x = torch.full((32, 64), MOST, dtype=torch.int8)
    got = torch._int_mm(x, torch.full((64, 64), 127, dtype=torch.int8))
    return 127 if bool((got == 64 * MOST * 127).all()) else 64


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8: (N, K), with a scale a row."""

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        weight = weight.detach()
        scale = weight.abs().amax(dim=1).float().clamp_(min=TINY) / most_weight()
        numbers = torch.empty(weight.shape, dtype=torch.int8)
        for part in torch.arange(len(weight)).split(4096):  # a vocabulary at once takes memory
            numbers[part] = (weight[part].float() / scale[part, None]).round_().to(torch.int8)
        self.register_buffer("weight", numbers)
        self.register_buffer("scale", scale)
        self.register_buffer(
            "bias", torch.zeros_like(scale) if bias is None else bias.detach().float()
        )

    def forward(self, x: Tensor, part: slice = slice(None)) -> Tensor:
        """(…, K) → (…, N); part: of the N outputs, those to compute."""
        rows = x.flatten(0, -2)
        reach = rows.abs().amax(dim=-1, keepdim=True).clamp_(min=TINY)
        numbers = (rows * (MOST / reach)).round_().to(torch.int8)
        out = torch._int_mm(numbers, self.weight[part].t()) * reach.mul_(1 / MOST)
        torch.addcmul(self.bias[part], out, self.scale[part], out=out)
        return out.unflatten(0, x.shape[:-1])


class Int8Attention(MultiHeadAttention):
    """The same attention, whose query, key and value projections are one int8 product."""

    def __init__(self, attn: MultiHeadAttention):
        nn.Module.__init__(self)
        self.n_head = attn.n_head
        self.place = attn.place
        parts = (attn.query, attn.key, attn.value)
        self.width = attn.query.weight.shape[0]
        self.fused = Int8Linear(
            torch.cat([part.weight for part in parts]),
            torch.cat([attn.query.bias, torch.zeros_like(attn.query.bias), attn.value.bias]),
        )
        self.out = Int8Linear(attn.out.weight, attn.out.bias)  # type: ignore[assignment]

    def queries(self, x: Tensor) -> Tensor:
        return self._split(self.fused(x, slice(0, self.width)))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.fused(x, slice(self.width, None)).chunk(2, dim=-1)
        return self._split(keys), self._split(values)

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.fused(x).chunk(3, dim=-1)
        return self._split(q), self._split(k), self._split(v)


class Int8Vocabulary(nn.Module):
    """The table of tokens, in and out: tokens to vectors, and vectors to logits."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.linear = Int8Linear(table, None)

    def forward(self, tokens: Tensor) -> Tensor:
        """(…) → (…, D)"""
        return self.linear.weight[tokens] * self.linear.scale[tokens][..., None]

    def logits(self, x: Tensor) -> Tensor:
        """(…, D) → (…, n_vocab)"""
        return self.linear(x)


@torch.no_grad()
def quantise(model: Whisper) -> None:
    """Bring a model on the CPU to int8, for good: its float weights are let go."""
    for block in (*model.encoder.blocks, *model.decoder.blocks):
        block.float()
        _quantise_block(block)
    table = model.decoder.token_embedding.weight
    model.decoder.token_embedding = Int8Vocabulary(table)
    model.float()


def _quantise_block(block: Block) -> None:
    block.attn = Int8Attention(block.attn)
    if hasattr(block, "cross_attn"):
        block.cross_attn = Int8Attention(block.cross_attn)
    for i in (0, 2):
        layer = cast("nn.Linear", block.mlp[i])
        block.mlp[i] = Int8Linear(layer.weight, layer.bias)
