"""asrmask, through the same interface as the other systems."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asrmask.systems import DecodingSettings, System, SystemTranscript, one_of, whole_number
from asrmask.transcription.presets import PRESETS, get_preset


def load(options: Mapping[str, str], weights: str, threads: int, model_dir: str | None) -> System:
    import torch

    from asrmask.checkpoints import load_model
    from asrmask.malloc import keep_freed_memory
    from asrmask.model.policy import Policy

    torch.set_num_threads(threads)
    name = one_of(options, "preset", ["none", *PRESETS])
    preset = get_preset(None if name == "none" else name)
    settings = dict(preset.options)
    if "padding" in options:
        settings["padding"] = Policy.parse(options["padding"].replace("+", ","))
    if "fallback" in options:
        settings["policy_fallback"] = one_of(options, "fallback", ["yes", "no"]) == "yes"
    n_batch = whole_number(options, "batch", preset.batch_size)
    compute_type = options.get("compute_type", preset.compute_type)
    keep_freed_memory()  # as the command line does
    model = load_model(weights, "cpu", model_dir, compute_type=compute_type)
    return Ours(model, settings, n_batch)


class Ours(System):
    def __init__(self, model: Any, settings: dict[str, Any], n_batch: int):
        super().__init__()
        self.model = model
        self.settings = settings
        self.n_batch = n_batch

    def watch(self) -> None:
        super().watch()
        from asrmask.audio.recording import Recording
        from asrmask.audio.spectrogram import Spectrogram
        from asrmask.transcription import scheduler, stream, window_loop

        self.timer.watch(Recording, "open", "audio")
        self.timer.watch(Spectrogram, "window", "spectrogram")
        self.timer.watch(stream, "encode", "encoder")
        self.timer.watch(stream, "decode_encoded", "decoder")
        self.timer.watch(window_loop, "add_words", "decoder")
        self.timer.watch(scheduler, "encode_all", "encoder")
        self.timer.watch(scheduler, "decode_encoded", "decoder")

    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        (heard,) = self.transcribe_all([path], decoding)
        return heard

    def transcribe_all(
        self, paths: Sequence[Path], decoding: DecodingSettings
    ) -> list[SystemTranscript]:
        from asrmask.transcription.api import transcribe_all

        asked = {
            **self.settings,
            "beam_size": decoding.beam_size,
            "language": decoding.language,
            "task": decoding.task,
            "word_timestamps": decoding.word_timestamps,
        }
        found = transcribe_all(self.model, paths, batch_size=self.n_batch, **asked)
        return [SystemTranscript.of(one) for one in found]
