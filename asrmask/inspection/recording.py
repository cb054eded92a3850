"""Record tensors inside the model: places, quantities and shapes.

`model.encode`, `encoding.encode`, `model.logits` and the decoder call a function `record` with a
place, a quantity and a tensor, layer by layer, during the normal forward pass. Place and quantity
together form a name, such as "decoder.2.cross.weights":

| place                                           | quantities                         |
|-------------------------------------------------|------------------------------------|
| encoder.N.self, decoder.N.self, decoder.N.cross | scores, weights, values, outputs   |
| encoder.input, decoder.input                    | residual, before the first layer   |
| encoder.N, decoder.N                            | residual, after layer N            |

| quantity | shape        | meaning                                                     |
|----------|--------------|-------------------------------------------------------------|
| scores   | (B, H, Q, K) | q kᵀ / √d after the mask: −inf where hidden, or plus a bias |
| weights  | (B, H, Q, K) | softmax of the scores: each row sums to 1                   |
| values   | (B, H, K, d) | value vectors                                               |
| outputs  | (B, H, Q, d) | weighted mean of the values, before the output projection   |
| residual | (B, Q, D)    | residual stream                                             |

The keys, labelled by `key_labels.KeyLabels`, are the window's 1500 positions, except:
- `trim`: only the positions that are computed
- cross-attention: without the keys at both ends that are hidden from all clips
  (`CrossAttentionCache.origin` is the position of the first key, and `sink` the number of keys at
  the end that are the window's last positions)
- `virtual`: the clip's own keys, then averages that represent several positions each. The score
  includes the log of their number, so the weight is the mass of all of them
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


def recorded_names(dims: ModelDimensions) -> list[str]:
    """Return all names that encoder and decoder record, under any policy."""
    names = [f"{place}.{quantity}" for place in attention_places(dims) for quantity in ATTENTION]
    for part, n_layers in (("encoder", dims.n_audio_layer), ("decoder", dims.n_text_layer)):
        names += [f"{part}.{layer}.residual" for layer in ("input", *range(n_layers))]
    return names


class ActivationCache:
    """Recorder that stores the tensors whose names match its patterns, for one forward pass.

    patterns: names with * as wildcard: "decoder.*.cross.weights"
    tensors:  name → tensor
    """

    def __init__(self, dims: ModelDimensions, *patterns: str):
        names = recorded_names(dims)
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise OptionError(
                    f"a name to record must be like {names[0]}, {names[-1]} or "
                    f"decoder.*.cross.weights, got {pattern!r}"
                )
        self.patterns = patterns
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, place: str, quantity: str, tensor: Tensor) -> None:
        name = f"{place}.{quantity}"
        if not any(fnmatchcase(name, pattern) for pattern in self.patterns):
            return
        if name in self.tensors:
            raise OptionError(f"an ActivationCache is for one pass, got {name} a second time")
        self.tensors[name] = tensor.clone() if quantity == "values" else tensor


def combine_recorders(*recorders: Recorder) -> Recorder:
    """Return a recorder that calls all of these."""

    def record(place: str, quantity: str, tensor: Tensor) -> None:
        for recorder in recorders:
            recorder(place, quantity, tensor)

    return record
