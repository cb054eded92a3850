"""asrmask itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asrmask.systems import Decoding, Heard, Piece, System, one_of


def load(options: Mapping[str, str], weights: str, threads: int, model_dir: str | None) -> System:
    import torch

    from asrmask.checkpoints import load_model
    from asrmask.policy import Policy

    torch.set_num_threads(threads)
    settings: dict[str, Any] = {}
    if "padding" in options:
        settings["padding"] = Policy.parse(options["padding"].replace("+", ","))
    if "fallback" in options:
        settings["policy_fallback"] = one_of(options, "fallback", ["yes", "no"]) == "yes"
    return Ours(load_model(weights, "cpu", model_dir), settings)


class Ours(System):
    def __init__(self, model: Any, settings: dict[str, Any]):
        super().__init__()
        self.model = model
        self.settings = settings

    def watch(self) -> None:
        super().watch()
        from asrmask import transcriber
        from asrmask.audio import Recording, Spectrogram

        self.timer.watch(Recording, "open", "audio")
        self.timer.watch(Spectrogram, "window", "spectrogram")
        self.timer.watch(transcriber, "encode", "encoder")
        self.timer.watch(transcriber, "decode_memory", "decoder")
        self.timer.watch(transcriber, "add_words", "decoder")

    def transcribe(self, path: Path, decoding: Decoding) -> Heard:
        from asrmask.transcriber import transcribe

        found = transcribe(
            self.model,
            path,
            beam_size=decoding.beam_size,
            language=decoding.language,
            task=decoding.task,
            word_timestamps=decoding.word_timestamps,
            **self.settings,
        )
        words = None
        if decoding.word_timestamps:
            words = [
                Piece(word.start, word.end, word.word)
                for segment in found.segments
                for word in segment.words or []
            ]
        segments = [Piece(s.start, s.end, s.text) for s in found.segments]
        return Heard(found.text, segments, words, found.language)
