"""Int8 products and attention in C, for x86-64 processors with AVX-512 VNNI (on Linux).

The library is compiled when asrmask is installed (scripts/build.py). Where it is missing, or the
processor is another one, `available` is False and PyTorch's operations are used instead, with the
same weights. Every row of a result depends on its own input alone, whatever else is in
the batch and however many threads there are.
"""

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from asrmask.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LIBRARY = Path(__file__).with_name("kernels.so")
BLOCK = 64  # outputs, or keys, that are packed together
LANES = 16  # numbers that are computed together
HEAD_WIDTH = 64  # of every Whisper model
MAX_FRAME = 4095  # as in embedding.c
NORMALIZE, GELU, ROTATE, TWO_DIGITS = 1, 2, 4, 8  # as in layers.h
OFFSET = 128  # packed integers are unsigned: so much larger
FEW_ROWS = 64  # as in layers.h
MIN_QUERIES = 16  # for fewer, packing keys takes longer than it saves

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_TYPES = {"p": _POINTER, "i": _INT, "l": _LONG, "f": ctypes.c_float}
_ARGUMENTS = {  # as in the C code: pointers, ints, longs and floats
    "asrmask_linear": "ppp iii pl pp i",
    "asrmask_feed_forward": "ppp ppp iii pl pp i",
    "asrmask_attention": "ppp p pl p iiii i",
    "asrmask_cross_attention": "ppp ii f p ii pp p i",
    "asrmask_decoder_step": "pp ii f p ii p ii ppp i",
    "asrmask_project": "pp ii pi p i",
    "asrmask_embed": "ppp ppp ppp pl ii ppp i",
    "asrmask_embedding_memory": "l ii",
    "asrmask_refine": "pp il i f p i",
    "asrmask_choose_tokens": "pil pp i",
}


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(LIBRARY))
        # PyTorch's OpenMP library, found through the library of PyTorch that uses it
        openmp = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        parallel = openmp.GOMP_parallel
    except (OSError, AttributeError):
        return None
    if not library.asrmask_supported():
        return None
    library.asrmask_use_openmp(ctypes.cast(parallel, _POINTER))
    for name, types in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = [_TYPES[letter] for letter in types.replace(" ", "")]
        function.restype = None
    library.asrmask_embedding_memory.restype = _LONG
    return library


def available() -> bool:
    """Whether the library is there and this processor can run it."""
    return _library() is not None


def pack(integers: Tensor) -> Tensor:
    """Int8 numbers (…, N, K) as tiles are multiplied: (…, ⌈N / 64⌉, K / 4, 64, 4), unsigned."""
    n_missing = -integers.shape[-2] % BLOCK
    rows = torch.nn.functional.pad(integers, (0, 0, 0, n_missing)).view(torch.uint8) ^ OFFSET
    tiles = rows.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, 4))
    return tiles.transpose(-3, -2).contiguous()


