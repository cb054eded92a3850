"""Inspect recordings: transcribe them and measure every window.

A recording is transcribed window by window (greedy, no fallback of any kind). Each window is then
measured with its own transcript. A second policy is measured on the same windows with the same
texts, so that any difference, by head and window, comes from the policy alone. All windows have the
same weight in the statistics, whichever recording they come from.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asrmask.audio.constants import CHUNK_LENGTH, FRAMES_PER_SECOND, POSITIONS_PER_SECOND
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import decode_encoded
from asrmask.errors import AudioError, OptionError, printable
from asrmask.inspection.aggregate import everything, positions, spans
from asrmask.inspection.diagnosis import by_span, segment_spans, text_of, tokenizer_of
from asrmask.inspection.key_labels import Spans, spoken
from asrmask.inspection.measure import Measurement, Text, measure
from asrmask.inspection.online import Moments, Tally
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

N_SHOWN = 12  # windows that are plotted; all are measured
N_BINS = 10  # relative positions from the start of a clip or text to its end


@dataclass(frozen=True)
class WordAttention:
    """A word with its share of attention on padding; None: no data.

    cross:   cross-attention of the queries that predict the word
    encoder: encoder self-attention of the audio positions where the word is spoken
    """

    word: Word
    cross: float | None
    encoder: float | None


@dataclass(frozen=True)
class Shown:
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
    def hides(self) -> bool:
        """Whether part of the window is hidden from cross-attention."""
        return int(self.measurement.ground.counts.sum()) < CHUNK_LENGTH * POSITIONS_PER_SECOND

    @property
    def name(self) -> str:
        """Stem of the window's file names."""
        stem = "stdin" if self.file == "-" else Path(self.file).stem
        return f"{stem}-{self.number}"


HEADS = {
    "file": str,
    "window": int,
    "start_s": float,
    "seconds": float,
    "policy": str,
    "attention": str,
    "layer": int,
    "head": int,
    **dict.fromkeys(QUANTITIES, float),
}
SEGMENTS = {
    "file": str,
    "window": int,
    "segment": int,
    "start": float,
    "end": float,
    "text": str,
    "attention_on_padding": float,
    "padding_s": float,
    "avg_logprob": float,
    "no_speech_prob": float,
    "compression_ratio": float,
}
WORDS = {
    "file": str,
    "window": int,
    "word": str,
    "start": float,
    "end": float,
    "probability": float,
    "cross_on_padding": float,
    "encoder_on_padding": float,
}
WINDOWS = {
    "file": str,
    "window": int,
    "start_s": float,
    "seconds": float,
    "policy": str,
    "end_logit": float,
    "end_logprob": float,
    "end_logit_padding": float,
    "end_logit_audio": float,
    "text": str,
}


