"""Rotations of channels, so that all of them are alike in size when they are quantized.

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

import torch
from torch import Tensor, nn

BLOCK_CHANNELS = 16  # rotated together after GELU

Affine = tuple[Tensor, Tensor]  # the weight and bias of a layer norm


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


def rotate_blocks(rows: Tensor) -> Tensor:
    """(N, K) → (N, K): every 16 channels in a row multiplied by a Hadamard matrix."""
    return (rows.reshape(-1, BLOCK_CHANNELS) @ hadamard(BLOCK_CHANNELS)).view_as(rows)


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
