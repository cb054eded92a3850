"""asrmask itself."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrmask.presets import FAST
from asrmask.systems import Decoding, Heard, Piece, System, one_of, whole_number

if TYPE_CHECKING:
    from asrmask.transcription import Transcription


def load(options: Mapping[str, str], weights: str, threads: int, model_dir: str | None) -> System:
    import torch

    from asrmask.allocation import loading
    from asrmask.checkpoints import load_model
    from asrmask.policy import Policy

    torch.set_num_threads(threads)
    preset = one_of(options, "preset", ["none", "fast"])
    settings: dict[str, Any] = dict(FAST) if preset == "fast" else {}
    settings.pop("temperature_increment_on_fallback", None)  # the command's: here one is the only
    if "padding" in options:
        settings["padding"] = Policy.parse(options["padding"].replace("+", ","))
    if "fallback" in options:
        settings["policy_fallback"] = one_of(options, "fallback", ["yes", "no"]) == "yes"
    if "compute_type" in options:
        settings["compute_type"] = options["compute_type"]
    n_batch = whole_number(options, "batch", settings.pop("batch_size", 1))
    compute_type = settings.pop("compute_type", None)
    with loading():  # as the command does
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
        from asrmask import batches, transcriber, walk
        from asrmask.audio import Recording, Spectrogram

        self.timer.watch(Recording, "open", "audio")
        self.timer.watch(Spectrogram, "window", "spectrogram")
        self.timer.watch(transcriber, "encode", "encoder")
        self.timer.watch(transcriber, "decode_memory", "decoder")
        self.timer.watch(walk, "add_words", "decoder")
        self.timer.watch(batches, "encode_all", "encoder")
        self.timer.watch(batches, "decode_memory", "decoder")

    def transcribe(self, path: Path, decoding: Decoding) -> Heard:
        (heard,) = self.transcribe_all([path], decoding)
        return heard

    def transcribe_all(self, paths: Sequence[Path], decoding: Decoding) -> list[Heard]:
        from asrmask.batches import transcribe_all

        asked = {
            **self.settings,
            "beam_size": decoding.beam_size,
            "language": decoding.language,
            "task": decoding.task,
            "word_timestamps": decoding.word_timestamps,
        }
        found = transcribe_all(self.model, paths, batch_size=self.n_batch, **asked)
        return [_heard(one, decoding.word_timestamps) for one in found]


def _heard(found: "Transcription", has_words: bool) -> Heard:
    words = None
    if has_words:
        words = [
            Piece(word.start, word.end, word.word)
            for segment in found.segments
            for word in segment.words or []
        ]
    segments = [Piece(s.start, s.end, s.text) for s in found.segments]
    return Heard(found.text, segments, words, found.language)
