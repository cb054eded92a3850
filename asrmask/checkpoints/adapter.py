"""Adapter files: small additions to a model's weights, as `asrmask train` writes them.

A safetensors file with the tensors of model/lora.py. Its metadata names the weights that it was
trained on (their sha256) and the settings of the training. Other weights are refused.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from asrmask.checkpoints.checkpoint import Checkpoint, reading
from asrmask.errors import CheckpointError
from asrmask.files import atomic_write
from asrmask.model import lora
from asrmask.model.whisper import sha256_of_weights

FORMAT = "asrmask adapter 1"


@dataclass(frozen=True)
class Adapter:
    """The content of an adapter file.

    tensors:     see model/lora.py
    scale:       of the low-rank products
    base_sha256: of the weights that it belongs to (whisper.py:sha256_of_weights)
    settings:    of the training, for the reader
    """

    tensors: dict[str, Tensor]
    scale: float
    base_sha256: str
    settings: dict[str, Any] = field(default_factory=dict)


def read(path: Path) -> Adapter:
    """Read an adapter file."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, expected an adapter of asrmask train")
    with reading(path, "an adapter of asrmask train"):
        with safetensors.safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                got = about.get("format", "no format")
                raise CheckpointError(f"expected an adapter in the format {FORMAT!r}, got {got}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        settings = json.loads(about["settings"])
        return Adapter(tensors, float(about["scale"]), about["base_sha256"], settings)


def write(path: Path, adapter: Adapter) -> None:
    """Write an adapter file, in float16."""
    about = {
        "format": FORMAT,
        "scale": repr(adapter.scale),
        "base_sha256": adapter.base_sha256,
        "settings": json.dumps(adapter.settings),
    }
    halves = {name: t.detach().half().cpu().contiguous() for name, t in adapter.tensors.items()}
    with atomic_write(path, binary=True) as file:
        file.write(safetensors.torch.save(halves, about))


def load_onto(checkpoint: Checkpoint, path: Path) -> Adapter:
    """Read an adapter, and check that it belongs to the weights of a checkpoint."""
    adapter = read(path)
    sha256 = sha256_of_weights(checkpoint.weights)
    if adapter.base_sha256 != sha256:
        name = adapter.settings.get("model", "another model")
        raise CheckpointError(
            f"{path}: expected the weights that it was trained on ({name}, sha256 "
            f"{adapter.base_sha256[:12]}…), got others ({sha256[:12]}…)"
        )
    return adapter


def merge(checkpoint: Checkpoint, path: Path) -> None:
    """Add the adapter in a file to the weights of a checkpoint, in place."""
    adapter = load_onto(checkpoint, path)
    with reading(path, "an adapter for this model"):
        lora.merge(checkpoint.weights, adapter.tensors, adapter.scale)
