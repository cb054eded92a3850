"""Speech-to-text systems behind one face, all with the same weights: ours and the others.

A system is asked for by name, with its own settings behind a colon: `faster-whisper:int8,batch=8`.
Each is an optional package, imported when it is asked for.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from asrmask.errors import OptionError
from asrmask.files import replacing
from asrmask.systems.timer import Timer

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Piece:
    """A stretch of a recording and what is said in it: a segment or a word. Times in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Heard:
    """What a system made of a recording."""

    text: str
    segments: list[Piece]
    words: list[Piece] | None = None  # None: not asked for, or not offered
    language: str | None = None


@dataclass(frozen=True)
class Decoding:
    """What every system is asked for alike. The rest of its settings are its own defaults."""

    beam_size: int | None = None  # None: greedy
    language: str | None = None  # None: detected, where the model knows several
    task: str = "transcribe"
    word_timestamps: bool = False

    def __str__(self) -> str:
        return "greedy" if self.beam_size is None else f"beam {self.beam_size}"


class System(ABC):
    """A system with its weights loaded.

    timer: how long its parts took since `watch`, as far as it lets itself be timed
    """

    def __init__(self) -> None:
        self.timer = Timer()
        self.load_audio = load_audio

    def watch(self) -> None:
        """Count the time of its parts from now on, in this process, for good."""
        self.load_audio = self.timer.timed("audio", load_audio)

    @abstractmethod
    def transcribe(self, path: Path, decoding: Decoding) -> Heard:
        """What is said in a file."""

    def transcribe_all(self, paths: Sequence[Path], decoding: Decoding) -> list[Heard]:
        """Many files in one call: one by one, unless the system has a better way."""
        return [self.transcribe(path, decoding) for path in paths]


def load_audio(path: Path) -> "np.ndarray":
    """Float32 samples of a file, 16,000 a second, for systems that are given samples.

    Without PyTorch, so that a system's memory is its own.
    """
    import numpy as np

    from asrmask import media

    with media.opened(path, str(path)) as file:
        blocks = list(media.decode(file, str(path), 16_000))
    return np.concatenate(blocks) / np.float32(32768)


@dataclass(frozen=True)
class Kind:
    """A system that can be asked for."""

    module: str  # of asrmask.systems
    package: str  # what it needs, as Python imports it
    install: str  # and as pip does
    options: dict[str, str] = field(default_factory=dict)  # setting → which values it takes


BATCH = "a whole number of windows"
KINDS = {
    "asrmask": Kind(
        "ours",
        "torch",
        "asrmask",
        {
            "padding": "a policy",
            "fallback": "yes or no",
            "compute_type": "float32, int8 or bfloat16",
            "batch": BATCH,
            "preset": "fast",
        },
    ),
    "openai-whisper": Kind("openai_whisper", "whisper", "openai-whisper"),
    "faster-whisper": Kind(
        "faster_whisper",
        "faster_whisper",
        "faster-whisper",
        {"compute_type": "float32 or int8", "batch": BATCH},
    ),
    "whisper.cpp": Kind(
        "whisper_cpp", "pywhispercpp", "pywhispercpp", {"weights": "f16, q8_0 or q5_0"}
    ),
    "transformers": Kind("transformers", "transformers", "transformers"),
}


@dataclass(frozen=True)
class Named:
    """A system by name, with its settings: what `faster-whisper:int8,batch=8` stands for."""

    name: str
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> "Named":
        """
        >>> Named.parse("faster-whisper:int8,batch=8").options
        {'compute_type': 'int8', 'batch': '8'}
        """
        name, _, rest = text.partition(":")
        if name not in KINDS:
            raise OptionError(f"a system must be one of {', '.join(KINDS)}, got {name!r}")
        known = KINDS[name].options
        options: dict[str, str] = {}
        for part in filter(None, re.split(r"[,;]", rest)):
            key, sep, value = part.partition("=")
            if not sep and known:  # the first setting is the one that goes without its name
                key, value = next(iter(known)), part
            if key not in known or not value:
                allowed = ", ".join(f"{k}= ({v})" for k, v in known.items()) or "none"
                raise OptionError(f"settings of {name} must be of {allowed}, got {part!r}")
            options[key] = value
        return cls(name, options)

    def __str__(self) -> str:
        first = next(iter(KINDS[self.name].options), None)
        settings = ",".join(v if k == first else f"{k}={v}" for k, v in self.options.items())
        return f"{self.name}:{settings}" if settings else self.name

    def check(self) -> None:
        """Raise OptionError unless its package is installed."""
        kind = KINDS[self.name]
        if find_spec(kind.package) is None:
            raise OptionError(
                f"{self.name} needs the package {kind.install}, got none: pip install "
                f"{kind.install}"
            )


def prepare(named: Named, model_name: str, folder: Path, model_dir: str | None = None) -> str:
    """What `load` is to be given of a model: its name, or its weights, written to `folder`."""
    named.check()
    if named.name == "faster-whisper":
        from asrmask.checkpoints import read
        from asrmask.systems import ct2

        path, checkpoint = read(model_name, model_dir)
        if (path / "model.bin").is_file() and (path / "tokenizer.json").is_file():
            return str(path)
        out = folder / "ctranslate2"
        if not (out / "model.bin").exists():
            ct2.write(out, checkpoint)
        return str(out)
    if named.name == "whisper.cpp":
        from asrmask.checkpoints import read
        from asrmask.systems import ggml

        form = one_of(named.options, "weights", ggml.FORMS)
        out = folder / f"ggml-{form}.bin"
        if not out.exists():
            with replacing(out, binary=True) as file:
                ggml.write(file, read(model_name, model_dir)[1], form)
        return str(out)
    return model_name


def load(named: Named, weights: str, *, threads: int = 0, model_dir: str | None = None) -> System:
    """A system with weights that `prepare` gave, ready to transcribe.

    threads: CPU threads; 0: all cores
    """
    module = import_module(f"asrmask.systems.{KINDS[named.name].module}")
    return module.load(named.options, weights, threads or os.cpu_count() or 1, model_dir)


def whole_number(options: Mapping[str, str], key: str, default: int) -> int:
    """The whole number, 1 or more, that a setting gives."""
    value = options.get(key, str(default))
    if not value.isdecimal() or int(value) < 1:
        raise OptionError(f"{key} must be a whole number, 1 or more, got {value!r}")
    return int(value)


def one_of(options: Mapping[str, str], key: str, allowed: Iterable[str]) -> str:
    """The value of a setting, the first of those allowed if it is not given."""
    several = list(allowed)
    value = options.get(key, several[0])
    if value not in several:
        raise OptionError(f"{key} must be one of {', '.join(several)}, got {value!r}")
    return value
