"""Matrix products with few rows, which wait for memory: half the bytes, the same numbers.

OpenAI published Whisper's weights in float16. Where every weight of a product is a float16 value,
FBGEMM reads it as such and computes in float32: the exact float32 product for half the traffic.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_ROWS = 64  # with more, arithmetic counts, not memory
linear_dynamic_fp16 = torch.ops.quantized.linear_dynamic_fp16.default


class Packed:
    """One or several layers' weights, stacked and stored as float16 if that loses nothing."""

    def __init__(self) -> None:
        self._state: list[int] = []
        self._weights: Any = None

    def product(self, x: Tensor, *layers: nn.Module) -> Tensor | None:
        """The layers' outputs side by side, (…, sum of widths); None if this is not the way.

        It is not where gradients are wanted, on a GPU, in another precision, with many rows, or
        with weights that are no float16 values.
        """
        if (
            x.dtype is not torch.float32
            or x.numel() > MOST_ROWS * x.shape[-1]
            or torch.is_grad_enabled()
        ):
            return None
        # in-place changes count up a tensor's version: what is packed is never stale
        state = []
        for layer in layers:
            weight: Any = layer._parameters["weight"]
            state += [weight.data_ptr(), weight._version]
        if state != self._state:
            self._state, self._weights = state, _packed(layers)
        if self._weights is None:
            return None
        return linear_dynamic_fp16(x, self._weights)

    def __deepcopy__(self, memo: object) -> "Packed":
        return Packed()  # packed again from the copy

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, ()


def _packed(layers: Sequence[nn.Module]) -> Any:
    weight = torch.cat([cast("Tensor", layer.weight) for layer in layers])
    if (
        torch.backends.quantized.engine not in {"fbgemm", "x86"}
        or weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not torch.equal(weight.half().float(), weight)
    ):
        return None
    biases = []
    for layer in layers:
        bias = getattr(layer, "bias", None)
        biases.append(weight.new_zeros(len(cast("Tensor", layer.weight))) if bias is None else bias)
    return torch.ops.quantized.linear_prepack_fp16(weight, torch.cat(biases))


class Linear(nn.Linear):
    """nn.Linear, by the packed product where that is the way."""

    def __init__(self, n_in: int, n_out: int, bias: bool = True):
        super().__init__(n_in, n_out, bias)
        self.packed = Packed()

    def forward(self, x: Tensor) -> Tensor:
        out = self.packed.product(x, self)
        return F.linear(x, self.weight, self.bias) if out is None else out