class Inspection:
    """Measurements of all recordings inspected so far.

    tallies:     policy → statistics of its heads
    differences: statistics of second policy minus first, by window; None without a second policy
    profiles:    policy → place → attention mass on padding from start to end, (N_BINS,)
    tables:      heads, segments, words, windows
    shown:       the first N_SHOWN windows, to plot
    """

    def __init__(self, model: Whisper, policy: Policy, against: Policy | None = None):
        if against == policy:
            raise OptionError(f"--against must be another policy than --padding, got {against}")
        self.model = model
        self.policy = policy
        self.against = against
        wanted = expected(model.dims)
        self.policies = [policy] if against is None else [policy, against]
        self.tallies = {str(p): Tally(wanted) for p in self.policies}
        self.differences = None if against is None else Tally(wanted)
        self.profiles: dict[str, dict[str, Moments]] = {str(p): {} for p in self.policies}
        self.tables = {
            "heads": Table(dict(HEADS)),
            "segments": Table(dict(SEGMENTS)),
            "words": Table(dict(WORDS)),
            "windows": Table(dict(WINDOWS)),
        }
        self.shown: list[Shown] = []
        self.n_windows = 0
        self.files: list[str] = []

    def listen(self, file: str, language: str | None = None) -> None:
        """Transcribe and measure a recording ("-": standard input)."""
        name = "standard input" if file == "-" else file
        recording = Recording.open(file)
        recording.check_length(name)
        if recording.is_silent():
            raise AudioError(
                f"{name}: pure silence, got {recording.n_samples} zeros, expected speech"
            )
        speech = spoken(recording)
        file = printable(file)  # tables and plots need valid UTF-8
        settings = Settings(
            temperature=0.0,
            no_speech_threshold=None,
            word_timestamps=True,
            padding=self.policy,
            policy_fallback=False,
        )
        numbers = iter(range(1, 10**9))
        running = TranscriptionStream(
            self.model,
            recording,
            settings,
            DecodingOptions(language=language),
            Callbacks(on_window=lambda heard: self._window(file, next(numbers), heard, speech)),
        )
        for _ in running:
            pass
        self.files.append(file)

    def _window(self, file: str, number: int, heard: DecodedWindow, speech: Spans) -> None:
        text = text_of(self.model, heard)
        start_s = heard.seek / FRAMES_PER_SECOND
        spoken = [(a - start_s, b - start_s) for a, b in speech]
        is_shown = len(self.shown) < N_SHOWN
        found = measure(
            self.model, heard.window, self.policy, text, speech=spoken, keep_weights=is_shown
        )
        measurements = [found]
        other_text = None
        if self.against is not None:
            window = heard.spectrogram.window(
                heard.seek, heard.window.n_frames, fill=self.against.fill
            )
            measurements.append(measure(self.model, window, self.against, text, speech=spoken))
            if is_shown:
                encoded = encode(self.model, [window], self.against)
                other_text = decode_encoded(self.model, encoded, heard.options)[0].text
        self._count(file, number, start_s, heard, measurements)
        tokenizer = tokenizer_of(self.model, heard.options)
        words = self._words(heard, found, text, tokenizer)
        where = {"file": file, "window": number}
        for seen in words:
            self.tables["words"].add(
                **where,
                word=seen.word.word.strip(),
                start=seen.word.start,
                end=seen.word.end,
                probability=seen.word.probability,
                cross_on_padding=seen.cross,
                encoder_on_padding=seen.encoder,
            )
        self._segments(heard, found, text, where)
        if is_shown:
            pieces = [tokenizer.decode_with_timestamps([t]) for t in text.tokens]
            self.shown.append(
                Shown(
                    file,
                    number,
                    start_s,
                    heard.window,
                    found,
                    [*pieces, "(end)"],
                    words,
                    heard.result.text,
                    other_text,
                )
            )
        self.n_windows += 1

    def _count(
        self,
        file: str,
        number: int,
        start_s: float,
        heard: DecodedWindow,
        measurements: list[Measurement],
    ) -> None:
        """Add a window's measurements, one per policy, to the statistics and tables."""
        seconds = heard.window.n_frames / FRAMES_PER_SECOND
        for policy, found in zip(self.policies, measurements, strict=True):
            where = {
                "file": file,
                "window": number,
                "start_s": start_s,
                "seconds": seconds,
                "policy": str(policy),
            }
            self.tallies[str(policy)].add(found.values)
            for place in attention_places(self.model.dims):
                kind, layer = kind_of(place), int(place.split(".")[1])
                dims = self.model.dims
                n_heads = dims.n_audio_head if kind == "encoder.self" else dims.n_text_head
                for head in range(n_heads):
                    row = {
                        name: float(found.values[place, name][0, head])
                        if (place, name) in found.values
                        else None
                        for name in QUANTITIES
                    }
                    self.tables["heads"].add(**where, attention=kind, layer=layer, head=head, **row)
            self.tables["windows"].add(
                **where,
                end_logit=found.end_logit,
                end_logprob=found.end_logprob,
                end_logit_padding=_sum(found, "end_padding"),
                end_logit_audio=_sum(found, "end_audio"),
                text=heard.result.text,
            )
            mine = self.profiles[str(policy)]
            for place, profile in found.profiles.items():
                binned = in_bins(profile[0])
                if binned is not None:
                    sample = Moments.of(binned[None])
                    mine[place] = mine[place] + sample if place in mine else sample
        if self.differences is not None:
            one, other = (found.values for found in measurements)
            self.differences.add({key: other[key] - one[key] for key in one if key in other})

    def _segments(
        self, heard: DecodedWindow, found: Measurement, text: Text, where: dict[str, Any]
    ) -> None:
        bounds = segment_spans(heard, text, text.n_queries(self.model.dims.n_text_ctx))
        shares = by_span(found.profiles, bounds, "cross").mean(axis=1)
        for i, (segment, share) in enumerate(zip(heard.segments, shares, strict=True)):
            self.tables["segments"].add(
                **where,
                segment=i,
                start=segment.start,
                end=segment.end,
                text=segment.text.strip(),
                attention_on_padding=float(share),
                padding_s=found.ground.padding_s,
                avg_logprob=segment.avg_logprob,
                no_speech_prob=segment.no_speech_prob,
                compression_ratio=segment.compression_ratio,
            )

    def _words(
        self, heard: DecodedWindow, found: Measurement, text: Text, tokenizer: Tokenizer
    ) -> list[WordAttention]:
        """Return the window's words with their attention on padding."""
        start_s = heard.seek / FRAMES_PER_SECOND
        n_queries = text.n_queries(self.model.dims.n_text_ctx)
        told: list[tuple[Word, tuple[int, int]]] = []
        for segment, span in zip(
            heard.segments, segment_spans(heard, text, n_queries), strict=True
        ):
            if span is not None:
                told += word_spans(segment, span, tokenizer)
        cross = by_span(found.profiles, [span for _, span in told], "cross").mean(axis=1)
        n = heard.window.n_positions
        said = [positions(word.start - start_s, word.end - start_s, n) for word, _ in told]
        layers = []
        for place, profile in found.profiles.items():
            if place.startswith("encoder."):
                own = torch.from_numpy(profile[0])[found_rows(profile[0])][None]
                if own.shape[1] == n:
                    (means,) = spans(own, everything(own), [said])
                    layers.append(means.mean(dim=-1))
        heard_by = torch.stack(layers).mean(dim=0).tolist() if layers else [None] * len(told)
        return [
            WordAttention(word, None if np.isnan(a) else float(a), b)
            for (word, _), a, b in zip(told, cross, heard_by, strict=True)
        ]


