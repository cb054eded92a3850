"""Changes of the audio during training: noise, silence, and masked stretches of the spectrogram.

Only frames of audio are changed. Padding stays what it is, and so does the text.
"""

from dataclasses import replace

import numpy as np
import torch

from asrmask.audio.constants import FRAMES_PER_SECOND, N_SAMPLES, SAMPLE_RATE
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features, Spectrogram, white_noise
from asrmask.audio.torchaudio_import import import_torchaudio
from asrmask.training.spec import Augmentation

MEL_AXIS, TIME_AXIS = 1, 2


def window(
    samples: np.ndarray, n_mels: int, fill: str, augment: Augmentation, draw: np.random.Generator
) -> Features:
    """The window of a clip of up to 30 s, changed."""
    spectrogram = Spectrogram(Recording.of(with_noise(samples, augment, draw)), n_mels)
    plain = spectrogram.window(0, spectrogram.n_frames, fill=fill)
    return with_masks(plain, augment, draw)


def with_noise(samples: np.ndarray, augment: Augmentation, draw: np.random.Generator) -> np.ndarray:
    """The samples with silence behind them, up to 30 s in all, and with noise over everything."""
    if augment.silence_s:
        n = int(draw.uniform(0, augment.silence_s) * SAMPLE_RATE)
        samples = np.pad(samples, (0, min(n, N_SAMPLES - len(samples))))
    if augment.noise_db:
        low, high = augment.noise_db
        samples = samples + white_noise(draw, len(samples), draw.uniform(low, high))
    return samples


def with_masks(plain: Features, augment: Augmentation, draw: np.random.Generator) -> Features:
    """SpecAugment over the frames of audio. Masked values become the audio's mean.

    Not 0, which is what padding is filled with.
    """
    masks = [(TIME_AXIS, augment.time_masks, round(augment.time_mask_s * FRAMES_PER_SECOND))]
    masks += [(MEL_AXIS, augment.mel_masks, augment.mel_mask)]
    if not any(n * size for _, n, size in masks) or not plain.n_frames:
        return plain
    mask_along_axis = import_torchaudio().functional.mask_along_axis
    audio = plain.frames[None, :, : plain.n_frames]
    mean = float(audio.mean())
    with torch.random.fork_rng(devices=[]):  # torchaudio draws from PyTorch's generator
        torch.manual_seed(int(draw.integers(2**62)))
        for axis, n, size in masks:
            for _ in range(n if size else 0):
                audio = mask_along_axis(audio, size, mean, axis)
    frames = torch.cat([audio[0], plain.frames[:, plain.n_frames :]], dim=1)
    return replace(plain, frames=frames)
