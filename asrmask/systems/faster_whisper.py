"""faster-whisper (CTranslate2), file by file or with its batched pipeline."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asrmask.systems import DecodingSettings, Piece, System, SystemTranscript, one_of, whole_number


def load(options: Mapping[str, str], weights: str, threads: int, model_dir: str | None) -> System:
    import faster_whisper

    compute_type = one_of(options, "compute_type", ["float32", "int8"])
    model = faster_whisper.WhisperModel(
        weights, device="cpu", compute_type=compute_type, cpu_threads=threads
    )
    return FasterWhisper(model, whole_number(options, "batch", 1))


class FasterWhisper(System):
    def __init__(self, model: Any, n_batch: int):
        super().__init__()
        self.model = self.pipeline = model
        self.more: dict[str, Any] = {}
        if n_batch > 1:
            import faster_whisper

            self.pipeline = faster_whisper.BatchedInferencePipeline(model)
            self.more = {"batch_size": n_batch}

    def watch(self) -> None:
        super().watch()
        self.timer.watch(type(self.model.feature_extractor), "__call__", "spectrogram")
        self.timer.watch(self.model, "encode", "encoder")
        if self.more:
            self.timer.watch(self.pipeline, "generate_segment_batched", "decoder")
        else:
            self.timer.watch(self.model, "generate_with_fallback", "decoder")

    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        found, about = self.pipeline.transcribe(
            self.load_audio(path),
            beam_size=decoding.beam_size or 1,
            language=decoding.language,
            task=decoding.task,
            word_timestamps=decoding.word_timestamps,
            **self.more,
        )
        segments = list(found)
        words = None
        if decoding.word_timestamps:
            words = [
                Piece(float(w.start), float(w.end), w.word) for s in segments for w in s.words or []
            ]
        pieces = [Piece(float(s.start), float(s.end), s.text) for s in segments]
        return SystemTranscript("".join(s.text for s in segments), pieces, words, about.language)
