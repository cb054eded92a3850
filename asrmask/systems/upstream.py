"""Run openai-whisper on asrmask's weights. Only this module imports its code."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrmask.model.whisper import Whisper


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
    module = whisper().model
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


@dataclass(frozen=True)
class Attempt:
    """One window, decoded once by openai-whisper."""

    mel: Tensor  # (n_mels, 3000)
    options: Any  # its DecodingOptions
    result: Any  # its DecodingResult
    state: Tensor | None = None  # of the random number generator, before decoding


def transcribe(other: Any, samples: np.ndarray, **options: Any) -> tuple[Any, list[Attempt]]:
    """Run openai-whisper's window loop in float32; return its result and every attempt."""
    attempts: list[Attempt] = []

    def decode(mel: Tensor, options: Any) -> Any:
        state = torch.get_rng_state()
        result = whisper().decode(other, mel, options)
        kept = replace(result, audio_features=None)  # large
        attempts.append(Attempt(mel, options, kept, state))
        return result

    other.decode = decode  # hides the method: the loop looks it up on the model
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about devices and translated word times
            return whisper().transcribe(other, samples, fp16=False, **options), attempts
    finally:
        del other.decode


def opening(other: Any, options: Any) -> list[int]:
    """Return the tokens before a window's text: the prompt and the start sequence."""
    return list(whisper().decoding.DecodingTask(other, options).initial_tokens)
