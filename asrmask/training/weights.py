"""What is trained: an adapter beside the frozen weights, or all weights."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from asrmask.checkpoints import adapter as adapters
from asrmask.files import atomic_write
from asrmask.model import lora
from asrmask.model.whisper import Whisper
from asrmask.training.examples import rng
from asrmask.training.spec import AdapterShape


class Trainable(Protocol):
    """Tensors that are trained, by name, and the file that they are saved to."""

    parameters: dict[str, Tensor]
    file_name: str

    def save(self, path: Path, settings: dict[str, Any]) -> None: ...


class AdapterWeights:
    """An adapter that begins as nothing: the model gives what it gave."""

    file_name = "adapter.safetensors"

    def __init__(self, model: Whisper, base_sha256: str, shape: AdapterShape, seed: int):
        self.base_sha256, self.scale = base_sha256, shape.scale
        model.requires_grad_(False)
        first: dict[str, Tensor] = {}
        draw = rng("adapter", seed)
        linear = _linear_layers(model, shape)
        for name in linear:
            weight = model.get_parameter(f"{name}.weight")
            n_out, n_in = weight.shape
            values = draw.uniform(-1, 1, (shape.rank, n_in)) / np.sqrt(n_in)
            first[f"{name}.weight{lora.LORA_A}"] = torch.from_numpy(values).to(weight)
            first[f"{name}.weight{lora.LORA_B}"] = weight.new_zeros(n_out, shape.rank)
        lora.attach(model, first, shape.scale)
        self.parameters: dict[str, Tensor] = {
            f"{name}.weight{end}": model.get_parameter(f"{name}{end}")
            for name in linear
            for end in (lora.LORA_A, lora.LORA_B)
        }
        self._originals: dict[str, Tensor] = {}
        for name, plain in _plain_weights(model, shape).items():
            self._originals[name] = plain.detach().clone()
            self.parameters[name] = plain
        for trained in self.parameters.values():
            trained.requires_grad_(True)

    def tensors(self) -> dict[str, Tensor]:
        """The content of the adapter file."""
        changed = {
            name + lora.DELTA: self.parameters[name].detach() - original
            for name, original in self._originals.items()
        }
        low = {n: w.detach() for n, w in self.parameters.items() if n not in self._originals}
        return low | changed

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        found = adapters.Adapter(self.tensors(), self.scale, self.base_sha256, settings)
        adapters.write(path, found)


class AllWeights:
    """Every weight of the model, saved as OpenAI's .pt file."""

    file_name = "model.pt"

    def __init__(self, model: Whisper):
        self.model = model.requires_grad_(True)
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        weights = {name: w.detach().half().cpu() for name, w in self.model.state_dict().items()}
        content = {"dims": self.model.dims.as_dict(), "model_state_dict": weights}
        with atomic_write(path, binary=True) as file:
            torch.save(content, file)


def _linear_layers(model: Whisper, shape: AdapterShape) -> list[str]:
    """The linear layers that get a low-rank addition."""
    kinds = {kind: kind for kind in ("query", "key", "value", "out")} | {"0": "mlp", "2": "mlp"}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.split(".")[0] in shape.parts
        and kinds[name.rpartition(".")[2]] in shape.layers
    ]


def _plain_weights(model: Whisper, shape: AdapterShape) -> dict[str, Tensor]:
    """The weights that an adapter changes directly."""
    found: dict[str, Tensor] = {}
    for part in shape.parts:
        for name, module in model.get_submodule(part).named_modules(prefix=part):
            if "norms" in shape.layers and isinstance(module, nn.LayerNorm):
                found |= {f"{name}.{end}": w for end, w in module.named_parameters()}
        if "positions" in shape.layers:
            name = f"{part}.positional_embedding"
            found[name] = model.get_submodule(part).positional_embedding  # type: ignore[assignment]
    return found
