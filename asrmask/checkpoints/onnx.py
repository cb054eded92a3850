"""Read ONNX exports of optimum and transformers.js: config.json and two .onnx files.

A file is a protobuf message: a model holds a graph; a graph holds nodes and tensors (initializers).
Only the tensors and the inputs of matrix products are read, so no package is needed.

Biases, norms, convolutions and embeddings have the hub's names. Matrices have numbers for names,
but the node that multiplies by one is named after its module. They are stored transposed.
"""

import mmap
import re
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrmask.checkpoints import hub
from asrmask.checkpoints.checkpoint import Checkpoint, read_alignment_heads, reading
from asrmask.errors import CheckpointError, brief

FOLDERS = (".", "onnx")
VARIANTS = ("", "_fp16", "_quantized", "_int8", "_uint8")  # of file names, the most exact first
DECODERS = ("decoder_model_merged", "decoder_model")

# field numbers in onnx.proto
GRAPH = 7  # of a model
NODE, INITIALIZER = 1, 5  # of a graph
INPUT, NODE_NAME, OPERATOR, ATTRIBUTE = 1, 3, 4, 5  # of a node
BRANCH = 6  # of an attribute: the graph of a branch
DIMS, TYPE, FLOATS, INTEGERS, NAME, RAW, LOCATION = 1, 2, 4, 5, 8, 9, 14  # of a tensor
FIXED_BYTES = {1: 8, 5: 4}  # protobuf's wire type → bytes of a value
MAX_FIELDS = 100_000  # in a node or tensor; the largest have a hundred
MAX_RANK = 8  # of a tensor; the largest have 3
MAX_NAME_BYTES = 1000
MAX_TENSORS = 100_000  # in a file; the largest model's has 2,500
DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    10: torch.float16,
    16: torch.bfloat16,
}
PRODUCTS = {"MatMul", "MatMulInteger"}
MERGED = re.compile(r"_merged_\d+$")  # in names of tensors that both branches of a decoder use

Message = dict[int, list[Any]]  # field number → its values, integers and bytes


class Place(NamedTuple):
    """Where a weight is stored."""

    tensor: str
    transposed: bool


def is_onnx(folder: Path) -> bool:
    """True if a folder has ONNX files, but no safetensors, which would be exact."""
    return _files(folder) is not None and not any(folder.glob("model.safetensors*"))


def _files(folder: Path) -> dict[str, Path] | None:
    """Return the files of the encoder and the decoder, or None."""
    for parent in (folder / name for name in FOLDERS):
        for variant in VARIANTS:
            for decoder in DECODERS:
                names = {"encoder": f"encoder_model{variant}", "decoder": f"{decoder}{variant}"}
                files = {part: parent / f"{name}.onnx" for part, name in names.items()}
                if all(file.is_file() for file in files.values()):
                    return files
    return None


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint from a folder. Quantised weights are converted to floats."""
    dims = hub.dimensions(folder)
    weights: dict[str, Tensor] = {}
    for part, path in (_files(folder) or {}).items():
        with reading(path, "an ONNX model"), path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            weights |= {hub.renamed(name): value for name, value in _weights(data, part)}
    return Checkpoint(dims, weights, read_alignment_heads(folder / "generation_config.json", dims))


def _weights(data: memoryview, part: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the hub's names and the values of the weights of a model."""
    tensors, products = _scan(data)
    places = {}
    for name in tensors:
        stem = MERGED.sub("", name.removesuffix("_quantized"))
        if stem.endswith((".weight", ".bias")):
            places[_hub_name(stem, part)] = Place(name, transposed=False)
    for node, operand in products.items():
        module = re.sub(r"/MatMul(_quant)?$", "", node).strip("/").replace("/", ".")
        if operand in tensors:
            places[_hub_name(f"{module}.weight", part)] = Place(operand, transposed=True)
    places.pop(f"{part}.proj_out.weight", None)  # tied to the token embedding
    # a node takes few bytes and may refer to any tensor, so check the sum
    n_elements = sum(prod(_shape(tensors[place.tensor])) for place in places.values())
    if n_elements > 2 * len(data):
        raise ValueError(f"{n_elements} elements in {len(data)} bytes")
    for name, place in places.items():
        yield name, _dequantize(place, tensors)


def _hub_name(name: str, part: str) -> str:
    """Return the hub's name of a weight or module.

    >>> _hub_name("model.decoder.layers.0.fc1.bias", "decoder"), _hub_name("conv1.bias", "encoder")
    ('decoder.layers.0.fc1.bias', 'encoder.conv1.bias')
    """
    return f"{part}.{name.removeprefix('model.').removeprefix(f'{part}.')}"