def _sum(found: Measurement, name: str) -> float | None:
    """Sum of a quantity over all heads; None: no data."""
    parts = [values.sum() for (_, quantity), values in found.values.items() if quantity == name]
    total = float(sum(parts))
    return None if np.isnan(total) else total


def found_rows(profile: np.ndarray) -> np.ndarray:
    """Queries that have data, (Q, H) → (Q,) bool: real ones, if any padding is visible."""
    return ~np.isnan(profile).any(axis=-1)


def in_bins(profile: np.ndarray) -> np.ndarray | None:
    """Average the mass on padding of real queries in N_BINS bins, (Q, H) → (N_BINS,).

    None if no query has data. A bin without queries, as in a short text, is NaN.
    """
    rows = profile[found_rows(profile)].mean(axis=-1)
    if not len(rows):
        return None
    bins = np.arange(len(rows)) * N_BINS // len(rows)
    sums, counts = np.zeros(N_BINS), np.bincount(bins, minlength=N_BINS)
    np.add.at(sums, bins, rows)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def word_spans(
    segment: Segment, span: tuple[int, int], tokenizer: Tokenizer
) -> list[tuple[Word, tuple[int, int]]]:
    """Return a segment's words, each with the (first, end) queries that predict its tokens.

    span: the queries of the segment
    """
    words = segment.words or []
    ends = np.cumsum([len(word.word) for word in words])
    found: dict[int, list[int]] = {}
    text: list[int] = []
    for query, token in zip(range(*span), segment.tokens, strict=False):
        if token >= tokenizer.eot:  # a timestamp
            continue
        at = int(np.searchsorted(ends, len(tokenizer.decode(text)), side="right"))
        text.append(token)
        found.setdefault(min(at, len(words) - 1), []).append(query)
    return [(words[i], (q[0], q[-1] + 1)) for i, q in sorted(found.items()) if i >= 0]
