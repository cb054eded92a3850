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
the text and its end. The masses on padding, on speech and on pauses add up to 1. A key of virtual
padding represents several positions: it has the mass of all of them, and the entropy counts that
mass as spread evenly. Decoder self-attention has no audio keys, so no masses.

The end token's logit is E · LN(x): x is the last layer's output after the complete text, LN the
final layer norm, E the end token's embedding. To x, each cross-attention head h adds Σₖ wₖ vₖ Oₕ
(weights, values, its slice of the output projection). With the standard deviation in LN held
fixed, the logit is linear in x, and the share of a key is:

    wₖ · E · (scale ⊙ centred(vₖ Oₕ)) / width

`end_padding` and `end_audio` sum these shares: the direct path only. Not included: effects through
later layers; the output projection's bias; self-attention, feed-forward layers and embeddings;
changes of the standard deviation; the effect of padding on the audio's values in the encoder.
Shares of a logit are not probabilities: other tokens' logits change too.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asrmask.inspection.aggregate import last, mean
from asrmask.inspection.inspected_model import InspectedModel, Readout
from asrmask.inspection.key_labels import KeyLabels
from asrmask.inspection.recording import attention_places
from asrmask.model.dimensions import ModelDimensions

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
NAMES = tuple(QUANTITIES)
MASSES = NAMES[:3]
DEFINED = {"encoder.self": NAMES[:6], "decoder.self": NAMES[3:6], "decoder.cross": NAMES}


def kind_of(place: str) -> str:
    """Return the kind of attention at a place: "decoder.cross" at "decoder.2.cross"."""
    part, _, what = place.split(".")
    return f"{part}.{what}"


def expected(dims: ModelDimensions) -> list[tuple[str, str]]:
    """Return every (place, quantity) pair of a complete measurement."""
    return [(p, quantity) for p in attention_places(dims) for quantity in DEFINED[kind_of(p)]]


def nested(values: Mapping[tuple[str, str], np.ndarray]) -> dict[str, Any]:
    """Convert one sample's values to JSON: kind → quantity → layer → head; None: no data."""
    kinds: dict[str, Any] = {}
    for (place, quantity), row in values.items():
        heads = [None if np.isnan(x) else round(float(x), 6) for x in row[0]]
        kinds.setdefault(kind_of(place), {}).setdefault(quantity, []).append(heads)
    return kinds


def flat(kinds: Mapping[str, Any]) -> dict[tuple[str, str], np.ndarray]:
    """Undo `nested`: return (place, quantity) → (1, H)."""
    values = {}
    for kind, quantities in kinds.items():
        part, what = kind.split(".")
        for quantity, layers in quantities.items():
            for i, heads in enumerate(layers):
                values[f"{part}.{i}.{what}", quantity] = np.array([heads], dtype=float)
    return values


class Scope(NamedTuple):
    """The queries to measure for one kind of attention, and the labels of its keys."""

    queries: Tensor  # (B, Q) bool
    keys: KeyLabels | None = None  # None = the keys are text


