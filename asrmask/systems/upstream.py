"""Run openai-whisper on asrmask's weights. Only this module imports its code."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrmask.checkpoints import load_model
from asrmask.model.whisper import Whisper
from asrmask.systems import DecodingSettings, System, SystemTranscript


@cache
def whisper() -> Any:
    """Import and return openai-whisper's module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from packages that it imports
        import whisper
        import whisper.normalizers
    return whisper


def twin(model: Whisper) -> Any:
    """Return openai-whisper's model sharing the weights of `model`."""
    module, n_threads = whisper().model, torch.get_num_threads()
    # numba, used for word times, sets OpenMP's thread count once, at its start: PyTorch's too
    whisper().timing.numba.get_num_threads()  # starts it
    torch.set_num_threads(n_threads)
    other = module.Whisper(module.ModelDimensions(**model.dims.as_dict()))
    other.load_state_dict(model.state_dict(), assign=True)
    heads = torch.zeros(model.dims.n_text_layer, model.dims.n_text_head, dtype=torch.bool)
    for layer, head in model.alignment_heads:
        heads[layer, head] = True
    other.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)
    return other.to(model.device).eval()


@cache
def normalizer(language: str = "en") -> Callable[[str], str]:
    """Return Whisper's text normaliser for scoring: English, or the basic one."""
    module = whisper().normalizers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves a file open
        return module.EnglishTextNormalizer() if language == "en" else module.BasicTextNormalizer()


class OpenaiWhisper(System):
    """openai-whisper, with the defaults of its Python API."""

    def __init__(self, options: dict[str, str], weights: str, threads: int, model_dir: str | None):
        self.model = twin(load_model(weights, "cpu", model_dir, cpu_threads=threads))

    def watch(self) -> None:
        super().watch()
        # whisper.transcribe is the function: it hides the module of the same name
        self.timer.watch(sys.modules["whisper.transcribe"], "log_mel_spectrogram", "spectrogram")
        for part in ("encoder", "decoder"):
            self.timer.watch(getattr(self.model, part), "forward", part)

    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        samples = self.load_audio(path)
        result = whisper().transcribe(self.model, samples, fp16=False, **asdict(decoding))
        return SystemTranscript.of(result)


@dataclass(frozen=True)
class Attempt:
    """One window, decoded once by openai-whisper."""

    mel: Tensor  # (n_mels, 3000)
    options: Any  # its DecodingOptions
    result: Any  # its DecodingResult
    rng_state: Tensor | None = None  # before decoding


def transcribe(other: Any, samples: np.ndarray, **options: Any) -> tuple[Any, list[Attempt]]:
    """Run openai-whisper's window loop in float32; return its result and every attempt."""
    attempts: list[Attempt] = []

    def decode(mel: Tensor, options: Any) -> Any:
        rng_state = torch.get_rng_state()
        result = whisper().decode(other, mel, options)
        attempts.append(Attempt(mel, options, replace(result, audio_features=None), rng_state))
        return result

    other.decode = decode  # hides the method: the loop looks it up on the model
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about devices and translated word times
            return whisper().transcribe(other, samples, fp16=False, **options), attempts
    finally:
        del other.decode


def initial_tokens(other: Any, options: Any) -> list[int]:
    """Return the tokens before a window's text: the prompt and the start sequence."""
    return list(whisper().decoding.DecodingTask(other, options).initial_tokens)
