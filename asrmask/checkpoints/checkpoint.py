"""What every reader of a file format gives back, and the model made from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrmask.errors import CheckpointError, brief, one_line
from asrmask.loaded import LoadedWhisper
from asrmask.model import ModelDimensions

Heads = tuple[tuple[int, int], ...]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Checkpoint:
    """Weights under openai-whisper's parameter names, whatever file they came from.

    A reader sees to it that they have no more elements, all together, than twice its file has
    bytes: what is done with them then takes memory in proportion to the file.
    """

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
) -> LoadedWhisper:
    """The model with those weights, after checking that each is there and of the right shape.

    The checkpoint's own are let go one by one. dtype: None: as they are
    """
    dims, weights = checkpoint.dims, checkpoint.weights
    check(weights, dims, path)
    with torch.device("meta"):  # shapes only: the weights come from the file
        model = LoadedWhisper(dims)
    contiguous = torch.contiguous_format
    # copies: the file may be mapped into memory
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
    """Refuse weights that are not those of a model of such dimensions.

    Nothing is computed or allocated from a dimension before a weight is seen to have it: the
    numbers of a damaged file can be anything.
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
    # one layer of each part is sketched, the others are like it
    with torch.device("meta"):
        sketch = LoadedWhisper(replace(dims, n_audio_layer=1, n_text_layer=1)).state_dict()
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
