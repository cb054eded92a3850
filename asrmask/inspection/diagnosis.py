"""Diagnosis of segments: the share of the decoder's cross-attention that was on padding.

`scripts/instruments signs` tests it as a sign of hallucination. On the speech tried there it
detects wrong segments worse than no_speech_prob and avg_logprob (data/results/inspection.md).
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from asrmask.decoding.task import initial_tokens, tokenizer_of
from asrmask.inspection.measure import ForcedText, measure_decoder
from asrmask.inspection.quantities import kind_of
from asrmask.model.whisper import Whisper
from asrmask.transcription.result import Diagnosis
from asrmask.transcription.window_loop import DecodedWindow

Span = tuple[int, int]  # first and end query


def text_of(model: Whisper, decoded: DecodedWindow) -> ForcedText:
    """Return the tokens of a decoded window, with the prompt that they were decoded from."""
    tokenizer = tokenizer_of(model, decoded.options)
    initial, _ = initial_tokens(tokenizer, decoded.options, model.dims.n_text_ctx)
    return ForcedText(tokenizer, initial, decoded.result.tokens)


def segment_spans(decoded: DecodedWindow, text: ForcedText, n_ctx: int) -> list[Span]:
    """Return for each segment the queries that predict its tokens.

    Assumes that the segments cover the window's tokens from the first one on, without gaps.
    """
    lengths = (len(segment.tokens) for segment in decoded.segments)
    borders = accumulate(lengths, initial=len(text.initial_tokens) - 1)
    n_queries = text.inputs(n_ctx)[0].shape[1]
    return list(pairwise(min(border, n_queries) for border in borders))


def real_queries(profile: np.ndarray) -> np.ndarray:
    """Queries that have data, (Q, H) → (Q,) bool: real ones, if any padding is visible."""
    return ~np.isnan(profile).any(axis=-1)


def padding_by_span(
    profiles: Mapping[str, np.ndarray], kind: str, spans: Sequence[Span]
) -> np.ndarray:
    """Return the attention mass on padding, (spans, layers), averaged over queries and heads.

    NaN for a span without real queries, and without any layer.

    profiles: place → (1, Q, H), NaN where a query is not real
    kind:     of attention: "encoder.self" or "decoder.cross"
    """
    layers = [profile[0] for place, profile in profiles.items() if kind_of(place) == kind]
    masses = np.full((len(spans), max(len(layers), 1)), np.nan)
    for i, (first, end) in enumerate(spans):
        for j, profile in enumerate(layers):
            rows = profile[first:end]
            if (real := real_queries(rows)).any():
                masses[i, j] = rows[real].mean()
    return masses


class Diagnose:
    """Callback (Callbacks.on_window) that adds a diagnosis to each segment of a window."""

    def __init__(self, model: Whisper):
        self.model = model

    def __call__(self, decoded: DecodedWindow) -> None:
        text = text_of(self.model, decoded)
        n_positions = decoded.window.n_positions
        measurement = measure_decoder(self.model, decoded.encoded, n_positions, text)
        padding_s = measurement.cross_keys.padding_s
        spans = segment_spans(decoded, text, self.model.dims.n_text_ctx)
        masses = padding_by_span(measurement.profiles, "decoder.cross", spans)
        for segment, layers in zip(decoded.segments, masses, strict=True):
            segment.diagnosis = Diagnosis(round(padding_s, 2))
            if padding_s > 0 and not np.isnan(layers).any():
                segment.diagnosis.attention_on_padding = round(float(layers.mean()), 5)
                segment.diagnosis.by_layer = [round(float(x), 5) for x in layers]
