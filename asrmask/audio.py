"""Audio to log-Mel frames: 16 kHz mono samples, the spectrogram, and its padding.

Padding happens in one place, `Spectrogram.window`, and its kind is named by the caller:

- "zero" continues the *spectrogram* with 0.0, as openai-whisper's transcribe() and faster-whisper
  do;
- "silence" continues the *samples* with 0, as openai-whisper's decode() example, transformers and
  whisper.cpp do. In the spectrogram that is the floor, (peak − 8 + 4) / 4, other for every clip;
- "noise:DB" continues the samples with white noise of DB decibels of full scale ("noise:-40"), the
  same noise every time.
"""

import io
import tempfile
import wave
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asrmask import assets, media
from asrmask.errors import AudioError, OptionError
from asrmask.policy import noise_level

SAMPLE_RATE = 16_000  # samples a second
N_FFT = 400  # samples under one frame: 25 ms
HOP_LENGTH = 160  # samples from frame to frame: 10 ms
FRAMES_PER_SECOND = SAMPLE_RATE // HOP_LENGTH  # 100
CHUNK_LENGTH = 30  # seconds in a window, the model's whole view
N_SAMPLES = CHUNK_LENGTH * SAMPLE_RATE  # 480,000 samples in a window
N_FRAMES = N_SAMPLES // HOP_LENGTH  # 3,000 frames in a window
FRAMES_PER_POSITION = 2  # the encoder's second convolution halves the rate: 50 positions a second
MOST_BLOCKS = 8  # half minutes of a spectrogram that are kept

# the text is the same up to a peak of about 40, and garbage from about 300 on: log-Mel values are
# then far from any that the model was trained with
MOST_AMPLITUDE = 100.0
MOST_CHANNELS = 8  # of an array: a longer side is time
FULL_SCALE = {"int16": 2**15, "int32": 2**31}  # what is 1.0 in samples of that type

Array = TypeVar("Array", np.ndarray, Tensor)


class Recording:
    """The samples of one recording: in memory, or in a temporary file if there are many."""

    def __init__(self, n_samples: int, read: Callable[[int, int], np.ndarray]):
        self.n_samples = n_samples
        self._read = read  # float32 samples from..to, both within the recording

    @classmethod
    def of(cls, samples: np.ndarray | Tensor) -> "Recording":
        """A recording of 16 kHz samples.

        samples: floats in −1..1 of any type, or integers of 16 or 32 bits; (n,), or several
                 channels, (channels, n) or (n, channels), which are averaged
        """
        if isinstance(samples, Tensor):
            samples = samples.detach().cpu()
            if samples.is_floating_point() and samples.element_size() < 4:
                samples = samples.float()  # numpy does not know bfloat16
        array = np.asarray(samples)
        full_scale = FULL_SCALE.get(array.dtype.name)
        is_sound = array.ndim == 1 or (array.ndim == 2 and 0 < min(array.shape) <= MOST_CHANNELS)
        if not is_sound or (array.dtype.kind != "f" and full_scale is None):
            raise AudioError(
                "samples must be floats, or integers of 16 or 32 bits, of shape (n,) or "
                f"(channels, n), got {array.dtype} of shape {array.shape}"
            )
        if full_scale is not None:
            array = array / np.float64(full_scale)
        if array.ndim == 2:
            array = array.mean(axis=int(array.shape[0] > array.shape[1]))
        if not np.isfinite(array).all():
            raise AudioError("samples must be finite numbers, got NaN or infinity")
        peak = max(float(array.max(initial=0)), -float(array.min(initial=0)))
        if peak > MOST_AMPLITUDE:
            bits = next((bits for bits in (16, 32) if peak <= 2 ** (bits - 1)), None)
            hint = f": divide what were {bits}-bit integers by {2 ** (bits - 1)}" if bits else ""
            raise AudioError(f"samples must be floats in −1..1, got up to {peak:g}{hint}")
        array = array.astype(np.float32, copy=False)
        return cls(len(array), lambda start, stop: array[start:stop])

    @classmethod
    def open(cls, source: media.Source, problems: list[str] | None = None) -> "Recording":
        """The recording in a file, decoded once.

        source:   a path ("-": standard input), the bytes of a file, or an open file
        problems: where to say what is wrong with a file of which some can be heard; if None, an
                  AudioWarning
        """
        name = media.name_of(source)
        spool = tempfile.SpooledTemporaryFile(max_size=media.SPOOL_BYTES)  # noqa: SIM115
        try:
            with media.opened(source, name) as file:
                for block in media.decode(file, name, SAMPLE_RATE, problems):
                    spool.write(block.tobytes())
            n_samples = spool.tell() // 2
        except BaseException:
            spool.close()
            raise

        def read(start: int, stop: int) -> np.ndarray:
            spool.seek(2 * start)
            return np.frombuffer(spool.read(2 * (stop - start)), np.int16) / np.float32(32768)

        recording = cls(n_samples, read)
        weakref.finalize(recording, spool.close)
        return recording

    @property
    def duration_s(self) -> float:
        return self.n_samples / SAMPLE_RATE

    def read(self, start: int, stop: int) -> np.ndarray:
        """Float32 samples start..stop: mirrored before the beginning, zeros after the end."""
        inner = self._read(min(max(start, 0), self.n_samples), min(max(stop, 0), self.n_samples))
        missing = stop - max(start, 0) - len(inner)
        out = np.pad(inner, (0, missing)) if missing else inner
        if start < 0:  # as torch.stft(center=True, pad_mode="reflect") does
            out = np.concatenate([self.read(1, 1 - start)[::-1], out])
        return out

    def is_silent(self) -> bool:
        """Whether every sample is zero."""
        blocks = range(0, self.n_samples, N_SAMPLES)
        return not any(self.read(i, min(i + N_SAMPLES, self.n_samples)).any() for i in blocks)


