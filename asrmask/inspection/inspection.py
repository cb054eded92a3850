"""Inspect recordings: transcribe them and measure every window.

A recording is transcribed window by window (greedy, no fallback of any kind). Each window is then
measured with its own transcript. A second policy is measured on the same windows with the same
texts, so that any difference, by head and window, comes from the policy alone. All windows have the
same weight in the statistics, whichever recording they come from.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asrmask.audio.constants import FRAMES_PER_SECOND, N_POSITIONS
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import decode_encoded
from asrmask.errors import AudioError, OptionError, printable
from asrmask.inspection.aggregate import positions
from asrmask.inspection.diagnosis import Span, padding_by_span, real_queries, segment_spans, text_of
from asrmask.inspection.inspected_model import InspectedModel
from asrmask.inspection.key_labels import Spans, find_speech
from asrmask.inspection.measure import ForcedText, Measurement, measure
from asrmask.inspection.online import Moments, Tally, accumulate
from asrmask.inspection.quantities import QUANTITIES, expected, kind_of
from asrmask.inspection.recording import attention_places
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.reporting.tables import Table
from asrmask.tokenizer.tokenizer import Tokenizer
from asrmask.transcription.result import Segment, Word
from asrmask.transcription.settings import Settings
from asrmask.transcription.stream import TranscriptionStream
from asrmask.transcription.window_loop import Callbacks, DecodedWindow

N_PLOTTED = 12  # windows that are plotted; all are measured
N_BINS = 10  # relative positions from the start of a clip or text to its end

SEGMENT_FIELDS = ["start", "end", "avg_logprob", "no_speech_prob", "compression_ratio"]
COLUMNS = {  # of each table
    "heads": f"file window start_s seconds policy attention layer head {' '.join(QUANTITIES)}",
    "segments": "file window segment start end text attention_on_padding padding_s avg_logprob "
    "no_speech_prob compression_ratio",
    "words": "file window word start end probability cross_on_padding encoder_on_padding",
    "windows": "file window start_s seconds policy end_logit end_logprob end_logit_padding "
    "end_logit_audio text",
}
TYPES: dict[str, type] = {  # of columns; the others are float
    **dict.fromkeys(("file", "policy", "attention", "text", "word"), str),
    **dict.fromkeys(("window", "segment", "layer", "head"), int),
}


class WordAttention(NamedTuple):
    """A word with its share of attention on padding; NaN: no data."""

    word: Word
    cross: float  # cross-attention of the queries that predict the word
    encoder: float  # encoder self-attention of the audio positions where the word is spoken


@dataclass(frozen=True)
class PlottedWindow:
    """A window to plot."""

    file: str
    number: int  # of the window in its recording, from 1
    start_s: float
    features: Features
    measurement: Measurement
    tokens: list[str]  # the text's tokens as strings, and the end
    words: list[WordAttention]
    text: str
    other_text: str | None  # decoded under the second policy, if any

    @property
    def hides_positions(self) -> bool:
        """Whether part of the window is hidden from cross-attention."""
        return int(self.measurement.cross_keys.counts.sum()) < N_POSITIONS

    @property
    def name(self) -> str:
        """Stem of the window's file names."""
        stem = "stdin" if self.file == "-" else Path(self.file).stem
        return f"{stem}-{self.number}"