class Meter:
    """Recorder that measures during the forward pass, without keeping large tensors.

    values:    (place, quantity) → (B, H), NaN where there is no data
    profiles:  place → (B, Q, H), mass on padding of each query, NaN if the query is not real
    end_logit: (B,) logit of the end token, set at the end of the decoder's pass
    """

    def __init__(
        self, model: InspectedModel, scopes: Mapping[str, Scope], end_token: int | None = None
    ):
        self.model = model
        self.scopes = scopes
        self.values: dict[tuple[str, str], np.ndarray] = {}
        self.profiles: dict[str, np.ndarray] = {}
        self.end_logit: Tensor | None = None
        self._readout: Readout | None = None if end_token is None else model.readout(end_token)
        self._last_weights: Tensor | None = None  # (B, H, K) of the last real query
        self._end_shares: dict[tuple[str, str], Tensor] = {}

    def __call__(self, place: str, quantity: str, tensor: Tensor) -> None:
        if quantity == "residual":
            if place == f"decoder.{self.model.dims.n_text_layer - 1}":
                self._measure_end(tensor)
        elif (scope := self.scopes.get(kind_of(place))) is None:
            return
        elif quantity == "weights":
            self._measure_weights(place, scope, tensor)
        elif quantity == "values":
            self._attribute_end(place, scope, tensor)
        elif quantity == "outputs":
            self._measure_norms(place, scope, tensor)

    def _store(self, place: str, quantity: str, values: Tensor) -> None:
        self.values[place, quantity] = values.double().cpu().numpy()

    def _measure_weights(self, place: str, scope: Scope, weights: Tensor) -> None:
        """Measure masses and entropy from weights (B, H, Q, K)."""
        rows = _real_rows(scope.queries)
        queries = scope.queries[:, rows]
        real = weights[:, :, rows]
        entropy = torch.special.entr(real).sum(dim=-1)  # (B, H, Q)
        keys = scope.keys
        if keys is not None:
            # one matrix product for all masses (0/1 columns) and the entropy's log-count term
            log_counts = keys.counts.clamp(min=1).log()
            speech = keys.audio if keys.speech is None else keys.speech
            columns = (keys.padding, speech, keys.last_second, log_counts)
            sums = real @ torch.stack([column.float() for column in columns], dim=-1)[:, None]
            entropy = entropy + sums[..., 3]
            masses = sums[..., :3].transpose(1, 2)  # (B, Q, H, 3)
            masses[~keys.padding.any(dim=1), ..., 0] = torch.nan
            if keys.speech is None:
                masses[..., 1] = torch.nan
            for i, name in enumerate(MASSES):
                self._store(place, name, mean(masses[..., i], queries))
            profile = torch.full((*scope.queries.shape, real.shape[1]), torch.nan)
            profile[:, rows] = torch.where(queries[..., None], masses[..., 0], torch.nan).cpu()
            self.profiles[place] = profile.numpy()
            if kind_of(place) == "decoder.cross":
                self._last_weights = last(weights.transpose(1, 2), scope.queries)
        self._store(place, "entropy", mean(entropy.transpose(1, 2), queries))

    def _attribute_end(self, place: str, scope: Scope, values: Tensor) -> None:
        """Split the end token's logit, before the division, by key, from values (B, H, K, d)."""
        if self._readout is None or scope.keys is None or self._last_weights is None:
            return
        projection = self.model.projection(place).float()
        padding, audio = scope.keys.padding, scope.keys.audio
        for name, selected in (("end_padding", padding), ("end_audio", audio)):
            weights = self._last_weights * selected[:, None]  # (B, H, K)
            outputs = torch.einsum("bhk,bhkd->bhd", weights, values.float())
            share = self._readout.share(torch.einsum("bhd,hdD->bhD", outputs, projection))
            if name == "end_padding":
                share[~padding.any(dim=1)] = torch.nan
            self._end_shares[place, name] = share
        self._last_weights = None

    def _measure_norms(self, place: str, scope: Scope, outputs: Tensor) -> None:
        """Measure norms before and after the output projection, from outputs (B, H, Q, d)."""
        rows = _real_rows(scope.queries)
        real = outputs[:, :, rows].float()
        added = real @ self.model.projection(place).float()  # (B, H, Q, D)
        for name, x in (("output_norm", real), ("contribution_norm", added)):
            norms = x.norm(dim=-1).transpose(1, 2)  # (B, Q, H)
            self._store(place, name, mean(norms, scope.queries[:, rows]))

    def _measure_end(self, residual: Tensor) -> None:
        """Divide the shares by the norm's width, known after the last layer: (B, Q, D)"""
        if self._readout is None:
            return
        final = last(residual, self.scopes["decoder.cross"].queries)  # (B, D)
        self.end_logit = self._readout.logit(final)
        width = self._readout.width(final)
        for (place, name), share in self._end_shares.items():
            self._store(place, name, share / width[:, None])


def _real_rows(queries: Tensor) -> slice:
    """Slice from the first to the last query that is real in any sample, to skip the others."""
    indices = queries.any(dim=0).nonzero()
    return slice(int(indices[0]), int(indices[-1]) + 1) if len(indices) else slice(0, 0)