def _scan(model: memoryview) -> tuple[dict[str, Message], dict[str, str]]:
    """Return tensors by name, and the second operands of matrix products by the node's name.

    A merged decoder has two branches, with and without cached keys, that use the same tensors.
    """
    graphs = [value for number, value in _fields(model) if number == GRAPH]
    tensors: dict[str, Message] = {}
    products: dict[str, str] = {}
    for graph in graphs:  # grows
        for number, value in _fields(graph):
            if number == INITIALIZER:
                tensor = _message(value)
                tensors[_text(tensor[NAME])] = tensor
            elif number == NODE:
                node = _message(value)
                if _text(node[OPERATOR]) in PRODUCTS and len(node[INPUT]) > 1:
                    products[_text(node[NODE_NAME])] = _text(node[INPUT][1:2])
                graphs += [g for a in node[ATTRIBUTE] for n, g in _fields(a) if n == BRANCH]
            if max(len(tensors), len(products), len(graphs)) > MAX_TENSORS:
                raise ValueError(f"more than {MAX_TENSORS} tensors")
    return tensors, products


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and values, integers or bytes, of the fields of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire_type = key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire_type == 2:
            n, at = _varint(data, at)
        elif wire_type in FIXED_BYTES:
            n = FIXED_BYTES[wire_type]
        else:
            raise ValueError(f"a field of wire type {wire_type}")
        if n > len(data) - at:
            raise ValueError(f"a field of {n} bytes, with {len(data) - at} left")
        yield key >> 3, data[at : at + n]
        at += n


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after it."""
    value = 0
    for i, byte in enumerate(data[at : at + 10]):  # 7 bits a byte, the lowest first
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise ValueError("an integer without an end")


def _message(data: memoryview) -> Message:
    """Return the fields of a node or tensor."""
    found: Message = defaultdict(list)
    for i, (number, value) in enumerate(_fields(data)):
        if i == MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} fields")
        found[number].append(value)
    return found


def _text(values: list[Any]) -> str:
    """Return the last of repeated names, which is the one that counts."""
    name = values[-1] if values else b""
    if len(name) > MAX_NAME_BYTES:
        raise ValueError(f"a name of {len(name)} bytes")
    return bytes(name).decode()


def _integers(values: list[Any]) -> list[int]:
    """Return repeated integers, which may be packed, as signed numbers."""
    found: list[int] = []
    for value in values:
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value) and len(found) < MAX_FIELDS:
            number, at = _varint(value, at)
            found.append(number)
    return [number - 2**64 if number >= 2**63 else number for number in found]


def _shape(tensor: Message) -> list[int]:
    shape = _integers(tensor[DIMS])
    if len(shape) > MAX_RANK or min(shape, default=0) < 0:
        raise ValueError(f"a shape of {brief(shape)}")
    return shape


def _dequantize(place: Place, tensors: dict[str, Message]) -> Tensor:
    """Return (values - zero point) * scale, with one scale for a tensor or for each row."""
    value = _values(place.tensor, tensors)
    if place.transposed:
        value = value.t()
    if value.is_floating_point():
        return value
    stem = place.tensor.removesuffix("_quantized")
    scale, zero_point = (
        _values(f"{stem}_{kind}", tensors).flatten().float() for kind in ("scale", "zero_point")
    )
    for numbers in (scale, zero_point):
        if len(numbers) not in {1, *value.shape[:1]}:
            shape = brief(tuple(value.shape))
            raise ValueError(f"{len(numbers)} scales of {brief(stem)}, which is {shape}")
    column = (-1, *[1] * (value.ndim - 1))
    return (value.float() - zero_point.view(column)) * scale.view(column)


def _values(name: str, tensors: dict[str, Message]) -> Tensor:
    tensor = tensors[name]
    shape, code = _shape(tensor), (tensor[TYPE] or [0])[-1]
    if code not in DTYPES:
        raise CheckpointError(f"{brief(name)} must be floats or 8 bits, got ONNX type {code}")
    if any(tensor[LOCATION]):
        raise CheckpointError(f"expected {brief(name)} in this file, got a reference to another")
    dtype = DTYPES[code]
    if tensor[INTEGERS]:
        return torch.tensor(_integers(tensor[INTEGERS]), dtype=dtype).view(shape)
    data = bytearray().join(tensor[RAW] or tensor[FLOATS])
    if len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes of {dtype} for {brief(name)}, {brief(shape)}")
    return torch.frombuffer(data, dtype=dtype).view(shape)
