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
    """A weight matrix, stored as float16 beside itself if that loses nothing.

    It follows every change that PyTorch counts, and what training does. Writing through `.data` or
    NumPy outside of training is not counted, so not seen.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._state = (0, 0, 0)  # identity, address and version of the weight
        self._held: Tensor | None = None  # its memory, so that no other comes to that address
        self._weights: Any = None

    def product(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """x weightᵀ, (…, D) → (…, n); None if this is not the way.

        It is not where gradients are wanted, on a GPU, in another precision, with many rows, or
        with weights that are no float16 values.
        """
        if torch.is_grad_enabled() or x.dtype is not torch.float32:
            self._forget()  # fused optimizers change weights uncounted
            return None
        if x.ndim < 2 or x.numel() > MOST_ROWS * x.shape[-1]:
            return None
        if weight.is_inference():  # its changes are not counted
            return None
        state = (id(weight), weight.data_ptr(), weight._version)
        if state != self._state:
            self._state, self._held, self._weights = state, weight.detach(), _packed(weight)
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
        or not weight.isfinite().all()  # packing would make infinity a number
        or not torch.equal(weight.half().float(), weight)
    ):
        return None
    return torch.ops.quantized.linear_prepack_fp16(weight, None)
