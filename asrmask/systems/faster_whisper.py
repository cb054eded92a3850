"""faster-whisper (CTranslate2), file by file or with its batched pipeline."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import faster_whisper

from asrmask.systems import DecodingSettings, System, SystemTranscript, one_of, whole_number


class FasterWhisper(System):
    def __init__(self, options: dict[str, str], weights: str, threads: int, model_dir: str | None):
        compute_type = one_of(options, "compute_type", ["float32", "int8"])
        n_batch = whole_number(options, "batch", 1)
        self.model = self.pipeline = faster_whisper.WhisperModel(
            weights, device="cpu", compute_type=compute_type, cpu_threads=threads
        )
        self.batch_options: dict[str, Any] = {}
        if n_batch > 1:
            self.pipeline = faster_whisper.BatchedInferencePipeline(self.model)
            self.batch_options = {"batch_size": n_batch}

    def watch(self) -> None:
        super().watch()
        self.timer.watch(type(self.model.feature_extractor), "__call__", "spectrogram")
        self.timer.watch(self.model, "encode", "encoder")
        decode = "generate_segment_batched" if self.batch_options else "generate_with_fallback"
        self.timer.watch(self.pipeline, decode, "decoder")

    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        options = {**asdict(decoding), "beam_size": decoding.beam_size or 1, **self.batch_options}
        segments, info = self.pipeline.transcribe(self.load_audio(path), **options)
        found = [asdict(segment) for segment in segments]
        text = "".join(segment["text"] for segment in found)
        return SystemTranscript.of({"text": text, "segments": found, "language": info.language})
