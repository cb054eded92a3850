"""Low-rank adapters (LoRA: Hu et al., 2021, arXiv:2106.09685): small additions to a frozen model.

An adapter is a dict of tensors, named after what they change:

- `NAME.lora_a` (rank, K) and `NAME.lora_b` (N, rank), for a linear layer's weight (N, K): their
  product, times the adapter's scale, is added to the weight;
- `NAME.delta`, for any other weight: it is added.

Merged, an adapter costs nothing when the model runs. While it is trained it stays beside the frozen
weights: gradients of the small matrices take less time than gradients of the weights.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrmask.errors import CheckpointError, brief

LORA_A, LORA_B, DELTA = ".lora_a", ".lora_b", ".delta"


class AdaptedLinear(nn.Linear):
    """A linear layer with a low-rank addition. The names of weight and bias stay."""

    def __init__(self, linear: nn.Linear, a: Tensor, b: Tensor, scale: float):
        """a: (rank, K); b: (N, rank)"""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_a, self.lora_b = nn.Parameter(a), nn.Parameter(b)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return F.linear(x, self.weight, self.bias) + self.scale * low


def attach(model: nn.Module, tensors: Mapping[str, Tensor], scale: float) -> None:
    """Put an adapter beside the weights of a model, in place. Deltas are added to the weights."""
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    for name in _changed(tensors, shapes):
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        weight = getattr(module, last)
        if (delta := tensors.get(name + DELTA)) is not None:
            with torch.no_grad():
                weight += delta.to(weight)
            continue
        if not isinstance(module, nn.Linear):
            raise CheckpointError(f"{name} must be of a linear layer, got {type(module).__name__}")
        parent, _, child = path.rpartition(".")
        a, b = (tensors[name + end].to(weight, copy=True) for end in (LORA_A, LORA_B))
        setattr(model.get_submodule(parent), child, AdaptedLinear(module, a, b, scale))


def merge(weights: dict[str, Tensor], tensors: Mapping[str, Tensor], scale: float) -> None:
    """Add an adapter to weights, in place. Those that change become float32 or wider."""
    for name in _changed(tensors, {name: weight.shape for name, weight in weights.items()}):
        delta = tensors.get(name + DELTA)
        if delta is None:
            delta = scale * (tensors[name + LORA_B].float() @ tensors[name + LORA_A].float())
        weight = weights[name]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        weights[name] = weight.to(dtype) + delta.to(weight.device, dtype)


def _changed(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> list[str]:
    """The names of the weights that an adapter changes. Raise CheckpointError if it cannot."""
    found: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        name, dot, last = full_name.rpartition(".")
        if name not in shapes or dot + last not in {LORA_A, LORA_B, DELTA}:
            raise CheckpointError(f"an adapter must change weights of the model, got {full_name}")
        if not tensor.is_floating_point():
            raise CheckpointError(f"{full_name} must hold floats, got {tensor.dtype}")
        found.setdefault(name, {})[dot + last] = tensor
    for name, parts in found.items():
        if not _fits(parts, shapes[name]):
            got = brief({last: tuple(tensor.shape) for last, tensor in parts.items()})
            raise CheckpointError(f"{name} is {tuple(shapes[name])}, got additions of {got}")
    return sorted(found)


def _fits(parts: Mapping[str, Tensor], shape: torch.Size) -> bool:
    """Whether additions are for a weight of that shape."""
    if set(parts) == {DELTA}:
        return parts[DELTA].shape == shape
    if set(parts) != {LORA_A, LORA_B}:
        return False
    a, b = parts[LORA_A], parts[LORA_B]
    return a.ndim == b.ndim == 2 and len(a) == b.shape[1] and (len(b), a.shape[1]) == shape
