"""Log-Mel spectrograms of 16 kHz mono samples, and their padding.

Padding happens in one place, `Spectrogram.window`. The caller chooses its kind:

- "zero" pads the *spectrogram* with 0.0, as openai-whisper's transcribe() and faster-whisper do;
- "silence" pads the *samples* with 0, as openai-whisper's decode() example, transformers and
  whisper.cpp do. Such frames are at the spectrogram's floor, (peak − 8 + 4) / 4, which differs
  between clips;
- "noise:DB" pads the samples with white noise at DB dBFS ("noise:-40"), from a fixed seed.
"""

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asrmask import assets
from asrmask.audio.constants import FRAMES_PER_POSITION, HOP_LENGTH, N_FFT, N_FRAMES, N_SAMPLES
from asrmask.audio.fill import noise_level
from asrmask.audio.recording import Recording, load_audio
from asrmask.errors import AudioError, OptionError

MAX_BLOCKS = 8  # 30 s blocks of a spectrogram kept in memory

Array = TypeVar("Array", np.ndarray, Tensor)


def pad_or_trim(array: Array, length: int = N_SAMPLES, *, axis: int = -1) -> Array:
    """Trim an axis to `length` entries, or pad it with zeros at the end."""
    axis %= array.ndim
    array = array[(slice(None),) * axis + (slice(length),)]
    n_missing = length - array.shape[axis]
    if n_missing == 0:
        return array
    if isinstance(array, Tensor):
        return F.pad(array, [0, 0] * (array.ndim - 1 - axis) + [0, n_missing])
    return np.pad(array, [(0, n_missing if i == axis else 0) for i in range(array.ndim)])


def white_noise(rng: np.random.Generator, n: int, level_db: float) -> np.ndarray:
    """Return n float32 samples of white noise with an RMS of level_db dBFS."""
    return rng.standard_normal(n, np.float32) * np.float32(10 ** (level_db / 20))


@cache
def mel_filters(n_mels: int, device: torch.device) -> Tensor:
    """The Mel filter bank (n_mels, 201) that Whisper was trained with."""
    with np.load(assets.path("mel_filters.npz"), allow_pickle=False) as filters:
        known = sorted(int(name.removeprefix("mel_")) for name in filters)
        if n_mels not in known:
            raise OptionError(f"n_mels must be one of {known}, got {n_mels}")
        return torch.from_numpy(filters[f"mel_{n_mels}"]).to(device)


def _log_power(samples: Tensor, n_mels: int, *, center: bool) -> Tensor:
    """Return log10 of the Mel power, (n_mels, frames). With `center`, frames = hops + 1."""
    window = torch.hann_window(N_FFT, device=samples.device)
    stft = torch.stft(samples, N_FFT, HOP_LENGTH, window=window, center=center, return_complex=True)
    power = mel_filters(n_mels, samples.device) @ stft.abs().square()
    return power.clamp(min=1e-10).log10()


def _scaled(log_power: Tensor, peak: Tensor | float) -> Tensor:
    """Clamp to 80 dB below the recording's peak and scale to about −1..1, the model's input."""
    return (torch.clamp(log_power, min=float(peak) - 8.0) + 4.0) / 4.0


def log_mel_spectrogram(
    audio: str | Path | np.ndarray | Tensor,
    n_mels: int = 80,
    padding: int = 0,
    device: str | torch.device | None = None,
) -> Tensor:
    """Return the log-Mel spectrogram (n_mels, n_frames) of a file or of 16 kHz samples.

    padding: number of zero samples to append first
    """
    if isinstance(audio, (str, Path)):
        audio = load_audio(audio)
    samples = torch.as_tensor(audio, device=device)
    if padding > 0:
        samples = F.pad(samples, (0, padding))
    if samples.shape[-1] <= N_FFT // 2:  # torch.stft reflects this many at each end
        raise AudioError(f"expected more than {N_FFT // 2} samples, got {samples.shape[-1]}")
    log_power = _log_power(samples, n_mels, center=True)[..., :-1]
    return _scaled(log_power, log_power.max())


