"""What every reader of a file format gives back, and the model made from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrmask.errors import CheckpointError, one_line
from asrmask.model import ModelDimensions, Whisper

Heads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Checkpoint:
    """Weights under openai-whisper's parameter names, whatever file they came from."""

    dims: ModelDimensions
    weights: dict[str, Tensor]
    alignment_heads: Heads | None = None  # (layer, head); None: the file does not say


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: expected a JSON file, got {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got {one_line(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def dimensions_from(numbers: object, path: Path) -> ModelDimensions:
    """Dimensions as a file lists them, checked."""
    if not isinstance(numbers, Mapping):
        raise CheckpointError(f"{path}: expected ten dimensions, got {type(numbers).__name__}")
    try:
        return ModelDimensions.of(numbers)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None


def heads_from(pairs: object, path: Path) -> Heads | None:
    """Alignment heads as a config file lists them: [[layer, head], …]."""
    if pairs is None:
        return None
    try:
        return tuple((int(layer), int(head)) for layer, head in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"{path}: alignment_heads must be [[layer, head], …], got {pairs!r}"
        ) from None


def build(
    checkpoint: Checkpoint, path: Path, device: torch.device, dtype: torch.dtype | None
) -> Whisper:
    """The model with those weights, after checking that each is there and of the right shape.

    The checkpoint's own are let go one by one. dtype: None: as they are
    """
    dims, weights = checkpoint.dims, checkpoint.weights
    # before the model is built: a damaged number of layers could keep that busy for hours
    for part, n_layer in (("encoder", dims.n_audio_layer), ("decoder", dims.n_text_layer)):
        start = f"{part}.blocks."
        layers = {name.split(".")[2] for name in weights if name.startswith(start)}
        if len(layers) != n_layer:
            raise CheckpointError(
                f"{path}: expected {n_layer} {part} layers, got weights of {len(layers)}"
            )
    try:
        with torch.device("meta"):  # shapes only: the weights come from the file
            model = Whisper(dims)
    except (RuntimeError, TypeError, OverflowError):  # numbers beyond 64 bits
        raise CheckpointError(f"{path}: expected a model that can be built, got {dims}") from None
    expected = model.state_dict()
    if missing := sorted(set(expected) - set(weights)):
        raise CheckpointError(
            f"{path}: expected {missing[0]}, got none ({len(missing)} weights are missing)"
        )
    if extra := sorted(set(weights) - set(expected)):
        raise CheckpointError(
            f"{path}: expected {len(expected)} weights, got {len(weights)}, "
            f"the first too many {extra[0]!r}"
        )
    for name, weight in weights.items():
        if weight.layout != torch.strided or not weight.is_floating_point() or weight.is_meta:
            raise CheckpointError(
                f"{path}: {name} must hold floats, got {weight.dtype} on {weight.device}, "
                f"{weight.layout}"
            )
        if weight.shape != expected[name].shape:
            raise CheckpointError(
                f"{path}: {name} has the wrong shape, got {tuple(weight.shape)}, "
                f"expected {tuple(expected[name].shape)}"
            )
    converted = {name: weights.pop(name).to(device, dtype).contiguous() for name in expected}
    model.load_state_dict(converted, assign=True)
    model.requires_grad_(False).eval()
    heads = checkpoint.alignment_heads
    if heads is not None:
        if any(not (0 <= i < dims.n_text_layer and 0 <= h < dims.n_text_head) for i, h in heads):
            raise CheckpointError(
                f"{path}: alignment heads must be within {dims.n_text_layer} layers of "
                f"{dims.n_text_head} heads, got {heads}"
            )
        model.alignment_heads = heads
    return model
