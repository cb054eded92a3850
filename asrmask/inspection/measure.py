"""Measure encoder and decoder on one window, under a policy and with a given text.

The text is teacher-forced, so that two policies are compared on the same queries.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asrmask.audio.spectrogram import Features
from asrmask.decoding.task import shift_timestamps
from asrmask.inspection.inspected_model import InspectedModel
from asrmask.inspection.key_labels import KeyLabels, Spans, cross_key_labels, encoder_key_labels
from asrmask.inspection.quantities import Meter, Scope
from asrmask.inspection.recording import ActivationCache, combine_recorders
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import encode, plan
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class ForcedText:
    """Tokens to teacher-force in the decoder.

    initial_tokens: before the text: prompt, start of transcript, …
    tokens:         the text without the end token; times are relative to the start of the audio
    """

    tokenizer: Tokenizer
    initial_tokens: Sequence[int]
    tokens: Sequence[int]

    @classmethod
    def untimed(cls, tokenizer: Tokenizer, tokens: Iterable[int]) -> "ForcedText":
        """Build a text without timestamps and prompt; special tokens are left out."""
        text = [token for token in tokens if token < tokenizer.eot]
        return cls(tokenizer, [*tokenizer.sot_sequence, tokenizer.no_timestamps], text)

    def inputs(self, n_ctx: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return the decoder's input and its queries that predict the text and its end, (1, Q).

        n_ctx: the most tokens
        first: position of the window at which the audio starts, added to the timestamps
        """
        text = shift_timestamps(list(self.tokens), self.tokenizer, first)
        tokens = torch.tensor([*self.initial_tokens, *text][:n_ctx])
        return tokens[None], (torch.arange(len(tokens)) >= len(self.initial_tokens) - 1)[None]


@dataclass(frozen=True)
class Measurement:
    """Measurements of one window."""

    values: dict[tuple[str, str], np.ndarray]  # (place, quantity) → (1, H)
    profiles: dict[str, np.ndarray]  # place → (1, Q, H), attention mass on padding of each query
    end_logit: float  # logit of the end token after the complete text
    end_logprob: float
    weights: dict[str, np.ndarray]  # place → (H, Q, K), cross-attention of the text, if requested
    cross_keys: KeyLabels

    def sum_heads(self, quantity: str) -> float:
        """Sum of a quantity over all heads; NaN: no data."""
        return float(sum(v.sum() for (_, name), v in self.values.items() if name == quantity))


def measure(
    model: Whisper,
    window: Features,
    policy: Policy,
    text: ForcedText,
    speech: Spans | None = None,
    *,
    keep_weights: bool = False,
) -> Measurement:
    """Encode a window under a policy, decode the text, and measure both."""
    n = window.n_positions
    planned = plan(policy, [policy.visible(n)], device=model.device)
    meter = encoder_meter(model, encoder_key_labels(planned, n, speech))
    encoded = encode(model, [window], policy, meter)
    return measure_decoder(model, encoded, n, text, speech, meter, keep_weights=keep_weights)


def encoder_meter(model: Whisper, labels: KeyLabels) -> Meter:
    """Return a recorder that measures the encoder, whose keys have these labels."""
    return Meter(InspectedModel(model), {"encoder.self": Scope(labels.audio, labels)})


@torch.inference_mode()
def measure_decoder(
    model: Whisper,
    encoded: CrossAttentionCache,
    n_positions: int,
    text: ForcedText,
    speech: Spans | None = None,
    encoder: Meter | None = None,
    *,
    keep_weights: bool = False,
) -> Measurement:
    """Run the decoder on a text and measure it.

    encoded: one window, with n_positions of audio
    encoder: what was measured in the encoder, to include it
    """
    labels = cross_key_labels(encoded, n_positions, speech)
    tokens, queries = (
        x.to(model.device) for x in text.inputs(model.dims.n_text_ctx, encoded.first_of(0))
    )
    scopes = {"decoder.self": Scope(queries), "decoder.cross": Scope(queries, labels)}
    eot = text.tokenizer.eot
    meter = Meter(InspectedModel(model), scopes, eot)
    cache = ActivationCache(model.dims, "decoder.*.cross.weights")
    record = combine_recorders(meter, cache) if keep_weights else meter
    x, _ = model.decoder(tokens, encoded, model.decoder.cache(*tokens.shape), record)
    logprobs = model.decoder.logits(x[:, -1]).log_softmax(dim=-1)
    assert meter.end_logit is not None
    return Measurement(
        {**(encoder.values if encoder else {}), **meter.values},
        {**(encoder.profiles if encoder else {}), **meter.profiles},
        end_logit=float(meter.end_logit[0]),
        end_logprob=float(logprobs[0, eot]),
        weights={
            name.removesuffix(".weights"): tensor[0][:, queries[0]].cpu().numpy()
            for name, tensor in cache.tensors.items()
        },
        cross_keys=labels,
    )
