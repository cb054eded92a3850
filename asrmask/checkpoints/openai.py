"""OpenAI's own files: a .pt with `dims` and `model_state_dict`."""

import pickle
from pathlib import Path

import torch

from asrmask.checkpoints.checkpoint import Checkpoint
from asrmask.errors import CheckpointError
from asrmask.model import ModelDimensions


def read(path: Path) -> Checkpoint:
    """The checkpoint in a .pt file. Only tensors and plain data are taken from the pickle."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        line = str(error).splitlines()[0] if str(error) else "not a pickle"
        raise CheckpointError(
            f"{path}: not a checkpoint of plain tensors, expected one that loads with "
            f"weights_only=True ({line[:120]})"
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: damaged or not a PyTorch file ({line[:120]}), expected an OpenAI .pt"
        ) from None
    if not isinstance(content, dict) or not {"dims", "model_state_dict"} <= set(content):
        got = sorted(map(str, content))[:5] if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path}: expected dims and model_state_dict, got {got}")
    weights = {
        name: value
        for name, value in content["model_state_dict"].items()
        if isinstance(value, torch.Tensor)
    }
    return Checkpoint(ModelDimensions.of(content["dims"]), weights)
