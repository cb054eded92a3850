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
from typing import IO, TYPE_CHECKING, cast

import numpy as np

from asrmask.errors import AudioError, AudioWarning, MissingPackageError, one_line

if TYPE_CHECKING:
    from av import AudioFrame, AudioStream
    from av.container import InputContainer

SPOOL_BYTES = 32 * 2**20  # larger data is kept on disk instead of in memory
TRUNCATED_S = 0.1  # report a file that is shorter than its header says by more than this
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
TIMED = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}  # formats that also have time stamps


# a path ("-": standard input), the content of a file, or a file opened in binary mode
Source = str | Path | bytes | IO[bytes]


def name_of(source: Source) -> str:
    """The name of a source for messages."""
    if isinstance(source, (str, Path)):
        return "standard input" if source == "-" else str(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else f"audio ({type(source).__name__})"


def opened(source: Source, name: str) -> IO[bytes]:
    """Open a source as a seekable file. Pipes are copied first."""
    try:
        if isinstance(source, bytes):
            file: IO[bytes] = io.BytesIO(source)
        elif not isinstance(source, (str, Path)):
            file = _copied(source)  # the caller closes the original
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
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name, or a text file
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
    """Decode a file's audio stream to mono int16 blocks at `rate` samples per second.

    Samples are rounded to 16 bits because openai-whisper's loader does so. For a truncated or
    damaged file, yield what can be decoded and append a message to `problems`, or emit an
    AudioWarning if that is None.
    """
    if find_spec("av") is None:
        yield _read_by_librosa(file, name, rate)
        return
    problem = None
    try:
        reading = _AudioDecoder(file)
        yield from reading.blocks(rate)
        problem = reading.problem()
    except AudioError as error:
        raise AudioError(f"{name}: {error}") from None
    except Exception as error:  # damaged files make FFmpeg and PyAV raise anything
        raise AudioError(
            f"{name}: expected audio that FFmpeg can read, got: {_reason(error)}"
        ) from None
    if problem is not None and problems is not None:
        problems.append(f"{name}: {problem}")
    elif problem is not None:
        warnings.warn(f"{name}: {problem}", AudioWarning, stacklevel=2)


def _read_by_librosa(file: IO[bytes], name: str, rate: int) -> np.ndarray:
    """Return all samples of a WAV, FLAC, Ogg or MP3 file as mono int16."""
    if find_spec("librosa") is None:
        raise MissingPackageError("reading audio files", "av", "av")
    import librosa

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from librosa's backends
            samples, _ = librosa.load(file, sr=rate)
    except Exception as error:  # damaged files make it raise anything
        raise AudioError(
            f"{name}: expected audio that librosa can read without PyAV, got: {_reason(error)}"
        ) from None
    if not len(samples) or not np.isfinite(samples).all():
        raise AudioError(f"{name}: expected finite samples, got none, NaN or infinity")
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype(np.int16)


class _Source:
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


class _AudioDecoder:
    """Decodes the audio stream of a file and keeps track of damage."""

    def __init__(self, file: IO[bytes]):
        self.n_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        self.share = _wav_fraction_present(file)
        file.seek(0)
        self.file = file
        self.got_s = 0.0
        self.n_bad = 0  # packets that cannot be decoded
        self.end_s = 0.0  # end time of the last packet, if the format has time stamps
        self.header_duration_s: float | None = None  # duration according to the header
        self.stopped: str | None = None  # why decoding stopped early

    def blocks(self, rate: int) -> Iterator[np.ndarray]:
        """Yield blocks of mono int16 samples at `rate` samples per second."""
        import av

        most_s = max(MIN_DURATION_LIMIT_S, self.n_bytes * MAX_S_PER_BYTE)
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
            self.header_duration_s = _header_duration_s(container, stream)
        if self.share < 1 and n_out:
            self.header_duration_s = self.got_s / self.share

    def problem(self) -> str | None:
        """Describe the damage found, or return None. Raise AudioError if nothing was decoded."""
        if self.got_s == 0:
            damage = f"{self.n_bad} damaged packets" if self.n_bad else "none"
            raise AudioError(f"expected audio samples, got {self.stopped or damage}")
        got = f"got {self.got_s:.2f} s of audio"
        header_duration_s = self.header_duration_s or 0.0
        if max(self.got_s, self.end_s) < header_duration_s - TRUNCATED_S:
            return f"truncated, {got}, expected {header_duration_s:.2f} s"
        if self.stopped is not None:
            return f"damaged, {got}, expected more ({self.stopped})"
        if self.n_bad > 1:  # a single one may be a cut-off last packet, or a tag taken for a packet
            return f"damaged, got {self.n_bad} packets that do not decode, expected none"
        return None

    def frames(self, container: "InputContainer", stream: "AudioStream") -> "Iterator[AudioFrame]":
        """Yield decoded frames. Packets that cannot be decoded are counted and skipped."""
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
            if n_packets > self.n_bytes:  # a damaged index refers to the same bytes repeatedly
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
                self.stopped = _unsupported_reason(frame)
                if self.stopped is not None:
                    return
                # 64-bit samples beyond the float32 range overflow when FFmpeg mixes channels
                if may_hold_nan and not (np.abs(frame.to_ndarray()) <= LARGEST).all():
                    raise AudioError("samples must be finite numbers, got NaN or infinity")
                n_good += 1
                yield frame


def _audio_of(container: "InputContainer") -> "AudioStream":
    """The audio stream that FFmpeg would choose."""
    stream = container.streams.best("audio")
    # codec_context is None if FFmpeg does not know the codec, despite its type annotation
    if stream is None or getattr(stream, "codec_context", None) is None:
        kinds = {stream.type for stream in container.streams}
        got = ", ".join(sorted(kinds)) or "none"
        if "audio" in kinds:
            got = "one of zero channels or an unknown codec"
        raise AudioError(f"expected an audio stream that FFmpeg can decode, got {got}")
    return cast("AudioStream", stream)


def _unsupported_reason(frame: "AudioFrame") -> str | None:
    """Return why a frame's rate or channel count is not supported, or None.

    Checked for every frame, because both may change within a stream.
    """
    if frame.sample_rate not in RATES:
        return f"a rate of {frame.sample_rate} Hz (must be {RATES[0]}..{RATES[-1]})"
    n_channels = len(frame.layout.channels)
    if n_channels not in CHANNELS:
        return f"{n_channels} channels (must be {CHANNELS[0]}..{CHANNELS[-1]})"
    return None


def _header_duration_s(container: "InputContainer", stream: "AudioStream") -> float | None:
    """The duration in the file's header; None if the format has no reliable one."""
    if container.format.name not in EXACT | TIMED:
        return None
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    # Matroska has one duration for all streams, and video may be longer than audio
    if container.duration is not None and len(container.streams) == 1:
        return container.duration / 1e6  # from microseconds
    return None


def _resampled(frames: "Iterable[AudioFrame]", rate: int) -> Iterator[np.ndarray]:
    """Convert frames to mono int16 at `rate`. The input format may change between frames."""
    import av

    def form(frame: "AudioFrame") -> tuple[str, str, int]:
        return frame.format.name, frame.layout.name, frame.sample_rate

    for _, alike in groupby(frames, form):
        mono = av.AudioResampler(format="s16", layout="mono", rate=rate)
        packed = None  # used if FFmpeg has no standard downmix for this channel layout
        for frame in chain(alike, [None]):
            if frame is not None:
                frame.pts = None  # ignore gaps in the time stamps
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


def _wav_fraction_present(file: IO[bytes]) -> float:
    """The fraction of the data size in a WAV header that the file holds; 1.0 if it is not a WAV.

    Needed because FFmpeg does not report truncated WAV files.
    """
    head = file.read(12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        return 1.0
    for _ in range(MAX_WAV_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            break
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
