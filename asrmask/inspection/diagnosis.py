"""Diagnosis of segments: the share of the decoder's cross-attention that was on padding.

`scripts/instruments signs` tests it as a sign of hallucination. On the speech tried there it
detects wrong segments worse than no_speech_prob and avg_logprob (data/results/inspection.md).
"""

from collections.abc import Sequence

import numpy as np
import torch

from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import opening
from asrmask.inspection.aggregate import spans
from asrmask.inspection.measure import Text, read
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer
from asrmask.transcription.result import Diagnosis
from asrmask.transcription.window_loop import DecodedWindow


def tokenizer_of(model: Whisper, options: DecodingOptions) -> Tokenizer:
    return get_tokenizer(
        model.is_multilingual,
        num_languages=model.num_languages,
        language=options.language or "en",
        task=options.task,
    )


def text_of(model: Whisper, heard: DecodedWindow) -> Text:
    """Return the tokens of a decoded window, with the prompt that they were decoded from."""
    tokenizer = tokenizer_of(model, heard.options)
    begun = opening(tokenizer, heard.options, model.dims.n_text_ctx)
    tokens = tuple(heard.result.tokens)
    return Text(tuple(begun), tokens, tokenizer.eot, tokenizer.timestamp_begin)


def segment_spans(heard: DecodedWindow, text: Text, n_queries: int) -> list[tuple[int, int] | None]:
    """Return for each segment the (first, end) queries that predict its tokens; None if empty.

    Assumes that the segments cover the window's tokens from the first one on, without gaps.
    """
    found: list[tuple[int, int] | None] = []
    first = len(text.opening) - 1
    for segment in heard.segments:
        end = min(first + len(segment.tokens), n_queries)
        found.append((first, end) if first < end else None)
        first = end
    return found


def by_span(
    profiles: dict[str, np.ndarray], bounds: Sequence[tuple[int, int] | None], kind: str
) -> np.ndarray:
    """Return the attention mass on padding, (spans, layers), averaged over queries, then heads.

    NaN for a span that is None or has no real query.

    profiles: place → (1, Q, H), NaN where a query is not real
    kind:     which attention: "cross" or "self"
    """
    places = [place for place in profiles if place.endswith(f".{kind}")]
    out = np.full((len(bounds), max(len(places), 1)), np.nan)
    known = [i for i, span in enumerate(bounds) if span is not None]
    for layer, place in enumerate(places):
        x = torch.from_numpy(profiles[place])
        (means,) = spans(x, ~x.isnan().any(dim=-1), [[span for span in bounds if span is not None]])
        out[known, layer] = means.mean(dim=-1).numpy()  # mean over heads
    return out


class Diagnose:
    """Callback (Callbacks.on_window) that adds a diagnosis to each segment of a window."""

    def __init__(self, model: Whisper):
        self.model = model

    def __call__(self, heard: DecodedWindow) -> None:
        text = text_of(self.model, heard)
        n_positions = heard.window.n_positions
        meter, reading = read(self.model, heard.encoded, n_positions, text)
        padding_s = reading.ground.padding_s
        bounds = segment_spans(heard, text, text.n_queries(self.model.dims.n_text_ctx))
        shares = by_span(meter.profiles, bounds, "cross")
        for segment, layers in zip(heard.segments, shares, strict=True):
            segment.diagnosis = Diagnosis(round(padding_s, 2))
            if padding_s > 0 and not np.isnan(layers).any():
                segment.diagnosis.attention_on_padding = round(float(layers.mean()), 5)
                segment.diagnosis.by_layer = [round(float(x), 5) for x in layers]
