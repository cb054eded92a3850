"""Models of random weights in the sizes of the official ones: for speed, not for text."""

from pathlib import Path

import torch

from asrmask.checkpoints import ctranslate2, registry
from asrmask.checkpoints.checkpoint import Checkpoint
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.whisper import Whisper

STD = 0.02  # of weights and embeddings


def write(name: str, folder: Path) -> None:
    """Write a model of the size of an official one as a CTranslate2 folder. Always the same one."""
    dims = ModelDimensions.of(registry.dimensions(name))
    with torch.device("meta"):
        shapes = {key: weight.shape for key, weight in Whisper(dims).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for key, shape in shapes.items():
        if len(shape) > 1:  # float16, as in official files
            weights[key] = (STD * torch.randn(shape, generator=generator)).half()
        else:  # layer norms multiply by one, and biases add nothing
            is_norm = "ln" in key.split(".")[-2] and key.endswith(".weight")
            weights[key] = torch.full(shape, float(is_norm), dtype=torch.float16)
    ctranslate2.write(folder, Checkpoint(dims, weights))
