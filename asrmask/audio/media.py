"""Decode any audio or video file to mono samples with PyAV (FFmpeg's libraries).

Without PyAV, librosa reads the formats it supports.
"""

import errno
import io
import os
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import chain, groupby
from pathlib import Path
from typing import IO, cast

import numpy as np

from asrmask.audio.constants import SAMPLE_RATE
from asrmask.errors import AudioError, AudioWarning, MissingPackageError, one_line

try:
    import av
except ImportError:  # librosa is used
    av = None  # type: ignore[assignment]

SPOOL_BYTES = 32 * 2**20  # larger data is kept on disk instead of in memory
TRUNCATED_S = 0.1  # report a file that is shorter than in its header by more than this
MAX_BAD_PACKETS = 1000  # give up after this many if none could be decoded
# Rates below 1 kHz cannot carry speech. DSD512, the fastest in use, is decoded to 2.8 MHz. The
# resampler's filter grows with the rate: 45 MB at 3 MHz, 830 MB at 100 MHz.
RATES = range(1_000, 3_000_001)
CHANNELS = range(1, 65)  # supported by FFmpeg's resampler
# Limit the decoded length, so that a small damaged file cannot produce endless audio. The densest
# format is FLAC, which stores 0.6 s of silence at 8 kHz per byte.
MIN_DURATION_LIMIT_S = 3600.0  # limit for small files
MAX_S_PER_BYTE = 0.6  # limit for larger files
LARGEST = float(np.finfo(np.float32).max)
MAX_WAV_CHUNKS = 1000  # chunks to search for the "data" chunk
EXACT = {"flac", "aiff", "w64", "caf"}  # FFmpeg's names of formats with a reliable length
QUICK = {"probesize": "32768", "analyzeduration": "0"}  # of a pipe: begin with what is there
TIMED = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}  # formats that also have time stamps


# a path ("-": standard input), the content of a file, or a file open in binary mode
Source = str | Path | bytes | IO[bytes]


