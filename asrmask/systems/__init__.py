"""One interface to asrmask and other speech-to-text systems, all with the same weights.

A system is given by name, with its settings after a colon: `faster-whisper:int8,batch=8`. Each
needs an optional package, which is imported on first use.
"""

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from asrmask.errors import OptionError
from asrmask.extras import require
from asrmask.files import atomic_write

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class TimedText:
    """A segment or a word, with its times in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class SystemTranscript:
    """The transcript of a recording by one system."""

    text: str
    segments: list[TimedText]
    words: list[TimedText] | None = None  # None: not requested, or not supported
    language: str | None = None

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "SystemTranscript":
        """Convert the result of openai-whisper, or one with the same keys."""

        def timed(parts: Iterable[Mapping[str, Any]], key: str) -> list[TimedText]:
            return [TimedText(float(p["start"]), float(p["end"]), p[key]) for p in parts]

        segments = result["segments"]
        words = [s["words"] for s in segments if s.get("words") is not None]
        timed_words = timed(chain(*words), "word") if words else None
        return cls(result["text"], timed(segments, "text"), timed_words, result["language"])


@dataclass(frozen=True)
class DecodingSettings:
    """Settings that are the same for every system. All others are the system's defaults."""

    beam_size: int | None = None  # None: greedy
    language: str | None = None  # None: detected, if the model is multilingual
    task: str = "transcribe"
    word_timestamps: bool = False

    def __str__(self) -> str:
        return "greedy" if self.beam_size is None else f"beam {self.beam_size}"


def load_audio(path: Path) -> "np.ndarray":
    """Load a file as float32 samples at 16 kHz, for systems that take samples.

    PyTorch is not imported, so that it does not count in a system's memory.
    """
    import numpy as np

    from asrmask.audio import media

    return np.concatenate(list(media.decode(path))) / np.float32(32768)


class Timer:
    """Seconds spent in each part; time in a nested part counts for the inner one only."""

    def __init__(self) -> None:
        self._inner_s = 0.0  # in parts within the one that is running
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(("audio", "spectrogram", "encoder", "decoder"), 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a block for a part; as a decorator, that of a function."""
        inner_s, self._inner_s = self._inner_s, 0.0
        begun = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - begun
            self.seconds[name] += elapsed - self._inner_s
            self._inner_s = inner_s + elapsed

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Replace a method (or a module's function) with one whose time counts for a part."""
        setattr(owner, method, self.part(name)(getattr(owner, method)))


class System(ABC):
    """A system with its weights loaded."""

    timer: Timer  # seconds in each part since `watch`, for the parts that can be timed
    load_audio: "Callable[[Path], np.ndarray]" = staticmethod(load_audio)

    def watch(self) -> None:
        """Start timing the system's parts, for the rest of this process."""
        self.timer = Timer()
        self.load_audio = self.timer.part("audio")(load_audio)

    @abstractmethod
    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        """Transcribe a file."""

    def transcribe_all(
        self, paths: Sequence[Path], decoding: DecodingSettings
    ) -> list[SystemTranscript]:
        """Transcribe many files: one by one, unless the system overrides this."""
        return [self.transcribe(path, decoding) for path in paths]


@dataclass(frozen=True)
class Kind:
    """A supported system."""

    system: str  # its class, as module:class in asrmask.systems
    package: str  # that it needs: import name
    install: str  # the same: pip name
    options: dict[str, str] = field(default_factory=dict)  # setting → description of its values


BATCH = "a whole number of windows"
ASRMASK_OPTIONS = {
    "padding": "a policy",
    "fallback": "yes or no",
    "compute_type": "float32, int8 or bfloat16",
    "batch": BATCH,
    "preset": "fast",
}
CTRANSLATE2_OPTIONS = {"compute_type": "float32 or int8", "batch": BATCH}
GGML_OPTIONS = {"weights": "f16, q8_0 or q5_0"}
KINDS = {
    "asrmask": Kind("ours:Asrmask", "torch", "asrmask", ASRMASK_OPTIONS),
    "openai-whisper": Kind("upstream:OpenaiWhisper", "whisper", "openai-whisper"),
    "faster-whisper": Kind(
        "faster_whisper:FasterWhisper", "faster_whisper", "faster-whisper", CTRANSLATE2_OPTIONS
    ),
    "whisper.cpp": Kind("whisper_cpp:WhisperCpp", "pywhispercpp", "pywhispercpp", GGML_OPTIONS),
    "transformers": Kind("huggingface:Transformers", "transformers", "transformers"),
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
        from asrmask.checkpoints import ctranslate2, read

        path, checkpoint = read(model_name, model_dir)
        if (path / "model.bin").is_file() and (path / "tokenizer.json").is_file():
            return str(path)
        out = folder / "ctranslate2"
        if not (out / "model.bin").exists():
            ctranslate2.write(out, checkpoint)
        return str(out)
    if named.name == "whisper.cpp":
        from asrmask.checkpoints import ggml, read

        form = one_of(named.options, "weights", ggml.FORMATS)
        out = folder / f"ggml-{form}.bin"
        if not out.exists():
            with atomic_write(out, binary=True) as file:
                ggml.write(file, read(model_name, model_dir)[1], form)
        return str(out)
    return model_name


def load(named: Named, weights: str, *, threads: int = 0, model_dir: str | None = None) -> System:
    """Load a system with weights from `prepare`; threads: of the CPU, 0: all cores."""
    system = resolve_name(f"asrmask.systems.{KINDS[named.name].system}")
    return system(named.options, weights, threads or os.cpu_count() or 1, model_dir)


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
