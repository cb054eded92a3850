"""Measure encoder and decoder on one window, under a policy and with a given text.

The text is teacher-forced, so that two policies are compared on the same queries.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from asrmask.audio.spectrogram import Features
from asrmask.inspection.inspected_model import AsrmaskModel
from asrmask.inspection.key_labels import KeyLabels, Spans, cross_key_labels, encoder_key_labels
from asrmask.inspection.quantities import Meter, Scope
from asrmask.inspection.recording import Keeper, both
from asrmask.model.attention import Recorder
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import encode, plan
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import Tokenizer

Values = dict[tuple[str, str], np.ndarray]


@dataclass(frozen=True)
class Text:
    """Tokens to teacher-force in the decoder.

    opening: tokens before the text: prompt, start of transcript, …
    tokens:  the text, without the end token; timestamps are relative to the start of the audio
    end:     the end token
    times:   the first timestamp token
    """

    opening: tuple[int, ...]
    tokens: tuple[int, ...]
    end: int
    times: int

    @classmethod
    def untimed(cls, tokenizer: Tokenizer, tokens: Iterable[int]) -> "Text":
        """Build a text without timestamps and prompt; special tokens are left out."""
        return cls(
            (*tokenizer.sot_sequence, tokenizer.no_timestamps),
            tuple(token for token in tokens if token < tokenizer.eot),
            tokenizer.eot,
            tokenizer.timestamp_begin,
        )

    def shifted(self, first: int) -> "Text":
        """Shift the timestamps for audio that starts at position `first` of the window."""
        moved = tuple(t + first if t >= self.times else t for t in self.tokens)
        return replace(self, tokens=moved)

    def row(self, max_tokens: int) -> torch.Tensor:
        """Opening and text, at most max_tokens tokens: (1, Q)"""
        return torch.tensor([[*self.opening, *self.tokens][:max_tokens]])

    def queries(self, max_tokens: int) -> torch.Tensor:
        """Mask of the queries that predict the text and its end: (1, Q) bool"""
        return (torch.arange(self.n_queries(max_tokens)) >= len(self.opening) - 1)[None]

    def n_queries(self, max_tokens: int) -> int:
        """Number of tokens in `row`."""
        return min(len(self.opening) + len(self.tokens), max_tokens)


@dataclass(frozen=True)
class Measurement:
    """Measurements of one window.

    values:      (place, quantity) → (1, H)
    profiles:    place → (1, Q, H), attention mass on padding of each query
    end_logit:   logit of the end token after the complete text
    end_logprob: log-probability of the end token there
    weights:     place → (H, Q, K), cross-attention of the text's queries; empty unless kept
    ground:      labels of the cross-attention keys
    """

    values: Values
    profiles: dict[str, np.ndarray]
    end_logit: float
    end_logprob: float
    weights: dict[str, np.ndarray]
    ground: KeyLabels


def measure(
    model: Whisper,
    window: Features,
    policy: Policy,
    text: Text,
    *,
    speech: Spans | None = None,
    keep_weights: bool = False,
) -> Measurement:
    """Encode a window under a policy, decode the text, and measure both."""
    visible = policy.visible(window.n_positions)
    planned = plan(policy, [visible], device=model.device)
    return measured(
        model,
        lambda record: encode(model, [window], policy, record),
        encoder_key_labels(planned, [window.n_positions], None if speech is None else [speech]),
        window.n_positions,
        text,
        speech=speech,
        keep_weights=keep_weights,
    )


@torch.inference_mode()
def measured(
    model: Whisper,
    encode_recorded: Callable[[Recorder], CrossAttentionCache],
    ground: KeyLabels,
    n_positions: int,
    text: Text,
    *,
    speech: Spans | None = None,
    keep_weights: bool = False,
) -> Measurement:
    """Measure a window that the caller encodes.

    encode_recorded: encodes the window with the given recorder
    ground:          labels of the encoder's keys
    n_positions:     positions of audio
    """
    listener = Meter(AsrmaskModel(model), {"encoder.self": Scope(ground.audio, ground)})
    encoded = encode_recorded(listener)
    reader, weights = read(
        model, encoded, n_positions, text, speech=speech, keep_weights=keep_weights
    )
    assert reader.end is not None
    return Measurement(
        {**listener.values, **reader.values},
        {**listener.profiles, **reader.profiles},
        float(reader.end[0]),
        weights.end_logprob,
        weights.cross,
        weights.ground,
    )


@dataclass(frozen=True)
class Reading:
    """Results of a decoder pass that its meter does not hold; fields as in Measurement."""

    end_logprob: float
    cross: dict[str, np.ndarray]
    ground: KeyLabels


@torch.inference_mode()
def read(
    model: Whisper,
    encoded: CrossAttentionCache,
    n_positions: int,
    text: Text,
    *,
    speech: Spans | None = None,
    keep_weights: bool = False,
) -> tuple[Meter, Reading]:
    """Run the decoder on a text and measure it. `encoded` must hold one window."""
    ground = cross_key_labels(encoded, [n_positions], None if speech is None else [speech])
    n_ctx = model.dims.n_text_ctx
    text = text.shifted(encoded.first_of(0))
    row, queries = text.row(n_ctx).to(model.device), text.queries(n_ctx).to(model.device)
    scopes = {"decoder.self": Scope(queries), "decoder.cross": Scope(queries, ground)}
    meter = Meter(AsrmaskModel(model), scopes, text.end)
    keeper = Keeper(model.dims, "decoder.*.cross.weights")
    record = both(meter, keeper) if keep_weights else meter
    x, _ = model.decoder(row, encoded, model.decoder.cache(*row.shape), record)
    logprobs = model.decoder.logits(x[:, -1]).log_softmax(dim=-1)
    first = len(text.opening) - 1
    cross = {
        name.removesuffix(".weights"): weights[0, :, first:].cpu().numpy()
        for name, weights in keeper.kept.items()
    }
    return meter, Reading(float(logprobs[0, text.end]), cross, ground)


def stacked(parts: Sequence[Values]) -> Values:
    """Concatenate the values of several samples: (samples, H)."""
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: np.concatenate([part[key] for part in parts if key in part]) for key in keys}
