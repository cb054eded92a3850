"""Prepare the arguments of functions that decode windows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asrmask.audio.spectrogram import Features
from asrmask.errors import OptionError
from asrmask.model.encoding import FULL
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper


def _batch(mel: Tensor | Features | Sequence[Features]) -> tuple[Any, bool]:
    """Return the windows as a batch, and whether a single window was given."""
    if isinstance(mel, Features):
        return [mel], True
    if isinstance(mel, Tensor) and mel.ndim == 2:
        return mel[None], True
    if isinstance(mel, Tensor):
        return mel, False
    if isinstance(mel, (list, tuple)) and all(isinstance(window, Features) for window in mel):
        return mel, False
    raise OptionError(
        f"mel must be a tensor of log-Mel frames or Features, got {type(mel).__name__}: "
        f"log_mel_spectrogram makes one from samples"
    )


def _policy(padding: Policy | str | None, windows: Tensor | Sequence[Features]) -> Policy:
    """Return the given policy; if None, `full` with the fill of the windows."""
    if padding is not None:
        return Policy.parse(padding)
    return FULL if isinstance(windows, Tensor) or not windows else Policy(fill=windows[0].fill)


def use_precision(model: Whisper, fp16: bool) -> None:
    """Convert a model on a GPU to float16 or float32; leave a model on a CPU unchanged."""
    if model.device.type != "cpu":
        model.to(torch.float16 if fp16 else torch.float32)
