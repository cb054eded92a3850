"""Common interface for the models that can be inspected.

`AsrmaskModel` adapts this project's model; openai.py and huggingface.py adapt two others, to check
findings in another implementation. All record the places, quantities and shapes listed in
recording.py. Only this project's model supports padding policies: the others attend to all of the
padding.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from asrmask.model.attention import Recorder
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.whisper import Whisper


@dataclass(frozen=True)
class Readout:
    """Computes a token's logit from the last layer: final layer norm, then its embedding.

    scale, shift: (D,), weight and bias of the final layer norm
    eps:          of the final layer norm
    embedding:    (D,), the token's row of the embedding matrix
    """

    scale: Tensor
    shift: Tensor
    eps: float
    embedding: Tensor

    @classmethod
    def of(cls, norm: nn.LayerNorm, embedding: Tensor) -> "Readout":
        return cls(norm.weight.detach(), norm.bias.detach(), norm.eps, embedding.detach())

    def width(self, residual: Tensor) -> Tensor:
        """The standard deviation that the layer norm divides by: (…, D) → (…)"""
        return (residual.float().var(dim=-1, unbiased=False) + self.eps).sqrt()

    def share(self, part: Tensor) -> Tensor:
        """A summand's part of the logit, before the division, (…, D) → (…); linear in `part`."""
        part = part.float()
        centred = part - part.mean(dim=-1, keepdim=True)
        return (centred * self.scale) @ self.embedding.float()

    def logit(self, residual: Tensor) -> Tensor:
        """The token's logit: (…, D) → (…)"""
        constant = (self.shift.float() * self.embedding.float()).sum()
        return self.share(residual) / self.width(residual) + constant


class InspectedModel(Protocol):
    """What a model must provide to be inspected."""

    dims: ModelDimensions

    def encode(self, mel: Tensor, record: Recorder | None = None) -> Tensor:
        """Encode log-Mel frames (B, n_mels, 3000) into audio features (B, T, D)."""
        ...

    def logits(self, tokens: Tensor, features: Tensor, record: Recorder | None = None) -> Tensor:
        """Return teacher-forced logits (B, Q, n_vocab) for tokens (B, Q)."""
        ...

    def projection(self, place: str) -> Tensor:
        """Return the output projection of an attention, split by head: (H, d, D)."""
        ...

    def readout(self, token: int) -> Readout:
        """Return the readout of a token's logit."""
        ...


def by_head(weight: Tensor, n_head: int) -> Tensor:
    """Split an output projection's weight (D, D) into one slice per head (H, d, D)."""
    return weight.detach().T.unflatten(0, (n_head, -1))


def to_heads(x: Tensor, n_head: int) -> Tensor:
    """Split into heads: (B, N, D) → (B, H, N, d)"""
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)


class AsrmaskModel:
    """Adapter for this project's model."""

    def __init__(self, model: Whisper):
        self.model = model
        self.dims = model.dims

    @torch.inference_mode()
    def encode(self, mel: Tensor, record: Recorder | None = None) -> Tensor:
        return self.model.encode(mel, record=record)

    @torch.inference_mode()
    def logits(self, tokens: Tensor, features: Tensor, record: Recorder | None = None) -> Tensor:
        return self.model.logits(tokens, features, record=record)

    def projection(self, place: str) -> Tensor:
        part, layer, what = place.split(".")
        block = (self.model.encoder if part == "encoder" else self.model.decoder).blocks[int(layer)]
        attn = block.cross_attn if what == "cross" else block.attn
        weight = attn.out.weight if isinstance(attn.out, nn.Linear) else attn.out.dequantize()
        return by_head(weight, attn.n_head)

    def readout(self, token: int) -> Readout:
        norm, table = self.model.decoder.ln, self.model.decoder.token_embedding
        if isinstance(table, nn.Embedding):
            return Readout.of(norm, table.weight[token])
        embedding, shift = table.token_direction(token)  # int8: norm's affine part is folded in
        return replace(Readout.of(norm, embedding), shift=shift)
