"""openai-whisper itself, with the same weights: the only place that imports its code."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrmask.model import Whisper


@cache
def whisper() -> Any:
    """The module openai-whisper."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that it imports
        import whisper
        import whisper.normalizers
    return whisper


def twin(model: Whisper) -> Any:
    """openai-whisper's model with the very weights of `model`."""
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
    """Whisper's own text normaliser for scoring: English, or the basic one."""
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
    state: Tensor | None = None  # of the random numbers, before it


def transcribe(other: Any, samples: np.ndarray, **options: Any) -> tuple[Any, list[Attempt]]:
    """openai-whisper's window loop, in float32: its result, and every window as it decoded it."""
    attempts: list[Attempt] = []

    def decode(mel: Tensor, options: Any) -> Any:
        state = torch.get_rng_state()
        result = whisper().decode(other, mel, options)
        kept = replace(result, audio_features=None)  # they are large
        attempts.append(Attempt(mel, options, kept, state))
        return result

    other.decode = decode  # in front of the method, which the loop looks up on the model
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it thinks of devices and of translated words
            return whisper().transcribe(other, samples, fp16=False, **options), attempts
    finally:
        del other.decode


def opening(other: Any, options: Any) -> list[int]:
    """The tokens before a window's text: what was said before, and the start sequence."""
    return list(whisper().decoding.DecodingTask(other, options).initial_tokens)