def load_audio(file: media.Source, sr: int = SAMPLE_RATE) -> np.ndarray:
    """All samples of an audio or video file: float32 in −1..1, mono.

    file: a path ("-": standard input), the bytes of a file, or an open file
    """
    if sr != SAMPLE_RATE:
        raise OptionError(f"sr must be {SAMPLE_RATE}, the rate Whisper hears, got {sr}")
    recording = Recording.open(file)
    return recording.read(0, recording.n_samples)


def as_wav(samples: np.ndarray) -> bytes:
    """16 kHz samples as the content of a WAV file, 16 bits each."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((samples * 32767).astype(np.int16).tobytes())
    return out.getvalue()


def pad_or_trim(array: Array, length: int = N_SAMPLES, *, axis: int = -1) -> Array:
    """The first `length` entries along an axis, with zeros after the end if there are fewer."""
    size = array.shape[axis]
    index = [slice(None)] * array.ndim
    index[axis] = slice(0, length)
    cut = array[tuple(index)]
    if size >= length:
        return cut
    if isinstance(cut, Tensor):
        after = cut.ndim - 1 - axis % cut.ndim
        return F.pad(cut, [0, 0] * after + [0, length - size])
    widths = [(0, 0)] * cut.ndim
    widths[axis] = (0, length - size)
    return np.pad(cut, widths)


@cache
def mel_filters(n_mels: int, device: torch.device) -> Tensor:
    """The Mel filter bank (n_mels, 201) that Whisper was trained with."""
    with np.load(assets.path("mel_filters.npz"), allow_pickle=False) as filters:
        known = sorted(int(name.removeprefix("mel_")) for name in filters)
        if n_mels not in known:
            raise OptionError(f"n_mels must be one of {known}, got {n_mels}")
        return torch.from_numpy(filters[f"mel_{n_mels}"]).to(device)


def _log_power(samples: Tensor, n_mels: int, *, center: bool) -> Tensor:
    """log10 of the Mel power, (n_mels, frames), one frame more than hops if centred."""
    window = torch.hann_window(N_FFT, device=samples.device)
    stft = torch.stft(samples, N_FFT, HOP_LENGTH, window=window, center=center, return_complex=True)
    power = mel_filters(n_mels, samples.device) @ stft.abs().square()
    return power.clamp(min=1e-10).log10()


def _scaled(log_power: Tensor, peak: Tensor | float) -> Tensor:
    """What the model reads: at most 80 dB below the recording's peak, brought to about −1..1."""
    return (torch.clamp(log_power, min=float(peak) - 8.0) + 4.0) / 4.0


def log_mel_spectrogram(
    audio: str | Path | np.ndarray | Tensor,
    n_mels: int = 80,
    padding: int = 0,
    device: str | torch.device | None = None,
) -> Tensor:
    """The log-Mel spectrogram (n_mels, n_frames) of a file or of 16 kHz samples.

    padding: zero samples appended first
    """
    if isinstance(audio, (str, Path)):
        audio = load_audio(audio)
    samples = torch.as_tensor(audio, device=device)
    if padding > 0:
        samples = F.pad(samples, (0, padding))
    if samples.shape[-1] <= N_FFT // 2:  # that many are mirrored at the ends
        raise AudioError(f"expected more than {N_FFT // 2} samples, got {samples.shape[-1]}")
    log_power = _log_power(samples, n_mels, center=True)[..., :-1]
    return _scaled(log_power, log_power.max())


