"""Run a batch of clips through the cells of one model, computing shared work once.

Shared are the spectrogram of a clip, the encoder output for all decoding settings, and the result
under `full` for all fallbacks.
"""

import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from asrmask.ablation.clips import AblationClip, clip_rng, with_trailing
from asrmask.ablation.spec import Cell, Spec, Trailing
from asrmask.audio.constants import N_FRAMES, N_POSITIONS
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features, Spectrogram
from asrmask.decoding.options import DecodingOptions, DecodingResult
from asrmask.decoding.quality import runaway_reason
from asrmask.decoding.task import decode_encoded
from asrmask.evaluation.corpus import as_written
from asrmask.evaluation.score import errors
from asrmask.inspection.key_labels import KeyLabels, Spans, find_speech
from asrmask.inspection.measure import ForcedText, encoder_meter, measure, measure_decoder
from asrmask.inspection.quantities import nested
from asrmask.model import masks
from asrmask.model.attention import Recorder
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import encode
from asrmask.model.whisper import Whisper
from asrmask.systems.upstream import normalizer
from asrmask.tokenizer.tokenizer import get_tokenizer

Record = dict[str, Any]


class Batch:
    """A batch of clips of one language and one model, with caches for what the cells share."""

    def __init__(self, model: Whisper, clips: Sequence[AblationClip], spec: Spec):
        self.model = model
        self.clips = clips
        self.spec = spec
        self.language = clips[0].language
        self.tokenizer = get_tokenizer(
            model.is_multilingual, num_languages=model.num_languages, language=self.language
        )
        self._spectrograms: dict[Trailing, list[Spectrogram]] = {}
        self._speech: dict[Trailing, list[Spans]] = {}
        self._decoded: dict[Cell, list[Record]] = {}
        # only the latest encoder output: they are large
        self._encoded: tuple[Cell, CrossAttentionCache, float] | None = None

    def records(self, cell: Cell) -> list[Record]:
        """Return one record for each clip in a cell."""
        records = []
        for i, record in enumerate(self._decode(cell)):
            reason = record["runaway"]
            falls_back = reason is not None and cell.decoding.fallback
            if falls_back:
                full = self._decode(replace(cell, policy=cell.policy.fallback, control="none"))[i]
                times = {k: round(record[k] + full[k], 4) for k in ("encoder_s", "decoder_s")}
                record = {**full, **times, "runaway": reason}
            records.append({**record, "fallback": falls_back})
        return records

    def _decode(self, cell: Cell) -> list[Record]:
        """Decode and score the clips in a cell, without fallback."""
        cell = replace(cell, decoding=cell.decoding.without_fallback)
        if cell in self._decoded:
            return self._decoded[cell]
        encoded, encoder_s = self._encode(cell.encoder_cell)
        options = DecodingOptions(
            language=self.language,
            beam_size=cell.decoding.beam_size,
            without_timestamps=not cell.decoding.timestamps,
        )
        start = time.perf_counter()
        results = decode_encoded(self.model, encoded, options)
        decoder_s = time.perf_counter() - start
        windows = self._windows(cell)
        records = self._decoded[cell] = []
        for i, result in enumerate(results):
            record = self._score(self.clips[i], result, encoded.select([i]))
            if self.spec.inspect:
                record["heads"] = self._measure_heads(cell, i, result.tokens)
            is_full = cell.policy.kind == "full"
            record["runaway"] = None if is_full else runaway_reason(result, windows[i].n_positions)
            record["encoder_s"] = round(encoder_s / len(results), 4)
            record["decoder_s"] = round(decoder_s / len(results), 4)
            records.append(record)
        return records

    def _windows(self, cell: Cell) -> list[Features]:
        if cell.trailing not in self._spectrograms:
            self._spectrograms[cell.trailing] = [
                Spectrogram(
                    Recording.of(with_trailing(clip, cell.trailing, self.spec.seed)),
                    self.model.dims.n_mels,
                )
                for clip in self.clips
            ]
        return [
            spectrogram.window(0, min(spectrogram.n_frames, N_FRAMES), fill=cell.policy.fill)
            for spectrogram in self._spectrograms[cell.trailing]
        ]

    def _encode(self, cell: Cell) -> tuple[CrossAttentionCache, float]:
        """Return the encoder output for a cell, and the seconds it took."""
        if self._encoded is None or self._encoded[0] != cell:
            self._encoded = None
            windows = self._windows(cell)
            start = time.perf_counter()
            if cell.control == "none":
                encoded = encode(self.model, windows, cell.policy)
            else:
                mask = self._control_mask(windows, self.clips, cell.control)
                encoded = self._encode_masked(windows, mask)
            self._encoded = cell, encoded, time.perf_counter() - start
        return self._encoded[1:]

    def _control_mask(
        self, windows: Sequence[Features], clips: Sequence[AblationClip], control: str
    ) -> Tensor | None:
        """Return the mask of a control cell, (B, 1, 1, T).

        random:    hides as many positions as mask:both, chosen at random
        all-valid: hides none: a bias of 0, because a boolean mask that hides nothing is dropped
        """
        visible = torch.ones(len(windows), N_POSITIONS, dtype=torch.bool)
        if control == "all-valid":
            return masks.counted(visible.to(self.model.device))
        for row, window, clip in zip(visible, windows, clips, strict=True):
            n_hidden = N_POSITIONS - max(window.n_positions, 1)
            rng = clip_rng(clip, self.spec.seed)
            row[rng.choice(N_POSITIONS, n_hidden, replace=False)] = False
        return masks.validated(visible[:, None, None].to(self.model.device))

    @torch.inference_mode()
    def _encode_masked(
        self, windows: Sequence[Features], mask: Tensor | None, record: Recorder | None = None
    ) -> CrossAttentionCache:
        """Encode windows, with the mask in encoder and cross-attention."""
        mel = torch.stack([window.mel for window in windows])
        features = self.model.encode(mel, mask, record)
        return self.model.decoder.cross_attention_cache(features, mask)

    def _measure_heads(self, cell: Cell, i: int, tokens: Sequence[int]) -> dict[str, Any]:
        """Measure every attention head on clip i in a cell, with that text (quantities.nested)."""
        window = self._windows(cell)[i]
        if cell.trailing not in self._speech:
            self._speech[cell.trailing] = [
                find_speech(spectrogram.recording)
                for spectrogram in self._spectrograms[cell.trailing]
            ]
        speech = self._speech[cell.trailing][i]
        text = ForcedText.untimed(self.tokenizer, tokens)
        if cell.control == "none":
            return nested(measure(self.model, window, cell.policy, text, speech).values)
        mask = self._control_mask([window], [self.clips[i]], cell.control)
        n = window.n_positions
        meter = encoder_meter(self.model, KeyLabels.of(n, N_POSITIONS, mask=mask, speech=speech))
        encoded = self._encode_masked([window], mask, meter)
        return nested(measure_decoder(self.model, encoded, n, text, speech, meter).values)

    def _score(
        self, clip: AblationClip, result: DecodingResult, encoded: CrossAttentionCache
    ) -> Record:
        """Return the decoded text of a clip, its word errors and its log-probabilities."""
        eot = self.tokenizer.eot
        # timestamps are removed, as if the text had been decoded without them
        text_tokens = [token for token in result.tokens if token < eot]
        steps, _ = self._teacher_force(encoded, [*text_tokens, eot])
        end = steps[:, eot]
        record: Record = {
            "text": result.text,
            "tokens": result.tokens,
            "errors": None,
            "avg_logprob": round(result.avg_logprob, 5),
            "no_speech_prob": round(result.no_speech_prob, 6),
            "compression_ratio": round(result.compression_ratio, 4),
            "ended": result.ended,
            "end_logprobs": [round(x, 4) for x in end.tolist()],
            "end_ranks": (steps > end[:, None]).sum(dim=-1).tolist(),  # 0: most likely
            "reference_logprobs": None,
            "reference_end_logprob": None,
        }
        if clip.text is not None:
            normalise = normalizer(clip.language)
            count = errors(normalise(clip.text), normalise(result.text))
            record["errors"] = list(astuple(count))
        if clip.text:
            reference = [*self.tokenizer.encode(" " + as_written(clip.text)), eot]
            _, logprobs = self._teacher_force(encoded, reference)
            *words, last = (round(x, 4) for x in logprobs)
            record |= {"reference_logprobs": words, "reference_end_logprob": last}
        return record

    @torch.inference_mode()
    def _teacher_force(
        self, encoded: CrossAttentionCache, tokens: list[int]
    ) -> tuple[Tensor, list[float]]:
        """Return the log-probabilities at each step: of all tokens, and of the given ones."""
        sot = [*self.tokenizer.sot_sequence, self.tokenizer.no_timestamps]
        tokens = tokens[: self.model.dims.n_text_ctx - len(sot)]
        row = torch.tensor([[*sot, *tokens[:-1]]], device=self.model.device)
        x, _ = self.model.decoder(row, encoded, self.model.decoder.cache(*row.shape))
        steps = self.model.decoder.logits(x[0, len(sot) - 1 :]).log_softmax(dim=-1)
        own = steps.gather(1, torch.tensor(tokens, device=self.model.device)[:, None])[:, 0]
        return steps, own.tolist()
