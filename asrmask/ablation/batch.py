"""Run a batch of clips through the cells of one model, computing shared work once.

Shared are the audio and spectrogram of a clip, the encoder output for all decoding settings, and
the result under `full` for all fallbacks.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from asrmask.ablation.clips import AblationClip, clip_rng, with_trailing
from asrmask.ablation.spec import Cell, Spec, Trailing
from asrmask.audio.constants import N_FRAMES, N_POSITIONS
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features, Spectrogram
from asrmask.decoding.options import DecodingOptions, DecodingResult
from asrmask.decoding.quality import runaway
from asrmask.decoding.task import decode_encoded
from asrmask.evaluation.score import errors
from asrmask.inspection.key_labels import KeyLabels, Spans, spoken
from asrmask.inspection.measure import Text, measure, measured
from asrmask.inspection.quantities import nested
from asrmask.model import masks
from asrmask.model.attention import Recorder
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.systems.upstream import normalizer
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer


@dataclass(frozen=True)
class Scored:
    """The results of a batch in one cell, without fallback."""

    records: list[dict[str, Any]]
    runaways: list[str | None]
    encoder_s: float
    decoder_s: float


class Batch:
    """A batch of clips and one model, with caches for what the cells share."""

    def __init__(self, model: Whisper, sounds: Sequence[AblationClip], spec: Spec):
        self.model = model
        self.sounds = sounds
        self.spec = spec
        self.tokenizer: Tokenizer = get_tokenizer(
            model.is_multilingual,
            num_languages=model.num_languages,
            language=sounds[0].language,
        )
        self._spectrograms: dict[Trailing, list[Spectrogram]] = {}
        self._speech: dict[Trailing, list[Spans]] = {}
        self._encoded: tuple[object, CrossAttentionCache, float] | None = (
            None  # only the latest: encoder outputs are large
        )
        self._scored: dict[Cell, Scored] = {}

    def windows(self, trailing: Trailing, fill: str) -> list[Features]:
        if trailing not in self._spectrograms:
            self._spectrograms[trailing] = [
                Spectrogram(
                    Recording.of(with_trailing(sound, trailing, self.spec.seed)),
                    self.model.dims.n_mels,
                )
                for sound in self.sounds
            ]
        found = []
        for spectrogram in self._spectrograms[trailing]:
            n_frames = min(spectrogram.n_frames, N_FRAMES)
            found.append(spectrogram.window(0, n_frames, fill=fill))
        return found

    def encoded(self, cell: Cell) -> tuple[CrossAttentionCache, float]:
        """Return the encoder output for a cell, and the seconds it took."""
        key = shared(cell)
        if self._encoded is None or self._encoded[0] != key:
            self._encoded = None
            windows = self.windows(cell.trailing, cell.policy.fill)
            begun = time.perf_counter()
            if cell.control == "none":
                encoded = encode(self.model, windows, cell.policy)
            else:
                encoded = self._masked(windows, self._mask(windows, self.sounds, cell.control))
            self._encoded = key, encoded, time.perf_counter() - begun
        return self._encoded[1], self._encoded[2]

    def _mask(
        self, windows: Sequence[Features], sounds: Sequence[AblationClip], control: str
    ) -> Tensor | None:
        """Return the mask of a control cell.

        random:    hides as many positions as mask:both, chosen at random
        all-valid: hides none: an explicit mask that is True everywhere
        """
        visible = torch.ones(len(windows), N_POSITIONS, dtype=torch.bool)
        if control == "random":
            for i, (window, sound) in enumerate(zip(windows, sounds, strict=True)):
                n_hidden = N_POSITIONS - max(window.n_positions, 1)
                hidden = clip_rng(sound, self.spec.seed).choice(
                    N_POSITIONS, n_hidden, replace=False
                )
                visible[i, hidden] = False
        return masks.validated(visible[:, None, None].to(self.model.device))

    @torch.inference_mode()
    def _masked(
        self, windows: Sequence[Features], mask: Tensor | None, record: Recorder | None = None
    ) -> CrossAttentionCache:
        """Encode windows into a cross-attention cache, with the mask in encoder and decoder."""
        mel = torch.stack([window.mel for window in windows])
        features = self.model.encode(mel, mask, record)
        return self.model.decoder.cross_attention_cache(features, mask)

    def heads(self, cell: Cell, i: int, tokens: Sequence[int]) -> dict[str, Any]:
        """Measure every attention head on clip i in a cell, with that text (quantities.nested)."""
        windows = self.windows(cell.trailing, cell.policy.fill)
        if cell.trailing not in self._speech:
            self._speech[cell.trailing] = [
                spoken(spectrogram.recording) for spectrogram in self._spectrograms[cell.trailing]
            ]
        window, speech = windows[i], self._speech[cell.trailing][i]
        text = Text.untimed(self.tokenizer, tokens)
        if cell.control == "none":
            found = measure(self.model, window, cell.policy, text, speech=speech)
        else:
            mask = self._mask([window], [self.sounds[i]], cell.control)
            n = window.n_positions
            found = measured(
                self.model,
                lambda record: self._masked([window], mask, record),
                KeyLabels.of([n], N_POSITIONS, mask=mask, speech=[speech]),
                n,
                text,
                speech=speech,
            )
        return nested(found.values)

    def scored(self, cell: Cell) -> Scored:
        """Decode and score the clips in a cell, without fallback."""
        cell = replace(cell, decoding=cell.decoding.bare)
        if cell not in self._scored:
            encoded, encoder_s = self.encoded(cell)
            options = DecodingOptions(
                language=self.sounds[0].language,
                beam_size=cell.decoding.beam_size,
                without_timestamps=not cell.decoding.timestamps,
            )
            begun = time.perf_counter()
            results = decode_encoded(self.model, encoded, options)
            decoder_s = time.perf_counter() - begun
            found, lost = [], []
            windows = self.windows(cell.trailing, cell.policy.fill)
            for i, (sound, result) in enumerate(zip(self.sounds, results, strict=True)):
                mine = encoded.select([i])
                scores = self._scores(sound, result, mine)
                if self.spec.inspect:
                    scores["heads"] = self.heads(cell, i, result.tokens)
                found.append(scores)
                lost.append(runaway(result, windows[i].n_positions))
            n = len(results)
            self._scored[cell] = Scored(found, lost, encoder_s / n, decoder_s / n)
        return self._scored[cell]

    def records(self, cell: Cell) -> list[dict[str, Any]]:
        """Return one record for each clip in a cell."""
        mine = self.scored(cell)
        full = replace(cell, policy=cell.policy.fallback, control="none")
        hides = cell.policy.kind != "full"
        found = []
        for i, record in enumerate(mine.records):
            lost = mine.runaways[i] if hides else None
            encoder_s, decoder_s = mine.encoder_s, mine.decoder_s
            again = lost is not None and cell.decoding.fallback
            if again:
                other = self.scored(full)
                record = other.records[i]
                encoder_s, decoder_s = encoder_s + other.encoder_s, decoder_s + other.decoder_s
            found.append(
                {
                    **record,
                    "runaway": lost,
                    "fallback": again,
                    "encoder_s": round(encoder_s, 4),
                    "decoder_s": round(decoder_s, 4),
                }
            )
        return found

    def _scores(
        self, sound: AblationClip, result: DecodingResult, encoded: CrossAttentionCache
    ) -> dict[str, Any]:
        normalise = normalizer(sound.language)
        said, heard = normalise(sound.text or ""), normalise(result.text)
        counts = None
        if sound.text is not None:
            found = errors(said, heard)
            counts = [found.substitutions, found.deletions, found.insertions, found.n_words]
        logprobs, ranks = self._end(encoded, result.tokens)
        forced: dict[str, Any] = {"reference_logprobs": None, "reference_end_logprob": None}
        if sound.text:
            text = sound.text.strip()
            if text.isupper():  # as in LibriSpeech; no model writes capitals only
                text = text.capitalize()
            tokens = self.tokenizer.encode(" " + text)
            *words, end = self._forced(encoded, [*tokens, self.tokenizer.eot])[1]
            forced = {
                "reference_logprobs": [round(x, 4) for x in words],
                "reference_end_logprob": round(end, 4),
            }
        return {
            "text": result.text,
            "tokens": result.tokens,
            "errors": counts,
            "avg_logprob": round(result.avg_logprob, 5),
            "no_speech_prob": round(result.no_speech_prob, 6),
            "compression_ratio": round(result.compression_ratio, 4),
            "ended": result.ended,
            "end_logprobs": logprobs,
            "end_ranks": ranks,
            **forced,
        }

    @torch.inference_mode()
    def _forced(
        self, encoded: CrossAttentionCache, tokens: list[int]
    ) -> tuple[Tensor, list[float]]:
        """Teacher-forced log-probabilities at each step: of all tokens, and of the given ones."""
        opening = [*self.tokenizer.sot_sequence, self.tokenizer.no_timestamps]
        room = self.model.dims.n_text_ctx - len(opening)
        tokens = tokens[:room]
        row = torch.tensor([[*opening, *tokens[:-1]]], device=self.model.device)
        x, _ = self.model.decoder(row, encoded, self.model.decoder.cache(*row.shape))
        steps = self.model.decoder.logits(x[0, len(opening) - 1 :]).log_softmax(dim=-1)
        own = steps.gather(1, torch.tensor(tokens, device=self.model.device)[:, None])[:, 0]
        return steps, own.tolist()

    def _end(
        self, encoded: CrossAttentionCache, tokens: list[int]
    ) -> tuple[list[float], list[int]]:
        """Return the end token's log-probability and rank (0: most likely) at each step of a text.

        Timestamp tokens are removed, as if the text had been decoded without them.
        """
        eot = self.tokenizer.eot
        steps, _ = self._forced(encoded, [*(t for t in tokens if t < eot), eot])
        end = steps[:, eot]
        ranks = (steps > end[:, None]).sum(dim=-1)
        return [round(x, 4) for x in end.tolist()], ranks.tolist()


def shared(cell: Cell) -> tuple[str, Policy, Trailing, str]:
    """Return a key that is equal for cells with the same encoder output."""
    return cell.model, cell.policy, cell.trailing, cell.control
