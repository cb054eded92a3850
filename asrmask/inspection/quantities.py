"""Quantities measured for every head, from what `attend` and the layers record.

| quantity          | for each query, then averaged over the sample's real queries                |
|-------------------|-----------------------------------------------------------------------------|
| padding           | attention mass on padding; no data if no padding is visible                 |
| speech            | attention mass on audio that is speech (Silero's detector)                  |
| last_second       | attention mass on the last second of the audio                              |
| entropy           | entropy of the attention over positions, in nats                            |
| output_norm       | norm of the head's output                                                   |
| contribution_norm | norm of what the head adds to the residual stream                           |
| end_padding       | end-token logit from attention on padding (cross-attention, last query)     |
| end_audio         | end-token logit from attention on audio, likewise                           |

Real queries are the audio positions in the encoder, and in the decoder the positions that predict
the text and its end. Padding is never a query. The masses on padding, on speech and on pauses add
up to 1. With virtual padding, one key can represent several positions. It then has the mass of all
of them; the entropy counts that mass as spread evenly over them. Decoder self-attention has no
audio keys, so the first three quantities have no data there.

The end token's logit is E · LN(x), where x is the last layer's output after the complete text, LN
the final layer norm and E the end token's embedding. x is a sum, to which each head h of each
cross-attention adds Σₖ wₖ vₖ Oₕ (weights, values, its slice of the output projection). If the
standard deviation in LN is held fixed, the logit is linear in x, and the share of a key is:

    wₖ · E · (scale ⊙ centred(vₖ Oₕ)) / width

`end_padding` and `end_audio` are the sums of these shares over padding and over audio. They cover
the direct path only. Not included: a head's effect through later layers; the bias of the output
projection; self-attention, feed-forward layers and token embeddings; changes of the standard
deviation; and the effect of padding on the audio's own values in the encoder. Shares of a logit do
not translate into probabilities by themselves: other tokens' logits change too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrmask.inspection.aggregate import last, mean
from asrmask.inspection.inspected_model import InspectedModel, Readout
from asrmask.inspection.key_labels import KeyLabels
from asrmask.inspection.recording import attention_places
from asrmask.model.dimensions import ModelDimensions

MASSES = ("padding", "speech", "last_second")
SHAPES = ("entropy", "output_norm", "contribution_norm")
ENDS = ("end_padding", "end_audio")
QUANTITIES = {
    "padding": "attention on padding",
    "speech": "attention on speech",
    "last_second": "attention on the last second",
    "entropy": "entropy, nats",
    "output_norm": "norm of the output",
    "contribution_norm": "norm of what is added to the stream",
    "end_padding": "end-token logit from padding",
    "end_audio": "end-token logit from audio",
}
KINDS = {
    "encoder.self": "encoder self-attention",
    "decoder.self": "decoder self-attention",
    "decoder.cross": "cross-attention",
}
DEFINED = {
    "encoder.self": (*MASSES, *SHAPES),
    "decoder.self": SHAPES,
    "decoder.cross": (*MASSES, *SHAPES, *ENDS),
}


def kind_of(place: str) -> str:
    """Return the kind of attention at a place.

    >>> kind_of("decoder.2.cross")
    'decoder.cross'
    """
    part, _, what = place.split(".")
    return f"{part}.{what}"


def expected(dims: ModelDimensions) -> list[tuple[str, str]]:
    """Return every (place, quantity) pair of a complete measurement."""
    return [(p, quantity) for p in attention_places(dims) for quantity in DEFINED[kind_of(p)]]


def nested(values: Mapping[tuple[str, str], np.ndarray]) -> dict[str, Any]:
    """Convert one sample's values to lists for JSON: kind → quantity → layer → head.

    None where there is no data.
    """
    found: dict[str, Any] = {}
    for (place, quantity), row in values.items():
        heads = [None if np.isnan(x) else round(float(x), 6) for x in row[0]]
        found.setdefault(kind_of(place), {}).setdefault(quantity, []).append(heads)
    return found


def flat(found: Mapping[str, Any]) -> dict[tuple[str, str], np.ndarray]:
    """Undo `nested`: return (place, quantity) → (1, H)."""
    values = {}
    for kind, quantities in found.items():
        part, what = kind.split(".")
        for quantity, layers in quantities.items():
            for i, heads in enumerate(layers):
                values[f"{part}.{i}.{what}", quantity] = np.array([heads], dtype=float)
    return values


@dataclass(frozen=True)
class Scope:
    """The queries to measure for one kind of attention, and the labels of its keys.

    queries: (B, Q) bool
    keys:    None = the keys are text
    """

    queries: Tensor
    keys: KeyLabels | None = None


class Meter:
    """Recorder that measures during the forward pass, without keeping large tensors.

    values:   (place, quantity) → (B, H), NaN where there is no data
    profiles: place → (B, Q, H), mass on padding of each query, NaN if the query is not real
    end:      (B,) logit of the end token, set at the end of the decoder's pass
    """

    def __init__(
        self, subject: InspectedModel, scopes: Mapping[str, Scope], end_token: int | None = None
    ):
        self.subject = subject
        self.scopes = scopes
        self.values: dict[tuple[str, str], np.ndarray] = {}
        self.profiles: dict[str, np.ndarray] = {}
        self.end: Tensor | None = None
        self._readout: Readout | None = None if end_token is None else subject.readout(end_token)
        self._last_weights: Tensor | None = None  # (B, H, K) of the last real query
        self._shares: dict[tuple[str, str], Tensor] = {}

    def __call__(self, place: str, quantity: str, tensor: Tensor) -> None:
        if quantity == "residual":
            if place == f"decoder.{self.subject.dims.n_text_layer - 1}":
                self._read_end(tensor)
            return
        scope = self.scopes.get(kind_of(place))
        if scope is None:
            return
        if quantity == "weights":
            self._weigh(place, scope, tensor)
        elif quantity == "values":
            self._attribute(place, scope, tensor)
        elif quantity == "outputs":
            self._norms(place, scope, tensor)

    def _keep(self, place: str, quantity: str, values: Tensor) -> None:
        self.values[place, quantity] = values.double().cpu().numpy()

    def _weigh(self, place: str, scope: Scope, weights: Tensor) -> None:
        """Measure masses and entropy from weights (B, H, Q, K)."""
        rows = _stretch(scope.queries)
        queries = scope.queries[:, rows]
        seen = weights[:, :, rows]
        entropy = torch.special.entr(seen).sum(dim=-1)  # (B, H, Q)
        ground = scope.keys
        if ground is not None:
            # one matrix product for all masses (0/1 columns) and the entropy's log-count term
            wide = ground.counts.clamp(min=1).log()
            speech = ground.audio if ground.speech is None else ground.speech
            kinds = (ground.padding, speech, ground.last_second, wide)
            sums = seen @ torch.stack([kind.float() for kind in kinds], dim=-1)[:, None]
            entropy = entropy + sums[..., 3]
            masses = sums[..., :3].transpose(1, 2)  # (B, Q, H, 3)
            none = ~ground.padding.any(dim=1)
            masses[none, ..., 0] = torch.nan
            if ground.speech is None:
                masses[..., 1] = torch.nan
            for i, name in enumerate(MASSES):
                self._keep(place, name, mean(masses[..., i], queries))
            profile = torch.full((*scope.queries.shape, seen.shape[1]), torch.nan)
            profile[:, rows] = torch.where(queries[..., None], masses[..., 0], torch.nan).cpu()
            self.profiles[place] = profile.numpy()
            if kind_of(place) == "decoder.cross":
                self._last_weights = last(weights.transpose(1, 2), scope.queries)
        self._keep(place, "entropy", mean(entropy.transpose(1, 2), queries))

    def _attribute(self, place: str, scope: Scope, values: Tensor) -> None:
        """Split the end token's logit, before the division, by key, from values (B, H, K, d)."""
        if self._readout is None or scope.keys is None or self._last_weights is None:
            return
        projection = self.subject.projection(place).float()
        none = ~scope.keys.padding.any(dim=1)
        for name, part in (("end_padding", scope.keys.padding), ("end_audio", scope.keys.audio)):
            weights = self._last_weights * part[:, None]  # (B, H, K)
            found = torch.einsum("bhk,bhkd->bhd", weights, values.float())
            share = self._readout.share(torch.einsum("bhd,hdD->bhD", found, projection))
            if name == "end_padding":
                share[none] = torch.nan
            self._shares[place, name] = share
        self._last_weights = None

    def _norms(self, place: str, scope: Scope, outputs: Tensor) -> None:
        """Measure norms before and after the output projection, from outputs (B, H, Q, d)."""
        rows = _stretch(scope.queries)
        found = outputs[:, :, rows].float()
        added = found @ self.subject.projection(place).float()  # (B, H, Q, D)
        for name, x in (("output_norm", found), ("contribution_norm", added)):
            norms = x.norm(dim=-1).transpose(1, 2)  # (B, Q, H)
            self._keep(place, name, mean(norms, scope.queries[:, rows]))

    def _read_end(self, residual: Tensor) -> None:
        """Divide the shares by the norm's width, known after the last layer: (B, Q, D)"""
        if self._readout is None:
            return
        final = last(residual, self.scopes["decoder.cross"].queries)  # (B, D)
        self.end = self._readout.logit(final)
        width = self._readout.width(final)
        for (place, name), share in self._shares.items():
            self._keep(place, name, share / width[:, None])


def _stretch(queries: Tensor) -> slice:
    """Slice from the first to the last query that is real in any sample, to skip the others."""
    found = queries.any(dim=0).nonzero()
    return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)
