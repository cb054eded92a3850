"""Vocabulary projection from float16 weights: half the memory traffic, the same float32 result.

Reading the weights takes most of the time of this product. OpenAI published Whisper's weights in
float16. If every weight is exactly a float16 value, FBGEMM can read float16 and compute in float32
without changing the result. Other products of the decoder gain less than 3 % and stay in float32.
"""

from typing import Any

import torch
from torch import Tensor

MAX_ROWS = 64  # with more rows, arithmetic takes longer than reading the weights


class Packed:
    """A cached float16 copy of a weight matrix, used only if the copy is exact.

    The copy is refreshed when PyTorch's version counter of the weight changes, and after any call
    with gradients. Outside of training, changes through NumPy or in place through `.data` go
    unnoticed, because they do not increase the counter.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._state = (0, 0, 0)  # identity, address and version of the weight
        self._held: Tensor | None = None  # keeps the address from being reused
        self._weights: Any = None

    def product(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """Compute x weightᵀ, (…, D) → (…, n), float32.

        None if unsupported: gradients, GPU, other dtypes, over MAX_ROWS rows, or weights that
        float16 cannot represent exactly.
        """
        if torch.is_grad_enabled() or x.dtype is not torch.float32:
            self._forget()  # fused optimizers do not increase the version counter
            return None
        if x.ndim < 2 or x.numel() > MAX_ROWS * x.shape[-1]:
            return None
        if weight.is_inference():  # has no version counter
            return None
        state = (id(weight), weight.data_ptr(), weight._version)
        if state != self._state:
            self._state, self._held, self._weights = state, weight.detach(), _packed(weight)
        if self._weights is None:
            return None
        return torch.ops.quantized.linear_dynamic_fp16(x, self._weights)

    def __deepcopy__(self, memo: object) -> "Packed":
        return Packed()  # will pack the copied weight on first use

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, ()


def _packed(weight: Tensor) -> Any:
    if (
        torch.backends.quantized.engine not in {"fbgemm", "x86"}
        or weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not weight.isfinite().all()  # FBGEMM would turn infinity into a finite number
        or not torch.equal(weight.half().float(), weight)
    ):
        return None
    return torch.ops.quantized.linear_prepack_fp16(weight, None)