class Inspection:
    """Measurements of all recordings inspected so far.

    tallies:     policy → statistics of its heads
    differences: statistics of second policy minus first, by window; None without a second policy
    profiles:    policy → place → attention mass on padding from start to end, (N_BINS,)
    tables:      heads, segments, words, windows
    plotted:     the first N_PLOTTED windows
    """

    def __init__(self, model: Whisper, policy: Policy, against: Policy | None = None):
        if against == policy:
            raise OptionError(f"--against must be another policy than --padding, got {against}")
        self.model = model
        self.policy = policy
        self.against = against
        pairs = expected(model.dims)
        policies = [str(p) for p in (policy, against) if p is not None]
        self.tallies = {name: Tally(pairs) for name in policies}
        self.differences = None if against is None else Tally(pairs)
        self.profiles: dict[str, dict[str, Moments]] = {name: {} for name in policies}
        self.tables = {
            table: Table({name: TYPES.get(name, float) for name in columns.split()})
            for table, columns in COLUMNS.items()
        }
        self.plotted: list[PlottedWindow] = []
        self.n_windows = 0
        self.files: list[str] = []

    def add(self, file: str, language: str | None = None) -> None:
        """Transcribe and measure a recording ("-": standard input)."""
        name = "standard input" if file == "-" else file
        recording = Recording.open(file)
        recording.check_length(name)
        if recording.is_silent():
            raise AudioError(
                f"{name}: pure silence, got {recording.n_samples} zeros, expected speech"
            )
        speech = find_speech(recording)
        file = printable(file)  # tables and plots need valid UTF-8
        settings = Settings(
            temperature=0.0,
            no_speech_threshold=None,
            word_timestamps=True,
            padding=self.policy,
            policy_fallback=False,
        )
        numbers = itertools.count(1)
        callbacks = Callbacks(
            on_window=lambda decoded: self._add_window(file, next(numbers), decoded, speech)
        )
        options = DecodingOptions(language=language)
        TranscriptionStream(self.model, recording, settings, options, callbacks).result()
        self.files.append(file)

    def _add_window(self, file: str, number: int, decoded: DecodedWindow, speech: Spans) -> None:
        model, features = self.model, decoded.window
        text = text_of(model, decoded)
        start_s = decoded.seek / FRAMES_PER_SECOND
        speech = [(start - start_s, end - start_s) for start, end in speech]
        is_plotted = len(self.plotted) < N_PLOTTED
        first = measure(model, features, self.policy, text, speech, keep_weights=is_plotted)
        key = {"file": file, "window": number}
        self._add_heads(self.policy, key, decoded, first)
        other_text = None
        if self.against is not None and self.differences is not None:
            window = decoded.spectrogram.window(
                decoded.seek, features.n_frames, fill=self.against.fill
            )
            second = measure(model, window, self.against, text, speech)
            self._add_heads(self.against, key, decoded, second)
            self.differences.add(
                {k: second.values[k] - v for k, v in first.values.items() if k in second.values}
            )
            if is_plotted:
                encoded = encode(model, [window], self.against)
                other_text = decode_encoded(model, encoded, decoded.options)[0].text
        words = self._add_text(key, decoded, first, text)
        if is_plotted:
            tokens = [*(text.tokenizer.decode_with_timestamps([t]) for t in text.tokens), "(end)"]
            result = (words, decoded.result.text, other_text)
            self.plotted.append(
                PlottedWindow(file, number, start_s, features, first, tokens, *result)
            )
        self.n_windows += 1

    def _add_heads(
        self, policy: Policy, key: dict[str, Any], decoded: DecodedWindow, measurement: Measurement
    ) -> None:
        """Add a window's measurement under a policy to the statistics and tables."""
        values, name = measurement.values, str(policy)
        key = {
            **key,
            "start_s": decoded.seek / FRAMES_PER_SECOND,
            "seconds": decoded.window.n_frames / FRAMES_PER_SECOND,
            "policy": name,
        }
        for place in attention_places(self.model.dims):
            n_heads = InspectedModel(self.model).n_heads(place)
            no_data = np.full((1, n_heads), np.nan)
            rows = {q: values.get((place, q), no_data)[0].tolist() for q in QUANTITIES}
            labels = {**key, "attention": kind_of(place), "layer": int(place.split(".")[1])}
            for head in range(n_heads):
                row = {quantity: heads[head] for quantity, heads in rows.items()}
                self.tables["heads"].add(**labels, head=head, **row)
        self.tables["windows"].add(
            **key,
            end_logit=measurement.end_logit,
            end_logprob=measurement.end_logprob,
            end_logit_padding=measurement.sum_heads("end_padding"),
            end_logit_audio=measurement.sum_heads("end_audio"),
            text=decoded.result.text,
        )
        self.tallies[name].add(values)
        bins = {place: in_bins(profile[0])[None] for place, profile in measurement.profiles.items()}
        accumulate(self.profiles[name], bins)

    def _add_text(
        self, key: dict[str, Any], decoded: DecodedWindow, measured: Measurement, text: ForcedText
    ) -> list[WordAttention]:
        """Add the window's segments and words to their tables; return the words."""
        profiles = measured.profiles
        spans = segment_spans(decoded, text, self.model.dims.n_text_ctx)
        masses = padding_by_span(profiles, "decoder.cross", spans).mean(axis=1).tolist()
        for i, (segment, mass) in enumerate(zip(decoded.segments, masses, strict=True)):
            self.tables["segments"].add(
                **key,
                segment=i,
                text=segment.text.strip(),
                attention_on_padding=mass,
                padding_s=measured.cross_keys.padding_s,
                **{name: segment[name] for name in SEGMENT_FIELDS},
            )
        word_queries = [
            pair
            for segment, span in zip(decoded.segments, spans, strict=True)
            for pair in word_spans(segment, span, text.tokenizer)
        ]
        cross = padding_by_span(profiles, "decoder.cross", [span for _, span in word_queries])
        start_s, n = decoded.seek / FRAMES_PER_SECOND, decoded.window.n_positions
        times = [positions(word.start - start_s, word.end - start_s, n) for word, _ in word_queries]
        audio = {place: p[:, real_queries(p[0])] for place, p in profiles.items()}
        encoder = padding_by_span(audio, "encoder.self", times)
        masses = np.stack([cross.mean(axis=1), encoder.mean(axis=1)], axis=1).tolist()
        words = [WordAttention(w, *m) for (w, _), m in zip(word_queries, masses, strict=True)]
        for word, on_cross, on_encoder in words:
            row = {**key, **word, "word": word.word.strip()}
            self.tables["words"].add(
                **row, cross_on_padding=on_cross, encoder_on_padding=on_encoder
            )
        return words


def in_bins(profile: np.ndarray) -> np.ndarray:
    """Average the mass on padding of real queries in N_BINS bins, (Q, H) → (N_BINS,).

    A bin without queries, as in a short text, is NaN.
    """
    masses = profile[real_queries(profile)].mean(axis=-1)
    bins = np.arange(len(masses)) * N_BINS // max(len(masses), 1)
    counts = np.bincount(bins, minlength=N_BINS)
    sums = np.bincount(bins, weights=masses, minlength=N_BINS)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def word_spans(segment: Segment, span: Span, tokenizer: Tokenizer) -> list[tuple[Word, Span]]:
    """Return a segment's words, each with the queries that predict its tokens.

    span: the queries of the segment
    """
    words = segment.words or []
    ends = np.cumsum([len(word.word) for word in words])
    queries: dict[int, list[int]] = {}  # by the index of the word
    text: list[int] = []
    for query, token in zip(range(*span), segment.tokens, strict=False):
        if token >= tokenizer.eot:  # a timestamp
            continue
        word = int(np.searchsorted(ends, len(tokenizer.decode(text)), side="right"))
        text.append(token)
        queries.setdefault(min(word, len(words) - 1), []).append(query)
    return [(words[i], (q[0], q[-1] + 1)) for i, q in sorted(queries.items()) if i >= 0]
