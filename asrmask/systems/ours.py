"""asrmask, through the same interface as the other systems."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Spectrogram
from asrmask.checkpoints import load_model
from asrmask.malloc import keep_freed_memory
from asrmask.model.policy import Policy
from asrmask.systems import DecodingSettings, System, SystemTranscript, one_of, whole_number
from asrmask.transcription import scheduler, stream, window_loop
from asrmask.transcription.api import transcribe_all
from asrmask.transcription.presets import PRESETS, get_preset


class Asrmask(System):
    def __init__(self, options: dict[str, str], weights: str, threads: int, model_dir: str | None):
        name = one_of(options, "preset", ["none", *PRESETS])
        preset = get_preset(None if name == "none" else name)
        self.settings = dict(preset.options)
        if "padding" in options:
            self.settings["padding"] = Policy.parse(options["padding"].replace("+", ","))
        if "fallback" in options:
            self.settings["policy_fallback"] = one_of(options, "fallback", ["yes", "no"]) == "yes"
        self.batch_size = whole_number(options, "batch", preset.batch_size)
        compute_type = options.get("compute_type", preset.compute_type)
        keep_freed_memory()  # as the command line does
        self.model = load_model(
            weights, "cpu", model_dir, compute_type=compute_type, cpu_threads=threads
        )

    def watch(self) -> None:
        super().watch()
        self.timer.watch(Recording, "open", "audio")
        self.timer.watch(Spectrogram, "window", "spectrogram")
        self.timer.watch(stream, "encode", "encoder")
        self.timer.watch(stream, "decode_encoded", "decoder")
        self.timer.watch(window_loop, "add_words", "decoder")
        self.timer.watch(scheduler, "encode_all", "encoder")
        self.timer.watch(scheduler, "decode_encoded", "decoder")

    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        return self.transcribe_all([path], decoding)[0]

    def transcribe_all(
        self, paths: Sequence[Path], decoding: DecodingSettings
    ) -> list[SystemTranscript]:
        options = {**self.settings, **asdict(decoding)}
        results = transcribe_all(self.model, paths, batch_size=self.batch_size, **options)
        return [SystemTranscript.of(result) for result in results]