@dataclass(frozen=True)
class Features:
    """The log-Mel frames of one window, and how many of them are real audio.

    frames:   (n_mels, frames), real frames first, then padding; trailing zeros may be omitted
    n_frames: number of real frames
    fill:     kind of padding
    size:     window size in frames
    """

    frames: Tensor
    n_frames: int
    fill: str = "zero"
    size: int = N_FRAMES

    @property
    def mel(self) -> Tensor:
        """The padded frames, (n_mels, size)."""
        return pad_or_trim(self.frames, self.size)

    @property
    def n_positions(self) -> int:
        """Number of encoder positions that cover at least one real frame."""
        return -(-self.n_frames // FRAMES_PER_POSITION)


def _log_power_block(recording: Recording, n_mels: int, index: int) -> Tensor:
    """Return unscaled frames of a 30 s block."""
    start = index * N_FRAMES * HOP_LENGTH - N_FFT // 2
    stop = min(start + N_SAMPLES, recording.n_samples + 2 * HOP_LENGTH)
    n_hops = -(-(stop - start) // HOP_LENGTH)
    samples = recording.read(start, start + (n_hops - 1) * HOP_LENGTH + N_FFT)
    return _log_power(torch.from_numpy(samples), n_mels, center=False)


class Spectrogram:
    """The log-Mel spectrogram of a recording, computed on demand.

    Values equal log_mel_spectrogram of the full recording, but only a few 30 s blocks are in memory
    at a time.
    """

    def __init__(self, recording: Recording, n_mels: int):
        self.recording = recording
        self.n_mels = n_mels
        self.n_frames = recording.n_samples // HOP_LENGTH
        self._block = lru_cache(MAX_BLOCKS)(partial(_log_power_block, recording, n_mels))

    @cached_property
    def _peak_and_loudness(self) -> tuple[float, Tensor]:
        """The maximum log10 Mel power, and `loudness`; computed in one pass."""
        last = self.n_frames + 3  # includes every frame that overlaps the recording's end
        peaks, means = [], []
        for i in range(0, last, N_FRAMES):
            block = self._log_power(i, min(i + N_FRAMES, last))
            peaks.append(float(block.max()))
            means.append(block.mean(dim=0))
        return max(peaks), torch.cat(means)[: self.n_frames]

    @property
    def loudness(self) -> Tensor:
        """(n_frames,) log10 Mel power of each frame, averaged over Mel bands."""
        return self._peak_and_loudness[1]

    def window(self, start: int, n_frames: int, *, fill: str, size: int = N_FRAMES) -> Features:
        """Return frames start..start + n_frames, padded to `size`. n_frames = 0: only padding."""
        stop = start + n_frames
        if not 0 <= n_frames <= size or start < 0 or stop > self.n_frames:
            raise OptionError(
                f"frames must be 0..{size} of the recording's {self.n_frames}, got {start}..{stop}"
            )
        noise_db = noise_level(fill)
        peak, _ = self._peak_and_loudness
        if fill == "zero" or n_frames == size:  # a full window has no padding
            log_power = self._log_power(start, stop)
            # free memory at the end of the recording: many recordings may be open at once
            if stop == self.n_frames:
                self._block.cache_clear()
        else:
            n_samples = (size - 1) * HOP_LENGTH + N_FFT
            end = self.recording.n_samples if stop == self.n_frames else stop * HOP_LENGTH
            audio = self.recording.read(start * HOP_LENGTH - N_FFT // 2, end)
            samples = pad_or_trim(audio, n_samples)
            if noise_db is not None:
                rng = np.random.default_rng(0)
                samples[len(audio) :] = white_noise(rng, n_samples - len(audio), noise_db)
            log_power = _log_power(torch.from_numpy(samples), self.n_mels, center=False)
        return Features(_scaled(log_power, peak), n_frames, fill, size)

    def _log_power(self, start: int, stop: int) -> Tensor:
        """Return unscaled frames start..stop, assembled from cached blocks."""
        if start == stop:
            return torch.empty(self.n_mels, 0)
        first = start // N_FRAMES
        blocks = [self._block(i) for i in range(first, (stop - 1) // N_FRAMES + 1)]
        frames = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
        return frames[:, start - first * N_FRAMES : stop - first * N_FRAMES]


class LiveSpectrogram:
    """The log-Mel spectrogram of audio that is still arriving. Each frame is computed once.

    Frames are kept unscaled from `first` on, because the scale of a window depends on its peak.

    n_frames: number of frames computed so far, including dropped ones
    """

    def __init__(self, n_mels: int):
        self.n_mels = n_mels
        self.first = 0
        self.n_frames = 0
        self._frames = torch.empty(n_mels, 0)
        self._samples = np.empty(0, np.float32)  # from the start of the next frame on
        self._has_start = False

    def add(self, samples: np.ndarray) -> None:
        """Compute the frames that these float32 samples complete."""
        self._samples = np.concatenate([self._samples, samples])
        half = N_FFT // 2
        if not self._has_start:
            if len(self._samples) <= half:
                return
            # the first frames reach before the start, where torch.stft reflects
            self._samples = np.concatenate([self._samples[half:0:-1], self._samples])
            self._has_start = True
        n_new = (len(self._samples) - N_FFT) // HOP_LENGTH + 1
        if n_new <= 0:
            return
        stop = (n_new - 1) * HOP_LENGTH + N_FFT
        complete = torch.from_numpy(self._samples[:stop])
        frames = _log_power(complete, self.n_mels, center=False)
        self._frames = torch.cat([self._frames, frames], dim=1)
        self.n_frames += n_new
        self._samples = self._samples[n_new * HOP_LENGTH :]

    def drop(self, stop: int) -> None:
        """Forget the frames before `stop`."""
        n_dropped = min(max(stop, self.first), self.n_frames) - self.first
        if n_dropped:
            self._frames = self._frames[:, n_dropped:].clone()  # a view would keep all
            self.first += n_dropped

    def window(self, start: int, stop: int) -> Features:
        """Return frames start..stop, scaled by their own peak and padded with 0.0."""
        if not self.first <= start < stop <= min(self.n_frames, start + N_FRAMES):
            raise OptionError(
                f"frames must be 1..{N_FRAMES} of {self.first}..{self.n_frames}, "
                f"got {start}..{stop}"
            )
        frames = self._frames[:, start - self.first : stop - self.first]
        return Features(_scaled(frames, frames.max()), stop - start)
