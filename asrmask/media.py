"""Any audio or video file to mono samples, through PyAV (FFmpeg's libraries)."""

import errno
import io
import os
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import numpy as np

from asrmask.errors import AudioError, AudioWarning, one_line

if TYPE_CHECKING:
    from av import AudioFrame, AudioStream
    from av.container import InputContainer

SPOOL_BYTES = 32 * 2**20  # more than that waits on disk, not in memory
TRUNCATED_S = 0.1  # a file that much shorter than its header says is reported
MAX_BAD_PACKETS = 1000  # and no good one: no use in going on
# Below 1 kHz there is no speech. DSD512, the fastest in use, is decoded to 2.8 MHz; the resampler's
# filter grows with the rate: 45 MB at 3 MHz, 830 MB at 100 MHz.
RATES = range(1_000, 3_000_001)
CHANNELS = range(1, 65)  # that FFmpeg resamples
# A small file may be long, but not without end. FLAC stores silence at 8 kHz in a byte for 0.6 s,
# other formats need more.
LEAST_MOST_S = 3600.0  # may be in any file
MOST_S_PER_BYTE = 0.6  # and in larger ones
LARGEST = float(np.finfo(np.float32).max)
MOST_WAV_CHUNKS = 1000  # to look at before the samples
EXACT = {"flac", "aiff", "w64", "caf"}  # FFmpeg's names of formats that tell their length
TIMED = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}  # that do, and have time stamps


# a path ("-": standard input), the content of a file, or a file that is open for reading bytes
Source = str | Path | bytes | IO[bytes]


