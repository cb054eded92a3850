"""openai-whisper, with the defaults of its Python API."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asrmask.systems import DecodingSettings, System, SystemTranscript


def load(options: Mapping[str, str], weights: str, threads: int, model_dir: str | None) -> System:
    import torch

    from asrmask.checkpoints import load_model
    from asrmask.systems.upstream import twin

    torch.set_num_threads(threads)
    return OpenaiWhisper(twin(load_model(weights, "cpu", model_dir)))


class OpenaiWhisper(System):
    def __init__(self, model: Any):
        super().__init__()
        from asrmask.systems import upstream

        self.model = model
        self._transcribe = upstream.whisper().transcribe

    def watch(self) -> None:
        super().watch()
        # whisper.transcribe is the function: it hides the module of the same name
        loop = self._transcribe.__globals__
        loop["log_mel_spectrogram"] = self.timer.timed("spectrogram", loop["log_mel_spectrogram"])
        for part in ("encoder", "decoder"):
            self.timer.watch(getattr(self.model, part), "forward", part)

    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        found = self._transcribe(
            self.model,
            self.load_audio(path),
            fp16=False,
            beam_size=decoding.beam_size,
            language=decoding.language,
            task=decoding.task,
            word_timestamps=decoding.word_timestamps,
        )
        return SystemTranscript.of(found)
