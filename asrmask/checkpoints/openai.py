"""OpenAI's own files: a .pt with `dims` and `model_state_dict`."""

import re
import warnings
from pathlib import Path

import torch

from asrmask.checkpoints.checkpoint import Checkpoint, dimensions_from
from asrmask.errors import CheckpointError, one_line


def read(path: Path) -> Checkpoint:
    """The checkpoint in a .pt file. Only tensors and plain data are taken from the pickle."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of things that it then refuses anyway
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle fails with whatever its bytes happen to say
        code = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
        if code:
            raise CheckpointError(
                f"{path}: refused, got a pickle that asks for {code[1]}, expected tensors and "
                f"plain data only"
            ) from None
        # what an unpickler says is advice that leads astray, or a bare number
        says = isinstance(error, RuntimeError | OSError)
        reason = one_line(error)[:120] if says else type(error).__name__
        raise CheckpointError(
            f"{path}: damaged or not a PyTorch file, expected an OpenAI .pt, got {reason}"
        ) from None
    if not isinstance(content, dict) or not {"dims", "model_state_dict"} <= set(content):
        got = sorted(map(str, content))[:5] if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path}: expected dims and model_state_dict, got {got}")
    weights = content["model_state_dict"]
    if not isinstance(weights, dict):
        raise CheckpointError(
            f"{path}: expected tensors by name in model_state_dict, got {type(weights).__name__}"
        )
    for name, value in weights.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path}: expected tensors by name, got {name!r}: {type(value).__name__}"
            )
    return Checkpoint(dimensions_from(content["dims"], path), dict(weights))