def _name(source: Source) -> str:
    """The name of a source for messages."""
    if isinstance(source, (str, Path)):
        return "standard input" if source == "-" else str(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else f"audio ({type(source).__name__})"


def decode(source: Source, problems: list[str] | None = None) -> Iterator[np.ndarray]:
    """Decode a source's audio stream to blocks of mono int16 samples at 16 kHz.

    Samples are rounded to 16 bits because openai-whisper's loader does so. For a truncated or
    damaged file, yield what can be decoded and append a message to `problems`, or emit an
    AudioWarning if that is None.
    """
    if av is None and find_spec("librosa") is None:
        raise MissingPackageError("reading audio files", "av", "av")
    name, problem = _name(source), None
    try:
        with _open(source) as file:
            if av is None:
                yield _load_with_librosa(file)
            else:
                wav_fraction = _wav_fraction_present(file)
                n_bytes = file.seek(0, os.SEEK_END)
                file.seek(0)
                with av.open(_SeekableFile(file), mode="r", metadata_errors="ignore") as container:
                    decoder = _AudioDecoder(container, n_bytes)
                    yield from decoder.blocks()
                    problem = decoder.problem(wav_fraction)
    except AudioError as error:
        raise AudioError(f"{name}: {error}") from None
    except Exception as error:  # damaged files make FFmpeg, PyAV and librosa raise anything
        reader = "FFmpeg can read" if av is not None else "librosa can read without PyAV"
        raise AudioError(f"{name}: expected audio that {reader}, got: {_reason(error)}") from None
    if problem is not None and problems is not None:
        problems.append(f"{name}: {problem}")
    elif problem is not None:
        warnings.warn(f"{name}: {problem}", AudioWarning, stacklevel=2)


def decode_pipe(pipe: IO[bytes], problems: list[str]) -> Iterator[np.ndarray]:
    """Decode the audio of a pipe while it arrives, to blocks as `decode` yields.

    problems: receives a message if the end is damaged or missing
    """
    if av is None:
        raise MissingPackageError("reading a pipe", "av", "av")
    try:
        with av.open(_Pipe(pipe), mode="r", options=QUICK, metadata_errors="ignore") as container:
            decoder = _AudioDecoder(container, sys.maxsize)
            yield from decoder.blocks()
            problem = decoder.problem(1.0)
    except AudioError as error:
        raise AudioError(f"standard input: {error}") from None
    except av.error.FFmpegError as error:
        raise AudioError(
            f"standard input: expected audio that FFmpeg can read from a pipe, got: "
            f"{_reason(error)}"
        ) from None
    if problem is not None:
        problems.append(f"standard input: {problem}")


def resample_blocks(blocks: Iterable[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    """Convert mono int16 blocks at any rate to 16 kHz, while they arrive."""
    if rate == SAMPLE_RATE:
        return iter(blocks)
    if av is None:
        raise MissingPackageError(f"audio at {rate} Hz", "av", "av")

    def frames() -> "Iterator[av.AudioFrame]":
        for block in blocks:
            frame = av.AudioFrame.from_ndarray(block[None], format="s16", layout="mono")
            frame.sample_rate = rate
            yield frame

    return _resample(frames())


def _open(source: Source) -> IO[bytes]:
    """Open a source as a seekable file. Pipes are copied first."""
    if source == "-" and sys.stdin is None:
        raise AudioError("closed, expected audio")
    try:
        if isinstance(source, bytes):
            file: IO[bytes] = io.BytesIO(source)
        elif not isinstance(source, (str, Path)):
            file = _copy(source)  # the caller closes the original
        elif source == "-":
            file = _copy(sys.stdin.buffer)
        elif Path(source).is_dir():
            raise ValueError("is a folder")
        else:
            file = Path(source).open("rb")  # noqa: SIM115
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                with file as pipe:
                    file = _copy(pipe)
        if file.seek(0, os.SEEK_END) == 0:
            file.close()
            raise ValueError("empty, got 0 bytes")
        file.seek(0)
    except (OSError, ValueError) as error:  # ValueError also: a NUL byte in the name
        raise AudioError(f"{_reason(error)}, expected an audio file") from None
    return file


def _copy(pipe: IO[bytes]) -> IO[bytes]:
    file = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115
    try:
        shutil.copyfileobj(pipe, file)
    except TypeError:
        file.close()
        raise ValueError("it gives text") from None
    return cast("IO[bytes]", file)


def _load_with_librosa(file: IO[bytes]) -> np.ndarray:
    """Return all samples of a WAV, FLAC, Ogg or MP3 file as mono int16."""
    import librosa

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from librosa's backends
        samples, _ = librosa.load(file, sr=SAMPLE_RATE)
    if not len(samples) or not np.isfinite(samples).all():
        raise AudioError("expected finite samples, got none, NaN or infinity")
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype(np.int16)


class _SeekableFile:
    """A file wrapper for PyAV whose seek never raises, because PyAV would print the traceback."""

    def __init__(self, file: IO[bytes]):
        self.read = file.read
        self.tell = file.tell
        self._seek = file.seek

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        try:
            return self._seek(offset, whence)
        except (OSError, ValueError, OverflowError):  # an offset below 0 or beyond 2^63
            return -errno.EINVAL


def unbuffered(pipe: IO[bytes]) -> IO[bytes]:
    """Return the file below a buffered one, whose `read` returns what is there.

    A thread that waits for a buffered file holds its lock, and Python cannot exit.
    """
    return getattr(pipe, "raw", pipe)


class _Pipe:
    """A file for PyAV that has no seek."""

    def __init__(self, pipe: IO[bytes]):
        self.read = unbuffered(pipe).read


class _AudioDecoder:
    """Decodes the audio stream that FFmpeg would choose, and keeps track of damage."""

    def __init__(self, container: "av.container.InputContainer", n_bytes: int):
        """n_bytes: size of the file"""
        self.container = container
        self.n_bytes = n_bytes
        self.decoded_s = 0.0
        self.n_bad = 0  # packets that cannot be decoded
        self.end_s = 0.0  # end time of the last packet, if the format has time stamps
        self.stop_reason: str | None = None  # why decoding stopped early
        stream = container.streams.best("audio")
        # codec_context is None if FFmpeg does not know the codec, despite its type annotation
        if stream is None or getattr(stream, "codec_context", None) is None:
            kinds = {stream.type for stream in container.streams}
            got = ", ".join(sorted(kinds)) or "none"
            if "audio" in kinds:
                got = "one of zero channels or an unknown codec"
            raise AudioError(f"expected an audio stream that FFmpeg can decode, got {got}")
        self.stream = cast("av.AudioStream", stream)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield blocks of mono int16 samples at 16 kHz."""
        max_s = max(MIN_DURATION_LIMIT_S, self.n_bytes * MAX_S_PER_BYTE)
        n_samples = 0
        for block in _resample(self._frames()):
            n_samples += len(block)
            self.decoded_s = n_samples / SAMPLE_RATE
            yield block
            if self.decoded_s > max_s:
                self.stop_reason = f"{self.n_bytes} bytes cannot hold that much"
                return

    def problem(self, wav_fraction: float) -> str | None:
        """Describe the damage found, or return None. Raise AudioError if nothing was decoded."""
        if self.decoded_s == 0:
            damage = f"{self.n_bad} damaged packets" if self.n_bad else "none"
            raise AudioError(f"expected audio samples, got {self.stop_reason or damage}")
        got = f"got {self.decoded_s:.2f} s of audio"
        expected_s = self._header_duration_s()
        if 0 < wav_fraction < 1:
            expected_s = self.decoded_s / wav_fraction
        if max(self.decoded_s, self.end_s) < expected_s - TRUNCATED_S:
            return f"truncated, {got}, expected {expected_s:.2f} s"
        if self.stop_reason is not None:
            return f"damaged, {got}, expected more ({self.stop_reason})"
        if self.n_bad > 1:  # a single one may be a cut-off last packet, or a tag taken for a packet
            return f"damaged, got {self.n_bad} packets that do not decode, expected none"
        return None

    def _frames(self) -> "Iterator[av.AudioFrame]":
        """Yield decoded frames. Packets that cannot be decoded are counted and skipped."""
        may_hold_nan = self.stream.codec_context.name.startswith("pcm_f")
        n_good = 0
        for packet in self._packets():
            try:
                frames = packet.decode()
            except av.error.EOFError:
                return
            except Exception:
                self.n_bad += 1
                if not n_good and self.n_bad > MAX_BAD_PACKETS:
                    return
                continue
            if packet.pts is not None and self.container.format.name in TIMED:
                self.end_s = float((packet.pts + (packet.duration or 0)) * packet.time_base)
            for frame in frames:
                self.stop_reason = _unsupported_reason(frame)
                if self.stop_reason is not None:
                    return
                # 64-bit samples beyond the float32 range overflow when FFmpeg mixes channels
                if may_hold_nan and not (np.abs(frame.to_ndarray()) <= LARGEST).all():
                    raise AudioError("samples must be finite numbers, got NaN or infinity")
                n_good += 1
                yield frame

    def _packets(self) -> "Iterator[av.Packet[av.AudioStream]]":
        """Yield the packets of the stream, up to the first that cannot be read."""
        try:
            for i, packet in enumerate(self.container.demux(self.stream)):
                if i == self.n_bytes:  # a damaged index refers to the same bytes repeatedly
                    self.stop_reason = "more packets than bytes"
                    return
                yield packet
        except av.error.EOFError:
            return
        except Exception as error:
            self.stop_reason = _reason(error)

    def _header_duration_s(self) -> float:
        """The duration in the file's header; 0.0 if the format has no reliable one."""
        container, stream = self.container, self.stream
        if container.format.name not in EXACT | TIMED:
            return 0.0
        if stream.duration is not None and stream.time_base is not None:
            return float(stream.duration * stream.time_base)
        # Matroska has one duration for all streams, and video may be longer than audio
        if container.duration is not None and len(container.streams) == 1:
            return container.duration / 1e6  # from microseconds
        return 0.0


def _unsupported_reason(frame: "av.AudioFrame") -> str | None:
    """Why a frame is not supported, or None. Rate and channels may change within a stream."""
    if frame.sample_rate not in RATES:
        return f"a rate of {frame.sample_rate} Hz (must be {RATES[0]}..{RATES[-1]})"
    n_channels = len(frame.layout.channels)
    if n_channels not in CHANNELS:
        return f"{n_channels} channels (must be {CHANNELS[0]}..{CHANNELS[-1]})"
    return None


def _resample(frames: "Iterable[av.AudioFrame]") -> Iterator[np.ndarray]:
    """Convert frames to mono int16 at 16 kHz. The input format may change between frames."""

    def input_format(frame: "av.AudioFrame") -> tuple[str, str, int]:
        return frame.format.name, frame.layout.name, frame.sample_rate

    for _, group in groupby(frames, input_format):
        mono = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
        to_float = None  # used if FFmpeg has no standard downmix for this channel layout
        for frame in chain(group, [None]):
            if frame is not None:
                frame.pts = None  # ignore gaps in the time stamps
            try:
                blocks = mono.resample(frame) if to_float is None else []
            except av.error.ArgumentError:
                to_float = av.AudioResampler(format="flt")
                mono = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
                blocks = []
            if to_float is not None:
                for block in to_float.resample(frame):
                    channels = block.to_ndarray().reshape(block.samples, -1)
                    mean = channels.mean(axis=1, dtype=np.float64).astype(np.float32)[None]
                    mixed = av.AudioFrame.from_ndarray(mean, format="flt", layout="mono")
                    mixed.sample_rate = block.sample_rate
                    blocks += mono.resample(mixed)
                if frame is None:
                    blocks += mono.resample(None)
            for block in blocks:
                yield block.to_ndarray()[0]


def _wav_fraction_present(file: IO[bytes]) -> float:
    """The fraction of the data size in a WAV header that the file holds; 1.0 if it is not a WAV.

    Needed because FFmpeg does not report truncated WAV files.
    """
    file.seek(0)
    head = file.read(12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return 1.0
    for _ in range(MAX_WAV_CHUNKS):
        head = file.read(8)
        size = int.from_bytes(head[4:], "little")
        if head[:4] == b"data":
            start = file.tell()
            # programs that write to a pipe do not know the size: they put 0 or about 2 or 4 GiB
            unknown = not 0 < size < 0x7FF0_0000
            return 1.0 if unknown else min(1.0, (file.seek(0, os.SEEK_END) - start) / size)
        file.seek(size + size % 2, os.SEEK_CUR)
    return 1.0


def _reason(error: Exception) -> str:
    return one_line(getattr(error, "strerror", None) or error)
