"""The transformer layer of encoder and decoder."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrmask.model.attention import MultiHeadAttention


class Block(nn.Module):
    """Transformer layer: self-attention, cross-attention (decoder only) and feed-forward."""

    def __init__(self, n_state: int, n_head: int, place: str, cross: bool):
        super().__init__()
        self.place = place
        self.attn = MultiHeadAttention(n_state, n_head, f"{place}.self")
        self.attn_ln = nn.LayerNorm(n_state)
        if cross:
            self.cross_attn = MultiHeadAttention(n_state, n_head, f"{place}.cross")
            self.cross_attn_ln = nn.LayerNorm(n_state)
        self.mlp = FeedForward(
            nn.Linear(n_state, 4 * n_state), nn.GELU(), nn.Linear(4 * n_state, n_state)
        )
        self.mlp_ln = nn.LayerNorm(n_state)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The feed-forward sublayer with its residual connection."""
        return self.mlp(self.mlp_ln(x), x)


class FeedForward(nn.Sequential):
    """Linear layer to four times the width, GELU, and linear layer back."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        """x, residual: (…, D); returns (…, D), added to `residual`."""
        return self[2](gelu(self[0](x))).add_(residual)


def gelu(x: Tensor) -> Tensor:
    """GELU; in place if gradients are off, because allocating costs more than computing it."""
    return F.gelu(x) if torch.is_grad_enabled() else torch.ops.aten.gelu_(x)