def name_of(source: Source) -> str:
    """What a source is called in messages."""
    if isinstance(source, (str, Path)):
        return "standard input" if source == "-" else str(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else f"audio ({type(source).__name__})"


def opened(source: Source, name: str) -> IO[bytes]:
    """The source as a file that can seek: what comes through a pipe is copied first."""
    try:
        if isinstance(source, bytes):
            file: IO[bytes] = io.BytesIO(source)
        elif not isinstance(source, (str, Path)):
            file = _copied(source)  # it stays open: its owner closes it
        elif source == "-":
            if sys.stdin is None:
                raise AudioError(f"{name}: closed, expected audio")
            file = _copied(sys.stdin.buffer)
        elif Path(source).is_dir():
            raise AudioError(f"{name}: is a folder, expected an audio file")
        else:
            file = Path(source).open("rb")  # noqa: SIM115
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                with file as pipe:
                    file = _copied(pipe)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise AudioError(f"{name}: {_reason(error)}, expected an audio file") from None
    if file.seek(0, os.SEEK_END) == 0:
        file.close()
        raise AudioError(f"{name}: empty, got 0 bytes, expected an audio file")
    file.seek(0)
    return file


def _copied(pipe: IO[bytes]) -> IO[bytes]:
    file = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115
    try:
        shutil.copyfileobj(pipe, file)
    except TypeError:
        file.close()
        raise ValueError("it gives text") from None
    return cast("IO[bytes]", file)


def decode(
    file: IO[bytes], name: str, rate: int, problems: list[str] | None = None
) -> Iterator[np.ndarray]:
    """Samples of a file's audio stream: int16 blocks, mono, `rate` a second.

    Upstream's loader passes through 16-bit integers, so this does too. A file that ends too soon
    gives what it has, and a line in `problems`; if there is no such list, an AudioWarning.
    """
    problem = None
    try:
        reading = _Reading(file)
        yield from reading.blocks(rate)
        problem = reading.problem()
    except AudioError as error:
        raise AudioError(f"{name}: {error}") from None
    except Exception as error:  # damage makes FFmpeg and PyAV fail in any way
        raise AudioError(
            f"{name}: expected audio that FFmpeg can read, got: {_reason(error)}"
        ) from None
    if problem is not None and problems is not None:
        problems.append(f"{name}: {problem}")
    elif problem is not None:
        warnings.warn(f"{name}: {problem}", AudioWarning, stacklevel=2)


class _Source:
    """A file as PyAV reads it, whose seek does not raise: PyAV would print the traceback."""

    def __init__(self, file: IO[bytes]):
        self.read = file.read
        self.tell = file.tell
        self._seek = file.seek

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        try:
            return self._seek(offset, whence)
        except (OSError, ValueError, OverflowError):  # a place before the beginning, or beyond 2^63
            return -errno.EINVAL


class _Reading:
    """The audio stream of a file, and how reading it goes."""

    def __init__(self, file: IO[bytes]):
        self.n_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        self.share = _wav_share(file)
        file.seek(0)
        self.file = file
        self.got_s = 0.0
        self.n_bad = 0  # packets that do not decode
        self.end_s = 0.0  # of the last packet, where the format has time stamps
        self.promised_s: float | None = None
        self.stopped: str | None = None  # why reading ended before the end

    def blocks(self, rate: int) -> Iterator[np.ndarray]:
        """Mono int16 samples, `rate` a second."""
        import av

        most_s = max(LEAST_MOST_S, self.n_bytes * MOST_S_PER_BYTE)
        n_out = 0
        with av.open(_Source(self.file), mode="r", metadata_errors="ignore") as container:
            stream = _audio_of(container)
            for block in _resampled(self.frames(container, stream), rate):
                n_out += len(block)
                self.got_s = n_out / rate
                yield block
                if self.got_s > most_s:
                    self.stopped = f"{self.n_bytes} bytes cannot hold that much"
                    break
            self.promised_s = _promised_s(container, stream)
        if self.share < 1 and n_out:
            self.promised_s = self.got_s / self.share

    def problem(self) -> str | None:
        """What is wrong with the file, if anything; an AudioError if nothing could be read."""
        if self.got_s == 0:
            damage = f"{self.n_bad} damaged packets" if self.n_bad else "none"
            raise AudioError(f"expected audio samples, got {self.stopped or damage}")
        got = f"got {self.got_s:.2f} s of audio"
        promised_s = self.promised_s or 0.0
        if max(self.got_s, self.end_s) < promised_s - TRUNCATED_S:
            return f"truncated, {got}, expected {promised_s:.2f} s"
        if self.stopped is not None:
            return f"damaged, {got}, expected more ({self.stopped})"
        if self.n_bad > 1:  # one may be a cut-off last packet, or a tag that looks like one
            return f"damaged, got {self.n_bad} packets that do not decode, expected none"
        return None

    def frames(self, container: "InputContainer", stream: "AudioStream") -> "Iterator[AudioFrame]":
        """Decoded frames; what cannot be decoded is counted and left out."""
        import av

        may_hold_nan = stream.codec_context.name.startswith("pcm_f")
        n_good = n_packets = 0
        packets = container.demux(stream)
        while n_good or self.n_bad <= MAX_BAD_PACKETS:
            try:
                packet = next(packets, None)
            except av.error.EOFError:
                return
            except Exception as error:
                self.stopped = _reason(error)
                return
            if packet is None:
                return
            n_packets += 1
            if n_packets > self.n_bytes:  # a damaged table names the same bytes again and again
                self.stopped = "more packets than bytes"
                return
            try:
                frames = packet.decode()
            except av.error.EOFError:
                return
            except Exception:
                self.n_bad += 1
                continue
            if packet.pts is not None and container.format.name in TIMED:
                self.end_s = float((packet.pts + (packet.duration or 0)) * packet.time_base)
            for frame in frames:
                self.stopped = _refusal(frame)
                if self.stopped is not None:
                    return
                # FFmpeg mixes in 32 bits
                if may_hold_nan and not (np.abs(frame.to_ndarray()) <= LARGEST).all():
                    raise AudioError("samples must be finite numbers, got NaN or infinity")
                n_good += 1
                yield frame


def _audio_of(container: "InputContainer") -> "AudioStream":
    """The audio stream that FFmpeg would choose."""
    stream = container.streams.best("audio")
    # the latter, whatever its type says, is None if FFmpeg does not know the codec
    if stream is None or getattr(stream, "codec_context", None) is None:
        kinds = {stream.type for stream in container.streams}
        got = ", ".join(sorted(kinds)) or "none"
        if "audio" in kinds:
            got = "one of zero channels or an unknown codec"
        raise AudioError(f"expected an audio stream that FFmpeg can decode, got {got}")
    return cast("AudioStream", stream)


def _refusal(frame: "AudioFrame") -> str | None:
    """Why a frame cannot be sound, if it cannot; its form may change on the way."""
    if frame.sample_rate not in RATES:
        return f"a rate of {frame.sample_rate} Hz (must be {RATES[0]}..{RATES[-1]})"
    n_channels = len(frame.layout.channels)
    if n_channels not in CHANNELS:
        return f"{n_channels} channels (must be {CHANNELS[0]}..{CHANNELS[-1]})"
    return None


def _promised_s(container: "InputContainer", stream: "AudioStream") -> float | None:
    """The length that the file's header promises; None if the format has no such promise."""
    if container.format.name not in EXACT | TIMED:
        return None
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    # Matroska has one length for all streams, and video may be longer
    if container.duration is not None and len(container.streams) == 1:
        return container.duration / 1e6  # from microseconds
    return None


def _resampled(frames: "Iterable[AudioFrame]", rate: int) -> Iterator[np.ndarray]:
    """The same sound as mono int16; its format may change on the way."""
    import av

    def form(frame: "AudioFrame") -> tuple[str, str, int]:
        return frame.format.name, frame.layout.name, frame.sample_rate

    for _, alike in groupby(frames, form):
        mono = av.AudioResampler(format="s16", layout="mono", rate=rate)
        packed = None  # needed if there is no usual way to mix that number of channels
        for frame in chain(alike, [None]):
            if frame is not None:
                frame.pts = None  # gaps in the time stamps do not become gaps in the audio
            try:
                blocks = mono.resample(frame) if packed is None else []
            except av.error.ArgumentError:
                packed = av.AudioResampler(format="flt")
                mono = av.AudioResampler(format="s16", layout="mono", rate=rate)
                blocks = []
            if packed is not None:
                for block in packed.resample(frame):
                    channels = block.to_ndarray().reshape(block.samples, -1)
                    mean = channels.mean(axis=1, dtype=np.float64).astype(np.float32)[None]
                    mixed = av.AudioFrame.from_ndarray(mean, format="flt", layout="mono")
                    mixed.sample_rate = block.sample_rate
                    blocks += mono.resample(mixed)
                if frame is None:
                    blocks += mono.resample(None)
            for block in blocks:
                yield block.to_ndarray()[0]


def _wav_share(file: IO[bytes]) -> float:
    """How much of the samples that a wav header promises is there: 1.0 is all, or not a wav.

    FFmpeg itself takes what is there for all.
    """
    head = file.read(12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return 1.0
    for _ in range(MOST_WAV_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            break
        size = int.from_bytes(head[4:], "little")
        if head[:4] == b"data":
            start = file.tell()
            # who writes into a pipe cannot know the size, and puts 0 or about 2 or 4 GiB
            unknown = not 0 < size < 0x7FF0_0000
            return 1.0 if unknown else min(1.0, (file.seek(0, os.SEEK_END) - start) / size)
        file.seek(size + size % 2, os.SEEK_CUR)
    return 1.0


def _reason(error: Exception) -> str:
    return one_line(getattr(error, "strerror", None) or error)
