"""One interface to asrmask and other speech-to-text systems, all with the same weights.

A system is given by name, with its settings after a colon: `faster-whisper:int8,batch=8`. Each
needs an optional package, which is imported on first use.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrmask.errors import OptionError
from asrmask.extras import require
from asrmask.files import atomic_write
from asrmask.systems.timer import Timer

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Piece:
    """A segment or a word, with its times in seconds."""

    start: float
    end: float
    text: str


def _piece(found: Mapping[str, Any], text: str) -> Piece:
    return Piece(float(found["start"]), float(found["end"]), found[text])


@dataclass(frozen=True)
class SystemTranscript:
    """The transcript of a recording by one system."""

    text: str
    segments: list[Piece]
    words: list[Piece] | None = None  # None: not requested, or not supported
    language: str | None = None

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "SystemTranscript":
        """Convert a transcription of openai-whisper or asrmask."""
        segments = result["segments"]
        words = None
        if any("words" in segment for segment in segments):
            words = [_piece(word, "word") for s in segments for word in s.get("words", [])]
        pieces = [_piece(segment, "text") for segment in segments]
        return cls(result["text"], pieces, words, result["language"])


@dataclass(frozen=True)
class DecodingSettings:
    """Settings that are the same for every system. All others are the system's defaults."""

    beam_size: int | None = None  # None: greedy
    language: str | None = None  # None: detected, if the model is multilingual
    task: str = "transcribe"
    word_timestamps: bool = False

    def __str__(self) -> str:
        return "greedy" if self.beam_size is None else f"beam {self.beam_size}"


class System(ABC):
    """A system with its weights loaded.

    timer: seconds in each part since `watch`, for the parts that can be timed
    """

    def __init__(self) -> None:
        self.timer = Timer()
        self.load_audio = load_audio

    def watch(self) -> None:
        """Start timing the system's parts, for the rest of this process."""
        self.load_audio = self.timer.timed("audio", load_audio)

    @abstractmethod
    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        """Transcribe a file."""

    def transcribe_all(
        self, paths: Sequence[Path], decoding: DecodingSettings
    ) -> list[SystemTranscript]:
        """Transcribe many files: one by one, unless the system overrides this."""
        return [self.transcribe(path, decoding) for path in paths]


def load_audio(path: Path) -> "np.ndarray":
    """Load a file as float32 samples at 16 kHz, for systems that take samples.

    PyTorch is not imported, so that it does not count in a system's memory.
    """
    import numpy as np

    from asrmask.audio import media

    with media.opened(path, str(path)) as file:
        blocks = list(media.decode(file, str(path), 16_000))
    return np.concatenate(blocks) / np.float32(32768)


@dataclass(frozen=True)
class Kind:
    """A supported system."""

    module: str  # in asrmask.systems
    package: str  # that it needs: import name
    install: str  # the same: pip name
    options: dict[str, str] = field(default_factory=dict)  # setting → description of its values


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
    """The name of a system and its settings, as in `faster-whisper:int8,batch=8`."""

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
            if not sep and known:  # the first setting may be given without its name
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
        """Raise MissingPackageError unless its package is installed."""
        kind = KINDS[self.name]
        require(self.name, kind.package, install=kind.install)


def prepare(named: Named, model_name: str, folder: Path, model_dir: str | None = None) -> str:
    """Return the `weights` argument of `load`: a model name, or a path.

    Weights in another format are written to `folder` if the system needs them.
    """
    named.check()
    if named.name == "faster-whisper":
        from asrmask.checkpoints import ctranslate2_writer, read

        path, checkpoint = read(model_name, model_dir)
        if (path / "model.bin").is_file() and (path / "tokenizer.json").is_file():
            return str(path)
        out = folder / "ctranslate2"
        if not (out / "model.bin").exists():
            ctranslate2_writer.write(out, checkpoint)
        return str(out)
    if named.name == "whisper.cpp":
        from asrmask.checkpoints import ggml, read

        form = one_of(named.options, "weights", ggml.FORMS)
        out = folder / f"ggml-{form}.bin"
        if not out.exists():
            with atomic_write(out, binary=True) as file:
                ggml.write(file, read(model_name, model_dir)[1], form)
        return str(out)
    return model_name


def load(named: Named, weights: str, *, threads: int = 0, model_dir: str | None = None) -> System:
    """Load a system with weights from `prepare`.

    threads: CPU threads; 0: all cores
    """
    module = import_module(f"asrmask.systems.{KINDS[named.name].module}")
    return module.load(named.options, weights, threads or os.cpu_count() or 1, model_dir)


def whole_number(options: Mapping[str, str], key: str, default: int) -> int:
    """Parse a setting as a whole number, 1 or more."""
    value = options.get(key, str(default))
    if not value.isdecimal() or int(value) < 1:
        raise OptionError(f"{key} must be a whole number, 1 or more, got {value!r}")
    return int(value)


def one_of(options: Mapping[str, str], key: str, allowed: Iterable[str]) -> str:
    """Return the value of a setting; the default is the first allowed value."""
    several = list(allowed)
    value = options.get(key, several[0])
    if value not in several:
        raise OptionError(f"{key} must be one of {', '.join(several)}, got {value!r}")
    return value
