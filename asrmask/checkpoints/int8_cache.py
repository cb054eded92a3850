"""Int8 models in the cache folder: quantizing takes several times as long as reading them.

A safetensors file for each file or folder that weights come from. Its metadata says what it was
made from and how (the signature), so that it is made again when that changes. Tensors are mapped
into memory, not copied: processes with the same model share them.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import safetensors
import torch

from asrmask import kernels
from asrmask.files import atomic_write
from asrmask.model import int8
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.quantization import empty_like_quantized
from asrmask.model.virtual_padding import cache_folder
from asrmask.transcription.api import TranscribingWhisper

VERSION = 3  # part of the signature: change it when quantizing gives other weights
DTYPES = {torch.float32: "F32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
ALIGNMENT = 64  # bytes of a cache line; the sizes of weights are multiples of it
FOLDERS = (".", "onnx")  # in a folder of weights
SUFFIXES = {".bin", ".json", ".onnx", ".safetensors"}


@dataclass(frozen=True)
class Entry:
    """The place of a model in the cache folder, and what it must have been made from."""

    file: Path
    signature: str


def entry(source: Path, name: str, adapter: Path | None = None) -> Entry | None:
    """The entry of a file or folder of weights. None: there are none, or there is no cache folder.

    name:    official name, or "" (official models have alignment heads that are not in the file)
    adapter: file of an adapter that is merged into the weights; None: none
    """
    try:
        source = source.resolve()
        added = [] if adapter is None else [adapter.resolve()]
        stats = [(str(path.resolve()), path.stat()) for path in (*_files(source), *added)]
        key = " ".join(map(str, (name, source, *added)))
        digest = hashlib.sha256(key.encode(errors="surrogateescape"))
        file = cache_folder() / f"int8-{digest.hexdigest()[:32]}.safetensors"
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, or no home
        return None
    # with the time of change (ctime), because copying can keep that of writing (mtime)
    files = [(path, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats]
    made_by = VERSION, torch.__version__, kernels.available(), int8.max_weight()
    return Entry(file, json.dumps([made_by, files])) if len(files) > len(added) else None


def _files(source: Path) -> Iterator[Path]:
    """The files that a file or folder of weights consists of."""
    if source.is_file():
        yield source
    for folder in FOLDERS:
        for path in sorted((source / folder).glob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


def load(entry: Entry) -> TranscribingWhisper | None:
    """The model of an entry. None: it is not there, made from something else, or damaged."""
    try:
        with safetensors.safe_open(entry.file, framework="pt") as stored:
            about = stored.metadata()
            if about["signature"] != entry.signature:
                return None
            weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        with torch.device("meta"):
            model = TranscribingWhisper(ModelDimensions.of(json.loads(about["dimensions"])))
            empty_like_quantized(model)
        for name, expected in model.state_dict().items():
            if weights[name].dtype != expected.dtype:
                return None
        model.load_state_dict(weights, assign=True)
        heads = json.loads(about["alignment_heads"])
        model.alignment_heads = tuple((int(layer), int(head)) for layer, head in heads)
    except Exception:  # a damaged file can raise anything
        return None
    return model.requires_grad_(False).eval()


def save(entry: Entry, model: TranscribingWhisper) -> None:
    """Write a model. Nothing happens if the folder cannot be written."""
    about = {
        "signature": entry.signature,
        "dimensions": json.dumps(model.dims.as_dict()),
        "alignment_heads": json.dumps(model.alignment_heads),
    }
    try:
        entry.file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(entry.file, binary=True) as file:
            _write(file, model.state_dict(), about)
    except OSError:
        pass


def _write(file: BinaryIO, weights: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """Write a safetensors file: the size of the header, the header (JSON), the data.

    The package's own function would copy all weights, and not align them.
    """
    # the widest types first, so that all are aligned to their own size
    ordered = sorted(weights.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": about}
    end = 0
    for name, weight in ordered:
        start, end = end, end + weight.nbytes
        kind, shape = DTYPES[weight.dtype], list(weight.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, weight in ordered:
        file.write(weight.contiguous().numpy().data)
