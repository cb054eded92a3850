"""Hugging Face transformers' Whisper."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asrmask.systems import DecodingSettings, Piece, System, SystemTranscript


def load(options: Mapping[str, str], weights: str, threads: int, model_dir: str | None) -> System:
    import torch

    from asrmask.checkpoints import load_model

    torch.set_num_threads(threads)
    return Transformers(load_model(weights, "cpu", model_dir))


class Transformers(System):
    def __init__(self, ours: Any):
        super().__init__()
        from asrmask.systems import huggingface
        from asrmask.tokenizer.tokenizer import get_tokenizer

        module = huggingface.transformers()
        module.logging.set_verbosity_error()
        self.model = huggingface.twin(ours)
        self.tokenizer = get_tokenizer(ours.is_multilingual, num_languages=ours.num_languages)
        self.extract = module.WhisperFeatureExtractor(feature_size=ours.dims.n_mels)

    def watch(self) -> None:
        super().watch()
        self.timer.watch(self, "extract", "spectrogram")
        self.timer.watch(self.model.model.encoder, "forward", "encoder")
        self.timer.watch(self.model.model.decoder, "forward", "decoder")

    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        import torch

        samples = self.load_audio(path)
        inputs = self.extract(
            samples,
            sampling_rate=16_000,
            return_tensors="pt",
            truncation=False,
            padding="longest" if len(samples) > 480_000 else "max_length",
            return_attention_mask=True,
        )
        choices: dict[str, Any] = {}
        if self.model.generation_config.is_multilingual:
            choices = {"language": decoding.language, "task": decoding.task}
        with torch.inference_mode():
            found = self.model.generate(
                inputs.input_features,
                attention_mask=inputs.attention_mask,
                return_timestamps=True,
                return_segments=True,
                num_beams=decoding.beam_size or 1,
                **choices,
            )
        pieces = [
            Piece(float(s["start"]), float(s["end"]), self._text(s["tokens"].tolist()))
            for s in found["segments"][0]
        ]
        return SystemTranscript(
            "".join(piece.text for piece in pieces), pieces, None, decoding.language
        )

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(t for t in tokens if t < self.tokenizer.eot)
