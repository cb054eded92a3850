"""Record tensors inside the model: places, quantities and shapes.

`model.encode`, `encoding.encode`, `model.logits` and the decoder take a function `record`. They
call it with a place, a quantity and a tensor, layer by layer, during the normal forward pass. Place
and quantity together form a name, such as "decoder.2.cross.weights":

| place            | attention from queries to keys         | quantities                         |
|------------------|----------------------------------------|------------------------------------|
| encoder.N.self   | audio positions to audio positions     | scores, weights, values, outputs   |
| decoder.N.self   | text to text                           | the same                           |
| decoder.N.cross  | text to audio positions                | the same                           |
| encoder.N        |                                        | residual, after layer N            |
| decoder.N        |                                        | the same                           |
| encoder.input, decoder.input |                            | residual, before the first layer   |

| quantity | shape        | meaning                                                           |
|----------|--------------|-------------------------------------------------------------------|
| scores   | (B, H, Q, K) | q kᵀ / √d after the mask: −inf where hidden, or plus a bias       |
| weights  | (B, H, Q, K) | softmax of the scores: each row sums to 1                         |
| values   | (B, H, K, d) | value vectors                                                     |
| outputs  | (B, H, Q, d) | weighted mean of the values, before the output projection         |
| residual | (B, Q, D)    | residual stream                                                   |

The keys are the window's 1500 positions, with these exceptions:

- `trim`: only the positions that are computed.
- Cross-attention: without the keys at both ends that are hidden from all clips
  (`CrossAttentionCache.origin` is the position of the first key).
- `virtual`: the clip's own keys, then averages that represent several positions each. The score
  includes the log of their number, so the weight is the mass of all of them.

`key_labels.KeyLabels` describes the keys.
"""

from fnmatch import fnmatchcase

from torch import Tensor

from asrmask.errors import OptionError
from asrmask.model.attention import Recorder
from asrmask.model.dimensions import ModelDimensions

ATTENTION = ("scores", "weights", "values", "outputs")


def attention_places(dims: ModelDimensions) -> list[str]:
    """Return the places of all attention layers, in the order of the forward pass."""
    places = [f"encoder.{i}.self" for i in range(dims.n_audio_layer)]
    for i in range(dims.n_text_layer):
        places += [f"decoder.{i}.self", f"decoder.{i}.cross"]
    return places


def names(dims: ModelDimensions) -> list[str]:
    """Return all names that encoder and decoder record, under any policy."""
    found = [f"{place}.{quantity}" for place in attention_places(dims) for quantity in ATTENTION]
    for part, n_layers in (("encoder", dims.n_audio_layer), ("decoder", dims.n_text_layer)):
        found += [f"{part}.{layer}.residual" for layer in ("input", *range(n_layers))]
    return found


class Keeper:
    """Recorder that keeps the tensors whose names match its patterns, for one forward pass.

    patterns: names with * as wildcard: "decoder.*.cross.weights"
    kept:     name → tensor
    """

    def __init__(self, dims: ModelDimensions, *patterns: str):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names(dims)):
                raise OptionError(
                    f"a name to record must be like {names(dims)[0]}, "
                    f"{names(dims)[-1]} or decoder.*.cross.weights, got {pattern!r}"
                )
        self.patterns = patterns
        self.kept: dict[str, Tensor] = {}
        self._expected = [name for name in names(dims) if self._wants(name)]

    def _wants(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __call__(self, place: str, quantity: str, tensor: Tensor) -> None:
        name = f"{place}.{quantity}"
        if not self._wants(name):
            return
        if name in self.kept:
            raise OptionError(f"a keeper is for one pass, got {name} a second time")
        self.kept[name] = tensor.clone() if quantity == "values" else tensor

    @property
    def missing(self) -> list[str]:
        """Names that match a pattern but were not recorded."""
        return [name for name in self._expected if name not in self.kept]


def both(*recorders: Recorder) -> Recorder:
    """Combine recorders into one that calls all of them."""

    def record(place: str, quantity: str, tensor: Tensor) -> None:
        for recorder in recorders:
            recorder(place, quantity, tensor)

    return record
