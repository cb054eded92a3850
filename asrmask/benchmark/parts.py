"""Time the parts of a model by themselves: `python -m asrmask.benchmark.parts`.

No speech is needed: the encoder gets noise, and the decoder writes a fixed number of tokens, since
the end of the text is suppressed. What is timed is the same for each library:

- the encoder on one window, from log-Mel frames to features, without the decoder's keys and values;
- the decoder on the features of some clips, greedily, without timestamps: to the first token (with
  keys, values and prompt), and each token that follows (the least time of 33 tokens less that of
  one, divided).

Process, job and result are as in worker.py. Only the library that is timed is imported.
"""

import statistics
import timeit
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any

import numpy as np

from asrmask.audio.constants import FRAMES_PER_SECOND, N_FRAMES, N_POSITIONS
from asrmask.benchmark.worker import own_mb, peak_mb, run_job
from asrmask.errors import AsrmaskError, counted
from asrmask.tokenizer.tokenizer import get_tokenizer

LIBRARIES = {  # of models: their engines
    "asrmask": "asrmask.benchmark.asrmask_engine:AsrmaskEngine",
    "CTranslate2": "asrmask.benchmark.ctranslate2_engine:CTranslate2Engine",
}
COMPUTE_TYPES = ("float32", "int8")
ENCODER = "encoder, 30 s window"  # with all of its padding
N_TOKENS = 32  # that are timed after the first
N_CLIPS = (1, 8)
N_CALLS = 3  # of each part in a process; the median counts


class Engine(ABC):
    """A model that is loaded by a library."""

    encode: Callable[[], object]  # the encoder on a 30 s window
    encode_virtual: Mapping[str, Callable[[], object]]  # the same with virtual padding, by part
    n_mels: int
    width: int
    is_multilingual: bool
    num_languages: int

    @property
    def prompt(self) -> list[int]:
        """The tokens before an English text without timestamps."""
        return [*self._tokenizer.sot_sequence, self._tokenizer.no_timestamps]

    @property
    def suppressed(self) -> list[int]:
        """The usual tokens, and the end of the text."""
        return [-1, self._tokenizer.eot]

    @property
    def _tokenizer(self) -> Any:
        options: dict[str, Any] = {"language": "en", "task": "transcribe"}
        return get_tokenizer(self.is_multilingual, num_languages=self.num_languages, **options)

    @abstractmethod
    def load_features(self, features: np.ndarray) -> Any:
        """Convert features (B, T, D) to what `decode` takes."""

    @abstractmethod
    def decode(self, features: Any, n_tokens: int) -> list[int]:
        """Decode as many tokens of each clip; return their numbers."""


def noise_window(n_mels: int, seconds: float) -> np.ndarray:
    """A window (n_mels, 3000) of that much noise, then zeros."""
    window = np.zeros((n_mels, N_FRAMES), np.float32)
    n_frames = int(FRAMES_PER_SECOND * seconds)
    rng = np.random.default_rng(0)
    window[:, :n_frames] = rng.standard_normal((n_mels, n_frames), np.float32)
    return window


def time_parts(engine: Engine, n_calls: int) -> dict[str, float]:
    """Return the seconds of the parts that every library has, from n_calls calls of each."""
    seconds = {ENCODER: median_s(engine.encode, n_calls)}
    rng = np.random.default_rng(0)
    for n_clips in N_CLIPS:
        shape = (n_clips, N_POSITIONS, engine.width)
        features = engine.load_features(rng.standard_normal(shape, np.float32))
        calls = [partial(_decode, engine, features, n) for n in (1, 1 + N_TOKENS)]
        first_s, all_s = (times_s(call, n_calls) for call in calls)
        first_part = f"decoder, first token of {counted(n_clips, 'clip')}"
        seconds[first_part] = statistics.median(first_s)
        # the first token takes as long as many others: only the least of both differ by those
        seconds[token_part(n_clips)] = max(min(all_s) - min(first_s), 0.0) / N_TOKENS
    return seconds


def time_virtual_parts(engine: Engine, n_calls: int) -> dict[str, float]:
    """Return the seconds of the encoder with virtual padding, if the library has it."""
    return {part: median_s(call, n_calls) for part, call in engine.encode_virtual.items()}


def token_part(n_clips: int) -> str:
    return f"decoder, a token of {counted(n_clips, 'clip')}"


def _decode(engine: Engine, features: Any, n_tokens: int) -> None:
    got = engine.decode(features, n_tokens)
    if set(got) != {n_tokens}:
        raise AsrmaskError(f"a text must have {n_tokens} tokens to be timed, got {got}")


def median_s(call: Callable[[], object], n_calls: int) -> float:
    """Return the median seconds of a call."""
    return statistics.median(times_s(call, n_calls))


def times_s(call: Callable[[], object], n_calls: int) -> list[float]:
    """Return the seconds of each call, after one that warms up."""
    return timeit.repeat(call, number=1, repeat=n_calls + 1)[1:]


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Load a model and time its parts.

    job: library, weights, compute_type, threads, model_dir
    """
    options = {name: job[name] for name in ("compute_type", "threads", "model_dir")}
    engine = resolve_name(LIBRARIES[job["library"]])(job["weights"], **options)
    seconds = time_parts(engine, N_CALLS)
    memory = {"peak_mb": peak_mb(), "own_mb": own_mb()}  # of what every library has done
    return {"parts": seconds | time_virtual_parts(engine, N_CALLS), **memory}


if __name__ == "__main__":
    run_job(measure)
