"""The checkpoint that all readers return, and how to build a model from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrmask.errors import CheckpointError, brief, one_line
from asrmask.model.dimensions import ModelDimensions
from asrmask.transcription.api import TranscribingWhisper

Heads = tuple[tuple[int, int], ...]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Checkpoint:
    """Weights under openai-whisper's parameter names, from any file format.

    Readers ensure that the weights have at most twice as many elements as the file has bytes. This
    keeps memory proportional to the file's size.
    """

    dims: ModelDimensions
    weights: dict[str, Tensor]
    alignment_heads: Heads | None = None  # (layer, head); None: not in the file


def json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
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
    """Validate the dimensions listed in a file."""
    if not isinstance(numbers, Mapping):
        raise CheckpointError(f"{path}: expected ten dimensions, got {type(numbers).__name__}")
    try:
        return ModelDimensions.of(numbers)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None


def heads_from(pairs: object, path: Path) -> Heads | None:
    """Parse alignment heads from a config file: [[layer, head], …]."""
    if pairs is None or pairs == []:
        return None
    try:
        return tuple((int(layer), int(head)) for layer, head in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"{path}: alignment_heads must be [[layer, head], …], got {brief(pairs)}"
        ) from None


def build(
    checkpoint: Checkpoint, path: Path, device: torch.device, dtype: torch.dtype | None
) -> TranscribingWhisper:
    """Build a model, after checking that every weight is present and has the right shape.

    Weights are removed from the checkpoint one by one, to save memory. dtype: None: unchanged
    """
    dims, weights = checkpoint.dims, checkpoint.weights
    check(weights, dims, path)
    with torch.device("meta"):  # shapes only: the weights follow
        model = TranscribingWhisper(dims)
    contiguous = torch.contiguous_format
    # copy, because the file may be memory-mapped
    converted = {
        name: weights.pop(name).detach().to(device, dtype, copy=True, memory_format=contiguous)
        for name in list(weights)
    }
    model.load_state_dict(converted, assign=True)
    model.requires_grad_(False).eval()
    heads = checkpoint.alignment_heads
    if heads is not None:
        if any(not (0 <= i < dims.n_text_layer and 0 <= h < dims.n_text_head) for i, h in heads):
            raise CheckpointError(
                f"{path}: alignment heads must be within {dims.n_text_layer} layers of "
                f"{dims.n_text_head} heads, got {brief(heads)}"
            )
        model.alignment_heads = heads
    return model


def check(weights: Mapping[str, Tensor], dims: ModelDimensions, path: Path) -> None:
    """Raise CheckpointError if the weights do not fit the dimensions.

    Each dimension is compared with a weight's shape before anything is computed or allocated from
    it, because a damaged file can contain any number.
    """
    audio, text = dims.n_audio_state, dims.n_text_state
    _check_shapes(
        weights,
        {
            "encoder.conv1.weight": (audio, dims.n_mels, 3),
            "encoder.positional_embedding": (dims.n_audio_ctx, audio),
            "decoder.token_embedding.weight": (dims.n_vocab, text),
            "decoder.positional_embedding": (dims.n_text_ctx, text),
        },
        path,
    )
    n_layers = {"encoder": dims.n_audio_layer, "decoder": dims.n_text_layer}
    for part, n_layer in n_layers.items():
        start = f"{part}.blocks."
        layers = {name.split(".")[2] for name in weights if name.startswith(start)}
        if len(layers) != n_layer:
            raise CheckpointError(
                f"{path}: expected {n_layer} {part} layers, got weights of {len(layers)}"
            )
    # build one encoder and one decoder layer; the others have the same shapes
    with torch.device("meta"):
        sketch = TranscribingWhisper(replace(dims, n_audio_layer=1, n_text_layer=1)).state_dict()
    expected = {
        name.replace(".blocks.0.", f".blocks.{i}."): tuple(weight.shape)
        for name, weight in sketch.items()
        for i in range(n_layers[name.split(".")[0]] if ".blocks." in name else 1)
    }
    if extra := sorted(set(weights) - set(expected)):
        raise CheckpointError(
            f"{path}: expected {len(expected)} weights, got {len(weights)}, "
            f"the first too many {brief(extra[0])}"
        )
    _check_shapes(weights, expected, path)


def _check_shapes(
    weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    if missing := sorted(set(expected) - set(weights)):
        raise CheckpointError(
            f"{path}: expected {missing[0]}, got none ({len(missing)} weights are missing)"
        )
    for name, shape in expected.items():
        weight = weights[name]
        if weight.layout != torch.strided or weight.is_meta or weight.dtype not in DTYPES:
            raise CheckpointError(
                f"{path}: {name} must hold floats, got {weight.dtype} on {weight.device}, "
                f"{weight.layout}"
            )
        if tuple(weight.shape) != shape:
            raise CheckpointError(
                f"{path}: {name} has the wrong shape, got {brief(tuple(weight.shape))}, "
                f"expected {shape}"
            )
