"""What every reader of a file format gives back, and the model made from it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from asrmask.errors import CheckpointError
from asrmask.model import ModelDimensions, Whisper

Heads = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Checkpoint:
    """Weights under openai-whisper's parameter names, whatever file they came from."""

    dims: ModelDimensions
    weights: dict[str, Tensor]
    alignment_heads: Heads | None = None  # (layer, head); None: the file does not say


def heads_from(pairs: object, path: Path) -> Heads | None:
    """Alignment heads as a config file lists them: [[layer, head], …]."""
    if pairs is None:
        return None
    try:
        return tuple((int(layer), int(head)) for layer, head in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{path}: alignment_heads must be [[layer, head], …], got {pairs!r}"
        ) from None


def build(checkpoint: Checkpoint, path: Path, device: torch.device, dtype: torch.dtype) -> Whisper:
    """The model with those weights, after checking that each is there and of the right shape."""
    with torch.device("meta"):  # shapes only: the weights come from the file
        model = Whisper(checkpoint.dims)
    expected = model.state_dict()
    weights = checkpoint.weights
    if missing := sorted(set(expected) - set(weights)):
        raise CheckpointError(f"{path}: {len(missing)} weights are missing, first {missing[0]}")
    if extra := sorted(set(weights) - set(expected)):
        raise CheckpointError(f"{path}: {len(extra)} weights are unknown, first {extra[0]}")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise CheckpointError(
                f"{path}: {name} has the wrong shape, got {tuple(weight.shape)}, "
                f"expected {tuple(expected[name].shape)}"
            )
    converted = {name: w.to(device, dtype).contiguous() for name, w in weights.items()}
    model.load_state_dict(converted, assign=True)
    model.requires_grad_(False).eval()
    heads = checkpoint.alignment_heads
    if heads is not None:
        dims = checkpoint.dims
        if any(not (0 <= i < dims.n_text_layer and 0 <= h < dims.n_text_head) for i, h in heads):
            raise CheckpointError(
                f"{path}: alignment heads must be within {dims.n_text_layer} layers of "
                f"{dims.n_text_head} heads, got {heads}"
            )
        model.alignment_heads = heads
    return model
