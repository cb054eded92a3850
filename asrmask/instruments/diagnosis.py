"""Where the decoder looked while it wrote a segment: the padding's share of its attention.

As a sign of hallucination it is measured by `scripts/instruments signs`: on the speech tried there
it tells wrong segments worse than no_speech_prob and avg_logprob do (data/results/inspection.md).
"""

import numpy as np
import torch

from asrmask.decoding import DecodingOptions, opening
from asrmask.instruments.aggregate import spans
from asrmask.instruments.measure import Text, read
from asrmask.model import Whisper
from asrmask.policy import POSITIONS_PER_SECOND
from asrmask.tokenizer import Tokenizer, get_tokenizer
from asrmask.transcription import Diagnosis
from asrmask.walk import Heard


def tokenizer_of(model: Whisper, options: DecodingOptions) -> Tokenizer:
    return get_tokenizer(
        model.is_multilingual,
        num_languages=model.num_languages,
        language=options.language or "en",
        task=options.task,
    )


def text_of(model: Whisper, heard: Heard) -> Text:
    """A window's text as the decoder was given it, token by token."""
    tokenizer = tokenizer_of(model, heard.options)
    begun = opening(tokenizer, heard.options, model.dims.n_text_ctx)
    tokens = tuple(heard.result.tokens)
    return Text(tuple(begun), tokens, tokenizer.eot, tokenizer.timestamp_begin)


def segment_spans(heard: Heard, text: Text, n_queries: int) -> list[tuple[int, int] | None]:
    """For each of a window's segments the queries that predict its tokens; None: it has none.

    Its segments have its tokens from the first one on, without gaps.
    """
    found: list[tuple[int, int] | None] = []
    first = len(text.opening) - 1
    for segment in heard.segments:
        end = min(first + len(segment.tokens), n_queries)
        found.append((first, end) if first < end else None)
        first = end
    return found


def by_span(
    profiles: dict[str, np.ndarray], bounds: list[tuple[int, int]], kind: str
) -> np.ndarray:
    """Mass on padding in each span, (spans, layers): means over its queries, then over heads.

    profiles: place → (1, Q, H), NaN where a query is not real
    kind:     "cross" or "self": which places
    """
    layers = []
    for place, profile in profiles.items():
        if place.endswith(f".{kind}"):
            x = torch.from_numpy(profile)
            (means,) = spans(x, ~x.isnan().any(dim=-1), [bounds])
            layers.append(means.mean(dim=-1))  # over heads
    if not layers:
        return np.full((len(bounds), 1), np.nan)
    return torch.stack(layers, dim=-1).double().numpy()


class Diagnose:
    """Gives each segment of a window that was heard its diagnosis (a transcriber.Watcher.heard)."""

    def __init__(self, model: Whisper):
        self.model = model

    def __call__(self, heard: Heard) -> None:
        text = text_of(self.model, heard)
        n_positions = heard.window.n_positions
        meter, reading = read(self.model, heard.memory, n_positions, text)
        ground = reading.ground
        padding_s = float((ground.counts * ground.padding).sum()) / POSITIONS_PER_SECOND
        found = segment_spans(heard, text, text.n_queries(self.model.dims.n_text_ctx))
        shares = by_span(meter.profiles, [span for span in found if span is not None], "cross")
        waiting = iter(shares)
        for segment, span in zip(heard.segments, found, strict=True):
            segment.diagnosis = Diagnosis(round(padding_s, 2))
            if span is not None:
                layers = next(waiting)
                if padding_s > 0:
                    segment.diagnosis.attention_on_padding = round(float(layers.mean()), 5)
                    segment.diagnosis.by_layer = [round(float(x), 5) for x in layers]
