"""One window, measured: encoder and decoder under a policy, with a text that is given.

The text is teacher-forced, so that two policies are compared on the same queries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from asrmask.attention import Recorder
from asrmask.audio import Features
from asrmask.encoding import encode, plan
from asrmask.instruments.ground import Ground, Spans, of_encoder, of_memory
from asrmask.instruments.quantities import Meter, Scope
from asrmask.instruments.recording import Keeper, both
from asrmask.instruments.subject import Own
from asrmask.model import Memory, Whisper
from asrmask.policy import Policy

Values = dict[tuple[str, str], np.ndarray]


@dataclass(frozen=True)
class Text:
    """A text as the decoder is given it.

    opening: the tokens before it: previous text, start of transcript, …
    tokens:  its own, without the end; times count from the audio's beginning
    end:     the end token; those from `times` on are times
    """

    opening: tuple[int, ...]
    tokens: tuple[int, ...]
    end: int
    times: int

    def shifted(self, first: int) -> "Text":
        """The same for audio that begins at another position: times are told by position."""
        moved = tuple(t + first if t >= self.times else t for t in self.tokens)
        return replace(self, tokens=moved)

    def row(self, n_most: int) -> torch.Tensor:
        """(1, Q): what fits of it."""
        return torch.tensor([[*self.opening, *self.tokens][:n_most]])

    def queries(self, n_most: int) -> torch.Tensor:
        """(1, Q) bool: the positions that predict its tokens and its end."""
        return (torch.arange(self.n_queries(n_most)) >= len(self.opening) - 1)[None]

    def n_queries(self, n_most: int) -> int:
        """How many tokens fit, with the opening."""
        return min(len(self.opening) + len(self.tokens), n_most)


@dataclass(frozen=True)
class Measurement:
    """What a pass through the model said.

    values:      (place, quantity) → (1, H)
    profiles:    place → (1, Q, H), the mass on padding query by query
    end_logit:   the end token's, where the text is complete
    end_logprob: its log-probability there
    weights:     place → (H, Q, K), of cross-attention, for the text's queries; if asked for
    ground:      the keys of cross-attention
    """

    values: Values
    profiles: dict[str, np.ndarray]
    end_logit: float
    end_logprob: float
    weights: dict[str, np.ndarray]
    ground: Ground


def measure(
    model: Whisper,
    window: Features,
    policy: Policy,
    text: Text,
    *,
    speech: Spans | None = None,
    keep_weights: bool = False,
) -> Measurement:
    """A window under a policy, with a text."""
    visible = policy.visible(window.n_positions)
    planned = plan(policy, [visible], device=model.device)
    return measured(
        model,
        lambda record: encode(model, [window], policy, record),
        of_encoder(planned, [window.n_positions], None if speech is None else [speech]),
        window.n_positions,
        text,
        speech=speech,
        keep_weights=keep_weights,
    )


@torch.inference_mode()
def measured(
    model: Whisper,
    encoded: Callable[[Recorder], Memory],
    ground: Ground,
    n_positions: int,
    text: Text,
    *,
    speech: Spans | None = None,
    keep_weights: bool = False,
) -> Measurement:
    """A window that is encoded in whatever way.

    encoded:     gives its memory, and hands what passes by to the recorder
    ground:      what the encoder's keys are
    n_positions: of audio
    """
    listener = Meter(Own(model), {"encoder.self": Scope(ground.audio, ground)})
    memory = encoded(listener)
    reader, weights = read(
        model, memory, n_positions, text, speech=speech, keep_weights=keep_weights
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
    """What the decoder's pass gives beside its meter."""

    end_logprob: float
    cross: dict[str, np.ndarray]
    ground: Ground


@torch.inference_mode()
def read(
    model: Whisper,
    memory: Memory,
    n_positions: int,
    text: Text,
    *,
    speech: Spans | None = None,
    keep_weights: bool = False,
) -> tuple[Meter, Reading]:
    """The decoder's pass over a text, measured: of a memory of one window."""
    ground = of_memory(memory, [n_positions], None if speech is None else [speech])
    n_ctx = model.dims.n_text_ctx
    text = text.shifted(memory.first_of(0))
    row, queries = text.row(n_ctx).to(model.device), text.queries(n_ctx).to(model.device)
    scopes = {"decoder.self": Scope(queries), "decoder.cross": Scope(queries, ground)}
    meter = Meter(Own(model), scopes, text.end)
    keeper = Keeper(model.dims, "decoder.*.cross.weights")
    record = both(meter, keeper) if keep_weights else meter
    x, _ = model.decoder(row, memory, model.decoder.cache(*row.shape), record)
    logprobs = model.decoder.logits(x[:, -1]).log_softmax(dim=-1)
    first = len(text.opening) - 1
    cross = {
        name.removesuffix(".weights"): weights[0, :, first:].cpu().numpy()
        for name, weights in keeper.kept.items()
    }
    return meter, Reading(float(logprobs[0, text.end]), cross, ground)


def stacked(parts: Sequence[Values]) -> Values:
    """Several samples' values together: (samples, H)."""
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: np.concatenate([part[key] for part in parts if key in part]) for key in keys}
