"""A Whisper of any make, as the instruments see it.

`Own` is this project's model; openai.py and huggingface.py hold adapters, so that what is found in
one implementation can be checked in another. Places, quantities and shapes are those of
recording.py for all of them. Policies are this project's alone: the others see all of the padding.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from asrmask.attention import Recorder
from asrmask.model import ModelDimensions, Whisper


@dataclass(frozen=True)
class Readout:
    """How a token's logit is read from the last layer: normalised, then times its embedding.

    scale, shift: (D,), of the final layer norm
    eps:          of the same
    embedding:    (D,), the token's row
    """

    scale: Tensor
    shift: Tensor
    eps: float
    embedding: Tensor

    @classmethod
    def of(cls, norm: nn.LayerNorm, embedding: Tensor) -> "Readout":
        return cls(norm.weight.detach(), norm.bias.detach(), norm.eps, embedding.detach())

    def width(self, residual: Tensor) -> Tensor:
        """What the norm divides by: (…, D) → (…)"""
        return (residual.float().var(dim=-1, unbiased=False) + self.eps).sqrt()

    def share(self, part: Tensor) -> Tensor:
        """A part's share of the logit, before the division: (…, D) → (…); shares add up."""
        part = part.float()
        centred = part - part.mean(dim=-1, keepdim=True)
        return (centred * self.scale) @ self.embedding.float()

    def logit(self, residual: Tensor) -> Tensor:
        """The token's logit: (…, D) → (…)"""
        constant = (self.shift.float() * self.embedding.float()).sum()
        return self.share(residual) / self.width(residual) + constant


class Subject(Protocol):
    """What the instruments ask of a model."""

    dims: ModelDimensions

    def encode(self, mel: Tensor, record: Recorder | None = None) -> Tensor:
        """Audio features (B, T, D) of log-Mel frames (B, n_mels, 3000)."""
        ...

    def logits(self, tokens: Tensor, features: Tensor, record: Recorder | None = None) -> Tensor:
        """Teacher-forced logits (B, Q, n_vocab) of tokens (B, Q)."""
        ...

    def projection(self, place: str) -> Tensor:
        """An attention's output projection, head by head: (H, d, D)."""
        ...

    def readout(self, token: int) -> Readout:
        """How that token's logit is read."""
        ...


def by_head(weight: Tensor, n_head: int) -> Tensor:
    """The weight of a linear layer (D, D) over joined heads, as each head's slice (H, d, D)."""
    return weight.detach().T.unflatten(0, (n_head, -1))


def to_heads(x: Tensor, n_head: int) -> Tensor:
    """(B, N, D) → (B, H, N, d)"""
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)


class Own:
    """This project's model as a subject."""

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
        weight = attn.out.weight if isinstance(attn.out, nn.Linear) else attn.out.floats
        return by_head(weight, attn.n_head)

    def readout(self, token: int) -> Readout:
        norm, table = self.model.decoder.ln, self.model.decoder.token_embedding
        if isinstance(table, nn.Embedding):
            return Readout.of(norm, table.weight[token])
        embedding, shift = table.reader(token)  # of an int8 model, where the norm is bare
        return replace(Readout.of(norm, embedding), shift=shift)
