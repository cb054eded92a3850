"""The weights that measurements need in addition to recorded tensors."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from asrmask.model.dimensions import ModelDimensions


@dataclass(frozen=True)
class Readout:
    """Computes a token's logit from the last layer: final layer norm, then its embedding."""

    scale: Tensor  # (D,), weight of the final layer norm
    shift: Tensor  # (D,), its bias
    eps: float
    embedding: Tensor  # (D,), the token's row of the embedding matrix

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


class InspectedModel:
    """Access to the modules of asrmask's Whisper. adapters.py has subclasses for other projects."""

    names: ClassVar[dict[str, str]] = {  # attributes that hold the modules
        "layers": "blocks",
        "self": "attn",
        "cross": "cross_attn",
        **{name: name for name in ("query", "key", "value", "out")},
        "norm": "ln",
        "embedding": "token_embedding",
    }

    def __init__(self, model: Any, dims: ModelDimensions | None = None):
        self.model = model
        self.dims: ModelDimensions = dims or model.dims

    def n_heads(self, place: str) -> int:
        """Number of attention heads at a place."""
        is_encoder = place.startswith("encoder.")
        return self.dims.n_audio_head if is_encoder else self.dims.n_text_head

    def attention(self, place: str) -> nn.Module:
        """The attention module at a place."""
        part, layer, kind = place.split(".")
        layers = getattr(getattr(self.model, part), self.names["layers"])
        return getattr(layers[int(layer)], self.names[kind])

    def projection(self, place: str) -> Tensor:
        """The output projection of an attention, split by head: (H, d, D)"""
        out = getattr(self.attention(place), self.names["out"])
        weight = out.weight if isinstance(out, nn.Linear) else out.dequantize()
        return weight.detach().T.unflatten(0, (self.n_heads(place), -1))

    def readout(self, token: int) -> Readout:
        """The readout of a token's logit."""
        decoder = self.model.decoder
        norm = getattr(decoder, self.names["norm"])
        table = getattr(decoder, self.names["embedding"])
        scale, shift = norm.weight.detach(), norm.bias.detach()
        if isinstance(table, nn.Embedding):
            return Readout(scale, shift, norm.eps, table.weight[token].detach())
        embedding, shift = table.token_direction(token)  # int8: norm's affine part is folded in
        return Readout(scale, shift, norm.eps, embedding)
