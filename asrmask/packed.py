"""The product with the vocabulary, which waits for memory: half the bytes, the same numbers.

OpenAI published Whisper's weights in float16. Where every weight is a float16 value, FBGEMM reads
it as such and computes in float32: the exact float32 product for half the traffic. (For the
decoder's small products it gained less than 3 %, so they are left as they are.)
"""

from typing import Any

import torch
from torch import Tensor

MOST_ROWS = 64  # with more, arithmetic counts, not memory


class Packed:
    """A weight matrix, stored as float16 beside itself if that loses nothing."""

    def __init__(self) -> None:
        self._state = (0, 0)
        self._weights: Any = None

    def product(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """x weightᵀ, (…, D) → (…, n); None if this is not the way.

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
        state = (weight.data_ptr(), weight._version)
        if state != self._state:
            self._state, self._weights = state, _packed(weight)
        if self._weights is None:
            return None
        return torch.ops.quantized.linear_dynamic_fp16(x, self._weights)

    def __deepcopy__(self, memo: object) -> "Packed":
        return Packed()  # packed again from the copy

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, ()


def _packed(weight: Tensor) -> Any:
    if (
        torch.backends.quantized.engine not in {"fbgemm", "x86"}
        or weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not torch.equal(weight.half().float(), weight)
    ):
        return None
    return torch.ops.quantized.linear_prepack_fp16(weight, None)
