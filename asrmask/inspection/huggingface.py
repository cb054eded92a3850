"""Adapter (InspectedModel) for the Whisper of Hugging Face transformers."""

from typing import Any

import torch
from torch import Tensor

from asrmask.checkpoints.hub import DIMENSIONS
from asrmask.errors import OptionError
from asrmask.inspection.hooks import recorded
from asrmask.inspection.inspected_model import Readout, by_head
from asrmask.model.attention import Recorder
from asrmask.model.dimensions import ModelDimensions

ATTENTIONS = {
    "encoder": {"self": "self_attn"},
    "decoder": {"self": "self_attn", "cross": "encoder_attn"},
}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}


class HuggingFace:
    """A WhisperForConditionalGeneration, loaded with attn_implementation="eager"."""

    def __init__(self, model: Any):
        kind = model.config._attn_implementation
        if kind != "eager":
            raise OptionError(
                f'the model must be loaded with attn_implementation="eager", got {kind!r}: the '
                f"others do not hand their weights over"
            )
        self.model = model
        numbers = {ours: getattr(model.config, theirs) for ours, theirs in DIMENSIONS.items()}
        self.dims = ModelDimensions.of(numbers)

    def encode(self, mel: Tensor, record: Recorder | None = None) -> Tensor:
        return self._run("encoder", record, input_features=mel)

    def logits(self, tokens: Tensor, features: Tensor, record: Recorder | None = None) -> Tensor:
        x = self._run(
            "decoder", record, input_ids=tokens, encoder_hidden_states=features, use_cache=False
        )
        with torch.inference_mode():
            return self.model.proj_out(x)

    @torch.inference_mode()
    def _run(self, part: str, record: Recorder | None, **inputs: Any) -> Tensor:
        module = getattr(self.model.model, part)
        n_head = module.layers[0].self_attn.num_heads
        names = ATTENTIONS[part]
        with recorded(module.layers, part, names, PROJECTIONS, n_head, _scores, record):
            return module(**inputs).last_hidden_state

    def projection(self, place: str) -> Tensor:
        part, layer, what = place.split(".")
        block = getattr(self.model.model, part).layers[int(layer)]
        attn = getattr(block, ATTENTIONS[part][what])
        return by_head(attn.out_proj.weight, attn.num_heads)

    def readout(self, token: int) -> Readout:
        decoder = self.model.model.decoder
        return Readout.of(decoder.layer_norm, decoder.embed_tokens.weight[token])


def _scores(output: Any, scratch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Compute the scores from the projections; transformers returns only the weights."""
    q, k = scratch["query"], scratch["key"]
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    mask = scratch.get("attention_mask")
    return scores if mask is None else scores + mask, output[1]
