"""Replay recordings to live transcribers, on a clock that skips the waiting.

Audio arrives at the speed of speech, on a clock. Computing takes the clock forward by the time that
it took. What arrived meanwhile is pushed at once, as a program that falls behind would get it.
Needs only NumPy, so that it runs beside the packages of other systems too (peers.py).
"""

import resource
import time
import wave
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

RATE = 16_000

# what was shown: kind ("partial", "committed" or "endpoint") and text
Shown = tuple[str, str]


class Transcriber(Protocol):
    """One live transcription."""

    def push(self, samples: np.ndarray, late: bool) -> list[Shown]:
        """Add 16 kHz samples. late: they are more than a step."""
        ...

    def finish(self) -> list[Shown]: ...


def read_wav(path: str) -> np.ndarray:
    """Return the float32 samples of a 16 kHz mono WAV file."""
    with wave.open(path) as file:
        assert (file.getframerate(), file.getnchannels()) == (RATE, 1), path
        return np.frombuffer(file.readframes(file.getnframes()), "<i2") / np.float32(32768)


def replay(samples: np.ndarray, one: Transcriber, piece_s: float, step_s: float) -> dict[str, Any]:
    """Replay a recording.

    piece_s: of audio in a push, at least
    step_s:  more than this at once is late
    returns events [kind, text, time on the clock], pushes [audio until, start, seconds], cpu_s
    """
    events: list[list[Any]] = []
    pushes: list[list[float]] = []
    position, clock = 0, 0.0
    cpu_before = cpu_s()
    while position < len(samples):
        end = min(position + round(piece_s * RATE), len(samples))
        clock = max(clock, end / RATE)
        end = min(max(end, int(clock * RATE)), len(samples))
        piece, position = samples[position:end], end
        start = time.perf_counter()
        shown = one.push(piece, len(piece) > (piece_s + step_s) * RATE)
        seconds = time.perf_counter() - start
        pushes.append([round(position / RATE, 3), round(clock, 4), round(seconds, 5)])
        clock += seconds
        events += [[kind, text, round(clock, 4)] for kind, text in shown]
    start = time.perf_counter()
    shown = one.finish()
    clock += time.perf_counter() - start
    events += [[kind, text, round(clock, 4)] for kind, text in shown]
    seconds = round(len(samples) / RATE, 3)
    return {
        "events": events,
        "pushes": pushes,
        "cpu_s": round(cpu_s() - cpu_before, 3),
        "seconds": seconds,
    }


def cpu_s() -> float:
    """Seconds of computing of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def replay_all(
    files: Sequence[str], create: Any, piece_s: float, step_s: float
) -> list[dict[str, Any]]:
    """Replay each file to a transcriber of its own; the first also once before, to warm up."""
    warm_up = create()
    warm_up.push(read_wav(files[0])[: 10 * RATE], False)
    warm_up.finish()
    return [replay(read_wav(path), create(), piece_s, step_s) for path in files]
