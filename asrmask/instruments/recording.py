"""What can be recorded inside the model: where, what, and in which shape.

`model.encode`, `encoding.encode`, `model.logits` and the decoder take `record`, which is called
with a place, a quantity and a tensor, layer by layer, while the usual forward pass goes on. A name
is both, "decoder.2.cross.weights":

| place            | who attends to what                    | quantities                         |
|------------------|----------------------------------------|------------------------------------|
| encoder.N.self   | audio positions to audio positions     | scores, weights, values, outputs   |
| decoder.N.self   | text to text                           | the same                           |
| decoder.N.cross  | text to audio positions                | the same                           |
| encoder.N        |                                        | residual, as layer N leaves it     |
| decoder.N        |                                        | the same                           |
| encoder.input, decoder.input |                            | residual, before the first layer   |

| quantity | shape        | what                                                              |
|----------|--------------|-------------------------------------------------------------------|
| scores   | (B, H, Q, K) | q kᵀ / √d with the mask: −inf where it hides, or plus a bias      |
| weights  | (B, H, Q, K) | softmax of the scores: each row sums to 1                         |
| values   | (B, H, K, d) | what the weights average                                          |
| outputs  | (B, H, Q, d) | each head's average, before the output projection                 |
| residual | (B, Q, D)    | the stream that layers add to                                     |

Keys are all of the window's 1500 positions, but: under `trim` those that exist; in cross-attention
without the stretches that a mask hides from everyone (`Memory.origin` says where it begins); and
under `virtual` the clip's own keys, followed by averages that stand for several positions each. In
those the count is part of the score, so that a weight is the mass of all positions that the key
stands for. `ground.Ground` says which key is what.
"""

from fnmatch import fnmatchcase

from torch import Tensor

from asrmask.attention import Recorder
from asrmask.errors import OptionError
from asrmask.model import ModelDimensions

ATTENTION = ("scores", "weights", "values", "outputs")


def attention_places(dims: ModelDimensions) -> list[str]:
    """Every attention of a model, in the order of the forward pass."""
    places = [f"encoder.{i}.self" for i in range(dims.n_audio_layer)]
    for i in range(dims.n_text_layer):
        places += [f"decoder.{i}.self", f"decoder.{i}.cross"]
    return places


def names(dims: ModelDimensions) -> list[str]:
    """Every name that a pass through encoder and decoder records, whatever the policy."""
    found = [f"{place}.{quantity}" for place in attention_places(dims) for quantity in ATTENTION]
    for part, n_layers in (("encoder", dims.n_audio_layer), ("decoder", dims.n_text_layer)):
        found += [f"{part}.{layer}.residual" for layer in ("input", *range(n_layers))]
    return found


class Keeper:
    """A recorder that keeps what its patterns name, of one pass.

    patterns: names, with * for any part: "decoder.*.cross.weights"
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
        """The names asked for that recorded nothing."""
        return [name for name in self._expected if name not in self.kept]


def both(*recorders: Recorder) -> Recorder:
    """A recorder that hands everything to each of these."""

    def record(place: str, quantity: str, tensor: Tensor) -> None:
        for recorder in recorders:
            recorder(place, quantity, tensor)

    return record
