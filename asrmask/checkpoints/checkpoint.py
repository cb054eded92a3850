"""The checkpoint that all readers return, and how to build a model from it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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


@contextmanager
def reading(path: Path, expected: str) -> Iterator[None]:
    """Name the file in errors. Errors other than CheckpointError mean that the file is damaged."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None
    except KeyError as error:
        raise CheckpointError(f"{path}: expected {brief(error.args[0])}, got none") from None
    except Exception as error:  # a damaged file can raise anything
        reason = getattr(error, "strerror", None) or one_line(error)[:200]
        raise CheckpointError(f"{path}: damaged, expected {expected}, got {reason}") from None


def json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise CheckpointError(f"expected a JSON object, got {type(content).__name__}")
    return content


def read_alignment_heads(path: Path, dims: ModelDimensions) -> Heads | None:
    """Read alignment_heads, [[layer, head], …], from a JSON file. None: no such file or entry."""
    with reading(path, "JSON"):
        pairs = json_object(path).get("alignment_heads") if path.exists() else None
        if pairs is None or pairs == []:
            return None
        with suppress(TypeError, ValueError, OverflowError):
            heads = tuple((int(layer), int(head)) for layer, head in pairs)
            if all(0 <= i < dims.n_text_layer and 0 <= h < dims.n_text_head for i, h in heads):
                return heads
        raise CheckpointError(
            f"alignment_heads must be within {dims.n_text_layer} layers of {dims.n_text_head} "
            f"heads, as [[layer, head], …], got {brief(pairs)}"
        )


def build(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype | None
) -> TranscribingWhisper:
    """Build a model. Weights are removed from the checkpoint one by one, to save memory.

    dtype: None: unchanged
    """
    weights = checkpoint.weights
    with torch.device("meta"):  # shapes only: the weights follow
        model = TranscribingWhisper(checkpoint.dims)
    converted = {
        # copy, because the file may be memory-mapped
        name: weights.pop(name).detach().to(device, dtype, copy=True).contiguous()
        for name in list(weights)
    }
    model.load_state_dict(converted, assign=True)
    if checkpoint.alignment_heads is not None:
        model.alignment_heads = checkpoint.alignment_heads
    return model.requires_grad_(False).eval()


def check(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the weights do not fit the dimensions.

    Each dimension is compared with a weight's shape before anything is computed or allocated from
    it, because a damaged file can contain any number.
    """
    dims, weights = checkpoint.dims, checkpoint.weights
    width = dims.n_audio_state
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (width, dims.n_mels, 3),
        "encoder.positional_embedding": (dims.n_audio_ctx, width),
        "decoder.token_embedding.weight": (dims.n_vocab, width),
        "decoder.positional_embedding": (dims.n_text_ctx, width),
    }
    _check_shapes(weights, shapes)
    n_layers = {"encoder": dims.n_audio_layer, "decoder": dims.n_text_layer}
    for part, n_layer in n_layers.items():
        start = f"{part}.blocks."
        n_found = len({name.split(".")[2] for name in weights if name.startswith(start)})
        if n_found != n_layer:
            raise CheckpointError(f"expected {n_layer} {part} layers, got weights of {n_found}")
    # build one encoder and one decoder layer; the others have the same shapes
    with torch.device("meta"):
        small = TranscribingWhisper(replace(dims, n_audio_layer=1, n_text_layer=1)).state_dict()
    expected = {
        name.replace(".blocks.0.", f".blocks.{i}."): tuple(weight.shape)
        for name, weight in small.items()
        for i in range(n_layers[name.split(".")[0]] if ".blocks." in name else 1)
    }
    if extra := sorted(set(weights) - set(expected)):
        raise CheckpointError(
            f"expected {len(expected)} weights, got {len(weights)}, "
            f"the first too many {brief(extra[0])}"
        )
    _check_shapes(weights, expected)


def _check_shapes(weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    if missing := sorted(set(expected) - set(weights)):
        raise CheckpointError(
            f"expected {missing[0]}, got none ({len(missing)} weights are missing)"
        )
    for name, shape in expected.items():
        weight = weights[name]
        if weight.layout != torch.strided or weight.is_meta or weight.dtype not in DTYPES:
            raise CheckpointError(
                f"{name} must hold floats, got {weight.dtype} on {weight.device}, {weight.layout}"
            )
        if tuple(weight.shape) != shape:
            raise CheckpointError(
                f"{name} has the wrong shape, got {brief(tuple(weight.shape))}, expected {shape}"
            )