@dataclass(frozen=True)
class Features:
    """Log-Mel frames of one window, which know how many of them are real.

    frames:   (n_mels, frames), real frames first, then padding; zeros behind them need not be kept
    n_frames: how many are real
    fill:     what the padding is
    size:     of the window, in frames
    """

    frames: Tensor
    n_frames: int
    fill: str = "zero"
    size: int = N_FRAMES

    @property
    def mel(self) -> Tensor:
        """(n_mels, size), padded."""
        return pad_or_trim(self.frames, self.size)

    @property
    def n_positions(self) -> int:
        """Encoder positions that see at least one real frame."""
        return -(-self.n_frames // FRAMES_PER_POSITION)


class Spectrogram:
    """The log-Mel spectrogram of a recording, computed where it is looked at.

    Values are those of log_mel_spectrogram over the whole recording; only a few half minutes of
    them are in memory at a time.
    """

    def __init__(self, recording: Recording, n_mels: int):
        self.recording = recording
        self.n_mels = n_mels
        self.n_frames = recording.n_samples // HOP_LENGTH
        self._blocks: dict[int, Tensor] = {}  # the latest looked at last

    @cached_property
    def _survey(self) -> tuple[float, Tensor]:
        """The peak and the loudness, from one pass over the recording."""
        last = self.n_frames + 3  # the frames whose window still touches the recording's end
        peaks, means = [], []
        for i in range(0, last, N_FRAMES):
            block = self._log_power(i, min(i + N_FRAMES, last))
            peaks.append(float(block.max()))
            means.append(block.mean(dim=0))
        return max(peaks), torch.cat(means)[: self.n_frames]

    @property
    def peak(self) -> float:
        """The loudest log10 Mel power of the recording, from which its floor is counted."""
        return self._survey[0]

    @property
    def loudness(self) -> Tensor:
        """(n_frames,) log10 Mel power of each frame, on average over Mel bands."""
        return self._survey[1]

    def window(self, start: int, n_frames: int, *, fill: str, size: int = N_FRAMES) -> Features:
        """Frames start..start + n_frames, padded to `size` frames; none: all padding."""
        if not 0 <= n_frames <= size or start < 0 or start + n_frames > self.n_frames:
            raise OptionError(
                f"frames must be 0..{size} of the recording's {self.n_frames}, "
                f"got {start}..{start + n_frames}"
            )
        noise_db = noise_level(fill)
        if fill == "zero" or n_frames == size:  # a full window has no padding
            frames = _scaled(self._log_power(start, start + n_frames), self.peak)
            if start + n_frames == self.n_frames:  # others rarely follow, and many may be waiting
                self._blocks.clear()
            return Features(frames, n_frames, fill, size)
        stop = start + n_frames
        end = self.recording.n_samples if stop == self.n_frames else stop * HOP_LENGTH
        first = start * HOP_LENGTH - N_FFT // 2
        wanted = (size - 1) * HOP_LENGTH + N_FFT
        heard = self.recording.read(first, end)
        samples = pad_or_trim(heard, wanted)
        if noise_db is not None:
            noise = np.random.default_rng(0).standard_normal(wanted - len(heard), np.float32)
            samples[len(heard) :] = noise * np.float32(10 ** (noise_db / 20))
        log_power = _log_power(torch.from_numpy(samples), self.n_mels, center=False)
        return Features(_scaled(log_power, self.peak), n_frames, fill, size)

    def _log_power(self, start: int, stop: int) -> Tensor:
        """Frames start..stop, unscaled, put together from whole blocks."""
        if start == stop:
            return torch.empty(self.n_mels, 0)
        first = start // N_FRAMES
        blocks = [self._block(i) for i in range(first, (stop - 1) // N_FRAMES + 1)]
        joined = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        offset = first * N_FRAMES
        return joined[:, start - offset : stop - offset]

    def _block(self, index: int) -> Tensor:
        block = self._blocks.pop(index, None)
        if block is None:
            block = self._compute_block(index)
            if len(self._blocks) == MOST_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        self._blocks[index] = block
        return block

    def _compute_block(self, index: int) -> Tensor:
        start = index * N_FRAMES * HOP_LENGTH - N_FFT // 2
        stop = min(start + N_SAMPLES, self.recording.n_samples + 2 * HOP_LENGTH)
        n_hops = -(-(stop - start) // HOP_LENGTH)
        samples = self.recording.read(start, start + (n_hops - 1) * HOP_LENGTH + N_FFT)
        return _log_power(torch.from_numpy(samples), self.n_mels, center=False)
