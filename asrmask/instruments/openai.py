"""openai-whisper's model as a subject: its own code path, with its fast attention off."""

from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from asrmask import upstream
from asrmask.attention import Recorder
from asrmask.instruments.hooks import recorded
from asrmask.instruments.subject import Readout, by_head
from asrmask.model import ModelDimensions

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
        with ExitStack() as stack:
            if record is not None:
                attentions = {"self": "attn"}
                if part == "decoder":
                    attentions["cross"] = "cross_attn"
                n_head = module.blocks[0].attn.n_head
                stack.enter_context(upstream.whisper().model.disable_sdpa())
                stack.enter_context(
                    recorded(module.blocks, part, attentions, PROJECTIONS, n_head, _scores, record)
                )
            return module(*inputs)

    def projection(self, place: str) -> Tensor:
        part, layer, what = place.split(".")
        block = getattr(self.model, part).blocks[int(layer)]
        attn = block.cross_attn if what == "cross" else block.attn
        return by_head(attn.out.weight, attn.n_head)

    def readout(self, token: int) -> Readout:
        decoder = self.model.decoder
        return Readout.of(decoder.ln, decoder.token_embedding.weight[token])


def _scores(output: Any, scratch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """openai-whisper hands its scores over, and takes their softmax itself."""
    scores = output[1]
    return scores, scores.softmax(dim=-1)
