"""Where live audio comes from: a microphone, a pipe, or a file at the speed of speech.

A source yields blocks of mono int16 samples at 16 kHz, as `audio/media.py:decode` does.
"""

import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np

from asrmask.audio.constants import SAMPLE_RATE
from asrmask.audio.media import resample_blocks, unbuffered
from asrmask.errors import AudioError, MissingPackageError, OptionError, one_line

BLOCK_S = 0.1  # of audio in a block of a file or microphone
POLL_S = 0.1  # between looks at whether to stop
MAX_WAITING = 1000  # blocks of a pipe that are read ahead


def microphone(device: str | None, stop: threading.Event) -> Iterator[np.ndarray]:
    """Yield audio of a microphone until `stop`.

    device: its number or part of its name; None: the default one
    """
    sounddevice = _sounddevice()
    chosen: Any = int(device) if device is not None and device.isdecimal() else device
    blocks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    try:
        rate = round(sounddevice.query_devices(chosen, "input")["default_samplerate"])
        stream = sounddevice.RawInputStream(
            samplerate=rate,
            blocksize=round(rate * BLOCK_S),
            device=chosen,
            channels=1,
            dtype="int16",
            callback=lambda data, *_: blocks.put(bytes(data)),
        )
    except (sounddevice.PortAudioError, ValueError) as error:
        name = "default microphone" if device is None else f"microphone {device}"
        raise AudioError(f"{name}: {one_line(error)}, expected one of --list_devices") from None

    def recorded() -> Iterator[np.ndarray]:
        with stream:
            while not stop.is_set():
                try:
                    yield np.frombuffer(blocks.get(timeout=POLL_S), "<i2")
                except queue.Empty:
                    if not stream.active:
                        raise AudioError("the microphone stopped, expected more audio") from None

    return resample_blocks(recorded(), rate)


def devices() -> list[str]:
    """Return a line for each microphone: its number, and its name."""
    found = enumerate(_sounddevice().query_devices())
    return [f"{i}  {one['name']}" for i, one in found if one["max_input_channels"] > 0]


def _sounddevice() -> Any:
    try:
        import sounddevice
    except ImportError:
        install = "asrmask[live]"
        raise MissingPackageError("the microphone", "sounddevice", install) from None
    except OSError as error:  # its library is missing
        raise AudioError(
            f"sounddevice cannot record here: {one_line(error)} (on Debian: apt install "
            "libportaudio2)"
        ) from None
    return sounddevice


def raw_pipe(pipe: IO[bytes], rate: int, problems: list[str]) -> Iterator[np.ndarray]:
    """Yield mono s16le samples of a pipe.

    problems: receives a message if the pipe ends within a sample
    """
    if not 1_000 <= rate <= 768_000:
        raise OptionError(f"--rate must be in 1000..768000, got {rate}")

    def blocks() -> Iterator[np.ndarray]:
        rest = b""
        size = 2 * round(rate * BLOCK_S)
        source = unbuffered(pipe)
        while data := source.read(size):
            data = rest + data
            n_whole = len(data) // 2 * 2
            rest = data[n_whole:]
            if n_whole:
                yield np.frombuffer(data[:n_whole], "<i2")
        if rest:
            problems.append("standard input: ends within a sample, got 1 byte, expected 2")

    return resample_blocks(blocks(), rate)


def paced(blocks: Iterable[np.ndarray], stop: threading.Event) -> Iterator[np.ndarray]:
    """Yield audio at the speed of speech, in blocks of BLOCK_S."""
    start_time, n_samples = time.monotonic(), 0
    for block in in_pieces(blocks):
        n_samples += len(block)
        stop.wait(max(start_time + n_samples / SAMPLE_RATE - time.monotonic(), 0))
        if stop.is_set():
            return
        yield block


def in_pieces(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Cut longer blocks to BLOCK_S."""
    size = round(BLOCK_S * SAMPLE_RATE)
    for block in blocks:
        for i in range(0, len(block), size):
            yield block[i : i + size]


def arrivals(
    blocks: Iterable[np.ndarray], step: float, stop: threading.Event
) -> Iterator[tuple[np.ndarray, bool]]:
    """Read blocks in a thread; yield what has arrived, and whether that is more than a step.

    More than a step: the computer is behind, or the audio comes faster than speech.
    """
    arrived: queue.Queue[np.ndarray | Exception | None] = queue.Queue(MAX_WAITING)

    def put(item: np.ndarray | Exception | None) -> None:
        while not stop.is_set():
            try:
                return arrived.put(item, timeout=POLL_S)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for block in blocks:
                put(block)
                if stop.is_set():
                    break
            put(None)
        except Exception as error:
            put(error)

    threading.Thread(target=read, daemon=True).start()
    while not stop.is_set():
        try:
            items = [arrived.get(timeout=POLL_S)]
        except queue.Empty:
            continue
        while not arrived.empty():
            items.append(arrived.get())
        pieces = [item for item in items if isinstance(item, np.ndarray)]
        if pieces:
            samples = np.concatenate(pieces)
            yield samples, len(samples) > step * SAMPLE_RATE
        if isinstance(items[-1], Exception):
            raise items[-1]
        if items[-1] is None:
            return
