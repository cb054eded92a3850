"""Flags that several commands share, and how flags are added from tables."""

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from asrmask.checkpoints.registry import DEFAULT
from asrmask.cli import boolean
from asrmask.errors import OptionError
from asrmask.model.policy import ALLOWED


def _optional(kind: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return None if text == "None" else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {expected} or None, got {text!r}") from None

    return parse


optional_int = _optional(int, "a whole number")
optional_float = _optional(float, "a number")
METAVARS = {boolean: "[True|False]", int: "N", optional_int: "N", float: "X", optional_float: "X"}

# a flag: name, with aliases after spaces; type, or for texts the metavar or choices; default; help
Flag = tuple[str, Any, Any, str]

FILES = "audio or video files, folders of them, or - for standard input"
WEIGHTS = "an official model (see asrmask models), or a path of weights"
MODEL_DIR: Flag = ("model_dir", "DIR", None, "folder of models (default: ~/.cache/whisper)")
ADAPTER: Flag = ("adapter", "FILE", None, "an adapter of asrmask train for these weights")
MODEL: list[Flag] = [("model", "MODEL", DEFAULT, WEIGHTS), ADAPTER, MODEL_DIR]
THREADS: Flag = ("threads", optional_int, 0, "number of CPU threads; 0: PyTorch's choice")
DEVICE: Flag = ("device", "DEVICE", None, "cpu, cuda, … (default: a GPU if there is one)")
LANGUAGE: Flag = ("language", "LANGUAGE", None, "code or English name (default: detected)")
PADDING: Flag = ("padding", "POLICY", "full", f"what the model may see of the padding: {ALLOWED}")


def add_flags(group: Any, flags: Iterable[Flag]) -> None:
    """Add flags to a parser or to a group of its flags. Their help ends with the default."""
    for names, kind, default, text in flags:
        if default is not None:
            text += f" (default: {default})"
        group.add_argument(
            *(f"--{name}" if len(name) > 1 else f"-{name}" for name in names.split()),
            type=kind if callable(kind) else str,
            metavar=kind if isinstance(kind, str) else METAVARS.get(kind),
            choices=kind if isinstance(kind, tuple) else None,
            default=default,
            help=text.replace("%", "%%"),
        )


def set_threads(threads: int | None) -> None:
    """Set PyTorch's number of threads; 0 or None: leave it."""
    import torch

    if threads is not None and threads < 0:
        raise OptionError(f"--threads must be 0 or more, got {threads}")
    if threads:
        torch.set_num_threads(threads)


def output_folder(text: str) -> Path:
    """Create the folder of --out."""
    try:
        os.makedirs(text, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out must be a folder, got {text} ({error.strerror})") from None
    return Path(text)