def empty(n: int, k: int) -> Tensor:
    """Room for what `pack` makes of (n, k) integers."""
    return torch.empty(-(-n // BLOCK), k // 4, BLOCK, 4, dtype=torch.uint8)


def unpack(packed: Tensor, n: int) -> Tensor:
    """What was packed: (…, N, K) int8."""
    rows = packed.transpose(-3, -2).flatten(-2).flatten(-3, -2)[..., :n, :]
    return (rows ^ OFFSET).view(torch.int8)


def packed_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Some rows of what was packed: (…) indices → (…, K) int8."""
    return (packed[rows // BLOCK, :, rows % BLOCK].flatten(-2) ^ OFFSET).view(torch.int8)


def pad(x: Tensor) -> Tensor:
    """(N) → (64 ⌈N / 64⌉), with zeros."""
    return torch.nn.functional.pad(x, (0, -len(x) % BLOCK))


def _checked(x: Tensor) -> Tensor:
    """x, contiguous. Models that were converted or moved cannot compute with it."""
    if x.dtype != torch.float32 or not x.is_cpu:
        raise OptionError(f"int8 models must be float32 on the CPU, got {x.dtype} on {x.device}")
    return x.contiguous()


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    n: int,
    flags: int = 0,
    residual: Tensor | None = None,
) -> Tensor:
    """x (…, K) as int8 times int8 weights: (…, n), added to `residual` if that is given.

    weight, scale, bias: packed, padded, padded
    flags:               NORMALIZE x first, ROTATE blocks of 16 channels, GELU at the end; x as
                         TWO_DIGITS
    """
    x = _checked(x)
    residual = None if residual is None else _checked(residual)
    out = x.new_empty(*x.shape[:-1], n)
    k = x.shape[-1]
    library = _library()
    assert library is not None
    library.asrmask_linear(
        *(weight.data_ptr(), scale.data_ptr(), bias.data_ptr(), n, k, flags),
        *(x.data_ptr(), x.numel() // k, out.data_ptr()),
        None if residual is None else residual.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def feed_forward(
    x: Tensor,
    up: tuple[Tensor, Tensor, Tensor],
    down: tuple[Tensor, Tensor, Tensor],
    flags: int = 0,
) -> Tensor:
    """x + down(gelu(up(normalized x))): (…, K) → (…, K)

    up, down: weight, scale and bias
    flags:    TWO_DIGITS or none
    """
    x = _checked(x)
    out = torch.empty_like(x)
    n, k = len(up[1]), x.shape[-1]
    n_rows = x.numel() // k
    wide = x.new_empty(n_rows, n) if n_rows <= FEW_ROWS else None
    library = _library()
    assert library is not None
    library.asrmask_feed_forward(
        *(tensor.data_ptr() for tensor in (*up, *down)),
        *(n, k, flags, x.data_ptr(), n_rows, out.data_ptr()),
        None if wide is None else wide.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor | None:
    """softmax(q kᵀ / √d + mask) v in 16-bit integers: (B, H, Q, d), (B, H, K, d) → (B, H, Q, d).

    mask: as in `attend`, the same for all heads and queries
    None if unsupported: few queries, heads of other widths, other dtypes, a mask of queries, no
    library
    """
    n_clips, n_head, n_queries, width = q.shape
    n_keys = k.shape[2]
    library = _library()
    strides = (*q.stride(), *k.stride())
    if (
        library is None
        or width != HEAD_WIDTH
        or n_queries < MIN_QUERIES
        or q.dtype != torch.float32
        or (strides[3], strides[7]) != (1, 1)
        or k.stride() != v.stride()
        or (mask is not None and (mask.shape[1:] != (1, 1, n_keys) or len(mask) > n_clips))
    ):
        return None
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    mask = None if mask is None else mask.contiguous()
    out = q.new_empty(n_clips, n_queries, n_head, width)
    library.asrmask_attention(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr()),
        (_LONG * 6)(*strides[:3], *strides[4:7]),
        None if mask is None else mask.data_ptr(),
        0 if mask is None or len(mask) == 1 else n_keys,
        *(out.data_ptr(), n_clips, n_head, n_queries, n_keys, torch.get_num_threads()),
    )
    return out.transpose(1, 2)


class PackedFeatures:
    """Int8 features of clips with equally many positions, packed for `cross_attention`.

    keys:   (B, ⌈K / 64⌉, D / 4, 64, 4), positions as outputs
    values: (B, D / 64, 16 ⌈K / 64⌉, 64, 4), channels as outputs
    bias:   (1 or B, 64 ⌈K / 64⌉), −∞ for what is hidden
    n_keys: K
    """

    def __init__(self, keys: Tensor, values: Tensor, bias: Tensor, n_keys: int):
        self.keys, self.values, self.bias, self.n_keys = keys, values, bias, n_keys

    @classmethod
    def of(cls, features: Tensor, mask: Tensor | None) -> "PackedFeatures":
        """features: (B, K, D) int8; mask: (1 or B, 1, 1, K) bool or bias"""
        n_keys = features.shape[1]
        n_missing = -n_keys % BLOCK
        if mask is None:
            bias = torch.zeros(1, n_keys)
        elif mask.dtype == torch.bool:
            bias = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)[:, 0, 0]
        else:
            bias = mask[:, 0, 0].float()
        bias = torch.nn.functional.pad(bias, (0, n_missing), value=-torch.inf)
        padded = torch.nn.functional.pad(features, (0, 0, 0, n_missing))
        return cls(pack(padded), pack(padded.mT), bias.contiguous(), n_keys)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the same features as keys of one head: (B, 1, K, D)."""
        return len(self.keys), 1, self.n_keys, 4 * self.keys.shape[2]

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, clips: slice) -> "PackedFeatures":
        bias = self.bias if len(self.bias) == 1 else self.bias[clips]
        return PackedFeatures(self.keys[clips], self.values[clips], bias, self.n_keys)

    def unpack(self) -> Tensor:
        """The features: (B, K, D) int8."""
        return unpack(self.keys, self.n_keys)

    def clips(self) -> "Sequence[int]":
        """What a Clip of cross_attention.c holds, for every clip: addresses, number of keys."""
        first, n_bytes = self.keys.data_ptr(), self.keys.stride(0)
        values, bias = self.values.data_ptr(), self.bias.data_ptr()
        step = 4 * self.bias.stride(0) if len(self.bias) > 1 else 0
        n_keys = self.bias.shape[1]
        return [
            x
            for i in range(len(self.keys))
            for x in (first + i * n_bytes, values + i * n_bytes, bias + i * step, n_keys)
        ]


def cross_attention(
    q: Tensor,
    groups: "Sequence[PackedFeatures]",
    inward: Tensor,
    outward: Tensor,
    bias: Tensor,
    step: float,
) -> Tensor:
    """Attention of all heads to features, (B, H, Q, d) → (B, H, Q, d).

    inward, outward: projections of heads from and to d channels, (H, d, D) and (H, D, d), float16
    bias:            of the outputs, (H, d)
    step:            what 1 in the features stands for
    """
    n_clips, n_head, n_queries, width = q.shape
    clips = [x for group in groups for x in group.clips()]
    out = q.new_empty(n_clips, n_queries, n_head, width)
    library = _library()
    assert library is not None
    strides = q.stride()
    assert strides[3] == 1
    library.asrmask_cross_attention(
        *(inward.data_ptr(), outward.data_ptr(), bias.data_ptr(), n_head, inward.shape[-1], step),
        *((_LONG * len(clips))(*clips), n_clips, n_queries),
        *(q.data_ptr(), (_LONG * 3)(*strides[:3]), out.data_ptr(), torch.get_num_threads()),
    )
    return out.transpose(1, 2)


class Addresses:
    """Addresses of tensors, in the order in which a struct of the C code lists them."""

    def __init__(self, tensors: "Iterable[Tensor]"):
        self.tensors = tuple(tensors)  # kept as long as their addresses
        self.array = (_LONG * len(self.tensors))(*(tensor.data_ptr() for tensor in self.tensors))


def decoder_step(
    tokens: Tensor,
    table: Addresses,
    layers: Addresses,
    features: "Sequence[PackedFeatures]",
    cache: "Sequence[Tensor]",
    length: int,
    step: float,
) -> Tensor:
    """One token of every text through all layers and the last layer norm: (B·G, 1) → (B·G, 1, D).

    table, layers: what decoder.c has in an Embedding, and in a Layer for each layer
    features:      of B clips
    cache:         of each layer, keys and values of the text, (B·G, H, capacity, d), extended here
    length:        of the texts in the cache
    step:          what 1 in the features stands for
    """
    clips = [address for group in features for address in group.clips()]
    n_clips = len(clips) // 4
    n_texts, n_head, capacity, width = cache[0].shape
    tokens = tokens.contiguous()
    x = _checked(cache[0].new_empty(n_texts, 1, n_head * width))
    memory = x.new_empty(9 * x.numel())
    library = _library()
    assert library is not None
    library.asrmask_decoder_step(
        *(table.array, layers.array, len(cache) // 2, n_head, step),
        *((_LONG * len(clips))(*clips), n_clips, n_texts // n_clips),
        *((_LONG * len(cache))(*(tensor.data_ptr() for tensor in cache)), capacity, length),
        *(tokens.data_ptr(), x.data_ptr(), memory.data_ptr(), torch.get_num_threads()),
    )
    return x


def project(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (R, K) times weight (K, N), float16, plus bias (N): (R, N). N is a multiple of 64."""
    x = _checked(x)
    out = x.new_empty(len(x), len(bias))
    library = _library()
    assert library is not None
    library.asrmask_project(
        *(weight.data_ptr(), bias.data_ptr(), len(bias), x.shape[1]),
        *(x.data_ptr(), len(x), out.data_ptr(), torch.get_num_threads()),
    )
    return out


def refine(logits: Tensor, x: Tensor, table: Tensor, margin: float) -> None:
    """Compute the largest logits of each row again, in place: those within `margin` of the first.

    logits: (R, n_vocab); x: (R, D), what they come from; table: (n_vocab, D) float16
    """
    x = _checked(x)
    library = _library()
    assert library is not None
    library.asrmask_refine(
        *(table.data_ptr(), x.data_ptr(), *logits.shape, x.shape[1], margin),
        *(logits.data_ptr(), torch.get_num_threads()),
    )


def choose_tokens(logits: Tensor) -> tuple[list[int], list[float]]:
    """The likeliest token of each row (R, n_vocab), and the logarithm of its probability."""
    logits = _checked(logits)
    tokens = torch.zeros(len(logits), dtype=torch.int64)
    sums = logits.new_empty(len(logits))
    library = _library()
    assert library is not None
    library.asrmask_choose_tokens(
        *(logits.data_ptr(), *logits.shape, tokens.data_ptr(), sums.data_ptr()),
        torch.get_num_threads(),
    )
    return tokens.tolist(), [-math.log(x) for x in sums.tolist()]


def pack_taps(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A convolution's weight (N, K, taps) as `embed` reads it, (taps, N / 64, K / 2, 64, 2) int16.

    Also returns the scale of each of N. N must be a multiple of 64, and K one of 16.
    """
    n, k, _ = weight.shape
    most = min((2**31 - 1) // (MAX_FRAME * k), MAX_FRAME)  # sums of K products fit 32 bits
    scale = weight.abs().amax(dim=(1, 2)).clamp(min=1e-30) / most
    integers = (weight / scale[:, None, None]).round().to(torch.int16)
    pairs = integers.permute(2, 0, 1).unflatten(1, (n // BLOCK, BLOCK)).unflatten(-1, (k // 2, 2))
    return pairs.transpose(2, 3).contiguous(), scale


def empty_taps(n: int, k: int, n_taps: int) -> Tensor:
    """Room for what `pack_taps` makes of (n, k, taps) weights."""
    return torch.empty(n_taps, n // BLOCK, k // 2, BLOCK, 2, dtype=torch.int16)


def embed(frames: Tensor, weights: "Sequence[Tensor]", positions: Tensor) -> Tensor:
    """The encoder's input: two convolutions with GELU, rotated, and the position codes added.

    frames:    (N, n_mels)
    weights:   weight, scale and bias of each convolution, and of the rotation (a bias of zeros)
    positions: (⌈N / 2⌉, D)
    returns (⌈N / 2⌉, D)
    """
    frames, positions = _checked(frames), _checked(positions)
    (n_frames, n_mels), n = frames.shape, positions.shape[1]
    library = _library()
    assert library is not None
    n_bytes = library.asrmask_embedding_memory(n_frames, n_mels, n)
    memory, out = torch.empty(n_bytes, dtype=torch.uint8), torch.empty_like(positions)
    library.asrmask_embed(
        *(tensor.data_ptr() for tensor in weights),
        *(frames.data_ptr(), n_frames, n_mels, n, positions.data_ptr()),
        *(out.data_ptr(), memory.data_ptr(), torch.get_num_threads()),
    )
    return out
