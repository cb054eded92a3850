"""Adapter (InspectedModel) for openai-whisper. Runs its code without fused attention (SDPA)."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from asrmask.inspection.hooks import recorded
from asrmask.inspection.inspected_model import Readout, by_head
from asrmask.model.attention import Recorder
from asrmask.model.dimensions import ModelDimensions
from asrmask.systems import upstream

ATTENTIONS = {"encoder": {"self": "attn"}, "decoder": {"self": "attn", "cross": "cross_attn"}}
PROJECTIONS = {name: name for name in ("query", "key", "value", "out")}


class OpenAI:
    """A model of openai-whisper (`whisper.load_model`, or `upstream.twin`)."""

    def __init__(self, model: Any):
        self.model = model
        self.dims = ModelDimensions.of(asdict(model.dims))

    def encode(self, mel: Tensor, record: Recorder | None = None) -> Tensor:
        return self._run("encoder", (mel,), record)

    def logits(self, tokens: Tensor, features: Tensor, record: Recorder | None = None) -> Tensor:
        return self._run("decoder", (tokens, features), record)

    @torch.inference_mode()
    def _run(self, part: str, inputs: tuple[Tensor, ...], record: Recorder | None) -> Tensor:
        module = getattr(self.model, part)
        if record is None:
            return module(*inputs)
        n_head = module.blocks[0].attn.n_head
        hooks = recorded(
            module.blocks, part, ATTENTIONS[part], PROJECTIONS, n_head, _scores, record
        )
        with upstream.whisper().model.disable_sdpa(), hooks:
            return module(*inputs)

    def projection(self, place: str) -> Tensor:
        part, layer, what = place.split(".")
        block = getattr(self.model, part).blocks[int(layer)]
        attn = getattr(block, ATTENTIONS[part][what])
        return by_head(attn.out.weight, attn.n_head)

    def readout(self, token: int) -> Readout:
        decoder = self.model.decoder
        return Readout.of(decoder.ln, decoder.token_embedding.weight[token])


def _scores(output: Any, scratch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Compute the weights from the scores; openai-whisper returns only the scores."""
    scores = output[1]
    return scores, scores.softmax(dim=-1)
