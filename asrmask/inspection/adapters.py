"""Record inside the models of openai-whisper and transformers, to check findings there.

PyTorch hooks record the places, quantities and shapes listed in recording.py, without changes to
the other project's code. Both models always attend to all of the padding.
"""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor

from asrmask.checkpoints.hub import DIMENSIONS
from asrmask.errors import OptionError
from asrmask.inspection.inspected_model import InspectedModel
from asrmask.inspection.recording import ATTENTION, attention_places
from asrmask.model.attention import Recorder
from asrmask.model.dimensions import ModelDimensions
from asrmask.systems import upstream


class HookedModel(InspectedModel):
    """A model of another project. Subclasses define `encode`, `logits` and `_scores`."""

    @torch.inference_mode()
    def _run(self, part: str, record: Recorder | None, *args: Any, **kwargs: Any) -> Any:
        """Call the encoder or decoder; report what it computes to `record`, unless it is None."""
        module = getattr(self.model, part)
        with ExitStack() as stack:
            if record is not None:
                for handle in self._hooks(part, getattr(module, self.names["layers"]), record):
                    stack.callback(handle.remove)
            return module(*args, **kwargs)

    def _scores(self, output: Any, inputs: Any, heads: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return an attention module's scores and weights, both (B, H, Q, K).

        inputs: its keyword arguments
        heads:  "query" and "key", (B, H, N, d)
        """
        raise NotImplementedError

    def _hooks(self, part: str, layers: Any, record: Recorder) -> Iterator[Any]:
        def before(module: Any, args: Any, kwargs: Any) -> None:
            record(f"{part}.input", "residual", args[0] if args else kwargs["hidden_states"])

        yield layers[0].register_forward_pre_hook(before, with_kwargs=True)
        for i, layer in enumerate(layers):

            def after(module: Any, args: Any, output: Any, place: str = f"{part}.{i}") -> None:
                record(place, "residual", output[0] if isinstance(output, tuple) else output)

            yield layer.register_forward_hook(after)
        for place in attention_places(self.dims):
            if place.startswith(f"{part}."):
                yield from self._attention_hooks(place, record)

    def _attention_hooks(self, place: str, record: Recorder) -> Iterator[Any]:
        attention = self.attention(place)
        heads: dict[str, Tensor] = {}

        def keep(name: str, x: Tensor) -> None:  # (B, N, D) → (B, H, N, d)
            heads[name] = x.unflatten(-1, (self.n_heads(place), -1)).transpose(1, 2)

        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            tensors = (*self._scores(output, kwargs, heads), heads["value"], heads["outputs"])
            for quantity, tensor in zip(ATTENTION, tensors, strict=True):
                record(place, quantity, tensor)
            heads.clear()

        for name in ("query", "key", "value"):
            projection = getattr(attention, self.names[name])
            yield projection.register_forward_hook(lambda *call, name=name: keep(name, call[-1]))
        out = getattr(attention, self.names["out"])
        yield out.register_forward_pre_hook(lambda _, args: keep("outputs", args[0]))
        yield attention.register_forward_hook(after, with_kwargs=True)


class OpenAI(HookedModel):
    """A model of openai-whisper (`whisper.load_model`). Records without fused attention (SDPA)."""

    def __init__(self, model: Any):
        super().__init__(model, ModelDimensions.of(asdict(model.dims)))

    def encode(self, mel: Tensor, record: Recorder | None = None) -> Tensor:
        """Encode log-Mel frames (B, n_mels, 3000) into audio features (B, T, D)."""
        return self._run("encoder", record, mel)

    def logits(self, tokens: Tensor, features: Tensor, record: Recorder | None = None) -> Tensor:
        """Return teacher-forced logits (B, Q, n_vocab) for tokens (B, Q)."""
        return self._run("decoder", record, tokens, features)

    def _run(self, part: str, record: Recorder | None, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if record is None else upstream.whisper().model.disable_sdpa():
            return super()._run(part, record, *args, **kwargs)

    def _scores(self, output: Any, inputs: Any, heads: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return output[1], output[1].softmax(dim=-1)  # openai-whisper returns only the scores


class HuggingFace(HookedModel):
    """A WhisperForConditionalGeneration, loaded with attn_implementation="eager"."""

    names: ClassVar[dict[str, str]] = {
        "layers": "layers",
        "self": "self_attn",
        "cross": "encoder_attn",
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "out": "out_proj",
        "norm": "layer_norm",
        "embedding": "embed_tokens",
    }

    def __init__(self, model: Any):
        kind = model.config._attn_implementation
        if kind != "eager":
            raise OptionError(
                f'the model must be loaded with attn_implementation="eager", got {kind!r}: the '
                f"others do not return their weights"
            )
        sizes = {ours: getattr(model.config, theirs) for ours, theirs in DIMENSIONS.items()}
        super().__init__(model.model, ModelDimensions.of(sizes))
        self._proj_out = model.proj_out

    def encode(self, mel: Tensor, record: Recorder | None = None) -> Tensor:
        """Encode log-Mel frames (B, n_mels, 3000) into audio features (B, T, D)."""
        return self._run("encoder", record, input_features=mel).last_hidden_state

    @torch.inference_mode()
    def logits(self, tokens: Tensor, features: Tensor, record: Recorder | None = None) -> Tensor:
        """Return teacher-forced logits (B, Q, n_vocab) for tokens (B, Q)."""
        inputs = {"input_ids": tokens, "encoder_hidden_states": features, "use_cache": False}
        return self._proj_out(self._run("decoder", record, **inputs).last_hidden_state)

    def _scores(self, output: Any, inputs: Any, heads: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        q, k = heads["query"], heads["key"]
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        mask = inputs.get("attention_mask")
        return scores if mask is None else scores + mask, output[1]
