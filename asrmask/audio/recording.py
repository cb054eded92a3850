"""Recordings: 16 kHz mono samples from a file or an array."""

import io
import tempfile
import wave
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from asrmask.audio import media
from asrmask.audio.constants import HOP_LENGTH, N_SAMPLES, SAMPLE_RATE
from asrmask.audio.torchaudio_import import import_torchaudio
from asrmask.errors import AudioError, OptionError

# Transcripts do not change up to a peak of about 40. They are garbage from about 300 on, where
# log-Mel values are far outside the training range.
MAX_AMPLITUDE = 100.0
MAX_CHANNELS = 8  # in an array: an axis longer than this is time
RATES = range(1_000, 768_001, 25)  # accepted for arrays, in samples per second
FULL_SCALE = {"int16": 2**15, "int32": 2**31}  # the integer that corresponds to 1.0


class Recording:
    """The samples of one recording, in memory or, if there are many, in a temporary file."""

    def __init__(self, n_samples: int, read: Callable[[int, int], np.ndarray]):
        self.n_samples = n_samples
        self._read = read  # (start, stop) → float32 samples, within the recording

    @classmethod
    def of(cls, samples: np.ndarray | Tensor, rate: int = SAMPLE_RATE) -> "Recording":
        """Create a recording from samples in memory.

        samples: floats in −1..1 of any type, or integers of 16 or 32 bits; (n,), (channels, n) or
                 (n, channels); channels are averaged
        rate:    samples per second; resampled to 16,000 if different
        """
        if isinstance(samples, Tensor):
            samples = samples.detach().cpu()
            if samples.is_floating_point() and samples.element_size() < 4:
                samples = samples.float()  # NumPy has no bfloat16
        array = np.asarray(samples)
        full_scale = FULL_SCALE.get(array.dtype.name)
        is_valid = array.ndim == 1 or (array.ndim == 2 and 0 < min(array.shape) <= MAX_CHANNELS)
        if not is_valid or (array.dtype.kind != "f" and full_scale is None):
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
        if peak > MAX_AMPLITUDE:
            bits = next((bits for bits in (16, 32) if peak <= 2 ** (bits - 1)), None)
            hint = f": divide what were {bits}-bit integers by {2 ** (bits - 1)}" if bits else ""
            raise AudioError(f"samples must be floats in −1..1, got up to {peak:g}{hint}")
        array = resample(array.astype(np.float32, copy=False), rate)
        return cls(len(array), lambda start, stop: array[start:stop])

    @classmethod
    def open(cls, source: media.Source, problems: list[str] | None = None) -> "Recording":
        """Decode a file into a recording.

        source:   a path ("-": standard input), the bytes of a file, or an open file
        problems: list that receives a message if the file is damaged but partly readable; None:
                  emit an AudioWarning
        """
        spool = tempfile.SpooledTemporaryFile(max_size=media.SPOOL_BYTES)  # noqa: SIM115
        try:
            for block in media.decode(source, problems):
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
        """Return float32 samples start..stop: reflected before the start, zeros after the end."""
        if start < 0:  # as torch.stft(center=True, pad_mode="reflect") does
            return np.concatenate([self.read(1, 1 - start)[::-1], self.read(0, stop)])
        samples = self._read(min(start, self.n_samples), min(stop, self.n_samples))
        n_missing = stop - start - len(samples)
        return np.pad(samples, (0, n_missing)) if n_missing else samples

    def check_length(self, name: str) -> None:
        """Raise AudioError if the recording, called `name`, is shorter than one hop."""
        if self.n_samples < HOP_LENGTH:
            raise AudioError(
                f"{name}: too short, got {self.n_samples} samples, expected {HOP_LENGTH} or more"
            )

    def is_silent(self) -> bool:
        """Whether every sample is zero."""
        blocks = range(0, self.n_samples, N_SAMPLES)
        return not any(self.read(i, min(i + N_SAMPLES, self.n_samples)).any() for i in blocks)


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """Resample to 16,000 samples per second with torchaudio.

    samples: (n,) float32
    rate:    a multiple of 25, which bounds the filter's size: it grows with the terms of the
             reduced ratio of the two rates
    """
    if rate == SAMPLE_RATE:
        return samples
    if rate not in RATES:
        raise OptionError(
            f"rate must be a multiple of {RATES.step} in {RATES[0]}..{RATES[-1]}, got {rate}"
        )
    tensor = torch.from_numpy(samples.copy())
    return import_torchaudio().functional.resample(tensor, int(rate), SAMPLE_RATE).numpy()


def load_audio(file: media.Source, sr: int = SAMPLE_RATE) -> np.ndarray:
    """Return all samples of an audio or video file as mono float32 in −1..1.

    file: a path ("-": standard input), the bytes of a file, or an open file
    """
    if sr != SAMPLE_RATE:
        raise OptionError(f"sr must be {SAMPLE_RATE}, Whisper's sampling rate, got {sr}")
    recording = Recording.open(file)
    return recording.read(0, recording.n_samples)


def as_wav(samples: np.ndarray) -> bytes:
    """Encode 16 kHz samples as a 16-bit WAV file."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", "not compressed"))
        file.writeframes((samples * 32767).astype(np.int16).tobytes())
    return out.getvalue()
