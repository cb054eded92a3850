"""Any audio or video file to mono samples, through PyAV (FFmpeg's libraries)."""

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

from asrmask.errors import AudioError, AudioWarning

if TYPE_CHECKING:
    from av import AudioFrame, AudioStream
    from av.container import InputContainer

TRUNCATED_S = 0.1  # a file that much shorter than its header says is reported
MAX_BAD_PACKETS = 1000  # and no good one: no use in going on
EXACT = {"flac", "aiff", "w64", "caf"}  # FFmpeg's names of formats that tell their length
TIMED = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}  # that do, and have time stamps


def opened(source: str | Path, name: str) -> IO[bytes]:
    """The file, opened; what comes through a pipe is copied first, since some formats must seek."""
    try:
        if source == "-":
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
    file = tempfile.TemporaryFile()  # noqa: SIM115
    shutil.copyfileobj(pipe, file)
    return file


def decode(
    file: IO[bytes], name: str, rate: int, problems: list[str] | None = None
) -> Iterator[np.ndarray]:
    """Samples of a file's audio stream: int16 blocks, mono, `rate` a second.

    Upstream's loader passes through 16-bit integers, so this does too. A file that ends too soon
    gives what it has, and a line in `problems`; if there is no such list, an AudioWarning.
    """
    import av

    share = _wav_share(file)
    file.seek(0)
    try:
        container = av.open(file, mode="r", metadata_errors="ignore")
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise AudioError(
            f"{name}: expected audio that FFmpeg can read, got: {_reason(error)}"
        ) from None
    n_out = 0
    with container:
        reading = _Reading(container, name)
        for block in _resampled(reading.frames(), rate):
            n_out += len(block)
            yield block
        got_s = n_out / rate
        promised_s = got_s / share if share < 1 else reading.promised_s()
    problem = None
    if n_out == 0:
        damage = f"{reading.n_bad} damaged packets" if reading.n_bad else "none"
        raise AudioError(f"{name}: expected audio samples, got {reading.stopped or damage}")
    if promised_s is not None and max(got_s, reading.end_s) < promised_s - TRUNCATED_S:
        problem = f"truncated, got {got_s:.2f} s of audio, expected {promised_s:.2f} s"
    elif reading.stopped is not None:
        problem = f"damaged, got {got_s:.2f} s of audio, expected more ({reading.stopped})"
    elif reading.n_bad > 1:  # one may be a cut-off last packet, or a tag that looks like one
        problem = f"damaged, got {reading.n_bad} packets that do not decode, expected none"
    if problem is not None and problems is not None:
        problems.append(f"{name}: {problem}")
    elif problem is not None:
        warnings.warn(f"{name}: {problem}", AudioWarning, stacklevel=2)


class _Reading:
    """The audio stream of a file, and how reading it goes."""

    def __init__(self, container: "InputContainer", name: str):
        self.container = container
        self.name = name
        self.n_bad = 0  # packets that do not decode
        self.end_s = 0.0  # of the last packet, where the format has time stamps
        self.stopped: str | None = None  # why reading ended before the end
        stream = container.streams.best("audio")
        # the latter, whatever its type says, is None if FFmpeg does not know the codec
        if stream is None or getattr(stream, "codec_context", None) is None:
            kinds = {stream.type for stream in container.streams}
            got = ", ".join(sorted(kinds)) or "none"
            if "audio" in kinds:
                got = "one of zero channels or an unknown codec"
            raise AudioError(f"{name}: expected an audio stream that FFmpeg can decode, got {got}")
        self.stream = cast("AudioStream", stream)

    def frames(self) -> "Iterator[AudioFrame]":
        """Decoded frames; what cannot be decoded is counted and left out."""
        import av

        may_hold_nan = self.stream.codec_context.name.startswith("pcm_f")
        n_good = 0
        packets = self.container.demux(self.stream)
        while n_good or self.n_bad <= MAX_BAD_PACKETS:
            try:
                packet = next(packets, None)
            except av.error.EOFError:
                return
            except (av.error.FFmpegError, OSError) as error:
                self.stopped = _reason(error)
                return
            if packet is None:
                return
            try:
                frames = packet.decode()
            except av.error.EOFError:
                return
            except (av.error.FFmpegError, OSError):
                self.n_bad += 1
                continue
            if packet.pts is not None and self.container.format.name in TIMED:
                self.end_s = float((packet.pts + (packet.duration or 0)) * packet.time_base)
            for frame in frames:
                if may_hold_nan and not np.isfinite(frame.to_ndarray()).all():
                    raise AudioError(
                        f"{self.name}: samples must be finite numbers, got NaN or infinity"
                    )
                n_good += 1
                yield frame

    def promised_s(self) -> float | None:
        """The length that the file's header promises; None if the format has no such promise."""
        stream, container = self.stream, self.container
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
                    mean = channels.mean(axis=1, dtype=np.float32)[None]
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
    while len(head := file.read(8)) == 8:
        size = int.from_bytes(head[4:], "little")
        if head[:4] == b"data":
            start = file.tell()
            # who writes into a pipe cannot know the size, and puts 0 or about 2 or 4 GiB
            unknown = not 0 < size < 0x7FF0_0000
            return 1.0 if unknown else min(1.0, (file.seek(0, os.SEEK_END) - start) / size)
        file.seek(size + size % 2, os.SEEK_CUR)
    return 1.0


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
