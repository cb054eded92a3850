"""Virtual padding: approximates what padding adds to attention, from a precomputed bank.

Padding is the same for every clip, except for what it picks up of the clip. So it is computed once
for each model, on real clips, and averaged: the *bank* holds the keys and values of every encoder
layer and the final features, for all 1500 positions. A clip computes its own positions and a margin
only. The rest comes from the bank:

- In the encoder, a key stands for 16 positions of padding (their average), and log(16) is added to
  its scores, so that it has the weight of 16 keys.
- In cross-attention, one position in 16 stands for those beside it, with the same log(16). The last
  half second of the window is kept position by position: that is where a trained Whisper looks when
  there is nothing to look at.
"""

import hashlib
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from asrmask.audio.constants import N_FRAMES, N_POSITIONS, SAMPLE_RATE
from asrmask.audio.recording import Recording, load_audio
from asrmask.audio.spectrogram import Spectrogram
from asrmask.errors import AudioError
from asrmask.files import atomic_write
from asrmask.model import masks
from asrmask.model.attention import KeyValues
from asrmask.model.whisper import Whisper, hash_weights

CLIP_LENGTHS_S = (0.0, 0.5, 2.0, 6.0, 16.0)  # the bank is the average over two clips of each length
VERSION = "2"  # part of the file's name: change it when the content changes
STORED = ("keys", "values", "features")


@dataclass(frozen=True)
class Design:
    """How much of a bank is attended to: the defaults come closest to real padding for their cost.

    stride: positions that one key stands for
    n_tail: positions at the window's end that cross-attention sees one by one
    """

    stride: int = 16
    n_tail: int = 25


class Bank:
    """The padding of one model.

    groups: each encoder layer's keys and values, averaged over `stride` positions, (H, groups, d)
    cross:  features of one position in `stride`, then of the window's last positions, (keys, D)
    """

    def __init__(self, model: Whisper, stored: dict[str, Tensor], design: Design | None = None):
        self.design = design or Design()
        keys, values, features = (stored[name].to(model.device, model.dtype) for name in STORED)
        means = average(keys, self.design.stride), average(values, self.design.stride)
        self.groups = list(zip(*means, strict=True))
        starts = _group_starts(N_POSITIONS - self.design.n_tail, self.design)
        middles = (starts + self.design.stride // 2).clamp(max=N_POSITIONS - 1)
        self.cross = torch.cat([features[middles], features[N_POSITIONS - self.design.n_tail :]])


def _group_starts(end: int, design: Design) -> Tensor:
    """The first position of each group of `stride` positions up to `end`."""
    return torch.arange(0, end, design.stride)


def average(x: Tensor, stride: int) -> Tensor:
    """(…, T, d) → (…, ⌈T / stride⌉, d): averages of `stride` positions in a row."""
    rows = x.flatten(0, -3).transpose(-1, -2)
    means = avg_pool1d(rows.float(), stride, ceil_mode=True).to(x.dtype)
    return means.transpose(-1, -2).unflatten(0, x.shape[:-2]).contiguous()


class Layout:
    """Which keys stand for the padding of a batch of clips, and for how many positions each.

    n_own:       positions that the encoder computes: those of the longest clip
    first_group: the first group that reaches into any clip's padding; those before are left out
    mask:        (B, 1, 1, K) bias of the encoder's keys: its own, then groups of padding
    cross_mask:  (B, 1, 1, K) bias of cross-attention's keys: its own, then groups, then the tail

    Groups are stretches of `stride` positions, counted from the window's beginning. A clip does not
    see groups before its own padding.
    """

    def __init__(self, lengths: Tensor, design: Design):
        """lengths: (B,) positions that each clip computes itself"""
        self.n_own = int(lengths.max())
        self.first_group = int(lengths.min()) // design.stride
        own = masks.padding(lengths, self.n_own)[:, 0, 0].long()
        tail_start = N_POSITIONS - design.n_tail
        groups = self._counts(lengths, N_POSITIONS, design)
        self.mask = masks.counted(torch.cat([own, groups], dim=1))
        groups = self._counts(lengths, tail_start, design)
        tail = torch.arange(tail_start, N_POSITIONS, device=lengths.device) >= lengths[:, None]
        self.cross_mask = masks.counted(torch.cat([own, groups, tail.long()], dim=1))

    def _counts(self, lengths: Tensor, end: int, design: Design) -> Tensor:
        """How many positions of each clip's padding each group holds, up to `end`: (B, groups)."""
        starts = _group_starts(end, design)[self.first_group :].to(lengths.device)
        ends = (starts + design.stride).clamp(max=end)
        return (ends - torch.maximum(starts, lengths[:, None])).clamp(min=0)


@dataclass(frozen=True)
class VirtualPadding:
    """The padding of a batch of clips, from a bank (an encoder.PaddingKeys)."""

    bank: Bank
    layout: Layout

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> KeyValues:
        """An encoder layer's own keys and values, followed by the bank's groups."""
        groups = (x[None, :, self.layout.first_group :] for x in self.bank.groups[layer])
        keys, values = (
            torch.cat([own, others.expand(len(own), -1, -1, -1)], dim=2)
            for own, others in zip((keys, values), groups, strict=True)
        )
        return KeyValues(keys, values, self.layout.mask)

    def extend_features(self, features: Tensor) -> Tensor:
        """Features (B, n_own, D) for cross-attention, followed by the bank's."""
        n_groups = len(self.bank.cross) - self.bank.design.n_tail
        others = self.bank.cross[min(self.layout.first_group, n_groups) :]
        return torch.cat([features, others.expand(len(features), -1, -1)], dim=1)


class _KeepKeys:
    """PaddingKeys that add nothing and keep what they are given."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> KeyValues:
        self.keys.append(keys[0])
        self.values.append(values[0])
        return KeyValues(keys, values)


@torch.inference_mode()
def build(model: Whisper) -> dict[str, Tensor]:
    """Compute a bank's content, in float16 as it is stored, under the names in STORED."""
    samples = torch.cat([torch.from_numpy(load_audio(path)) for path in speech()])
    encoder, n_all, n_mels = model.encoder, model.dims.n_audio_ctx, model.dims.n_mels
    windows = [(torch.zeros(n_mels, N_FRAMES), 0)]
    for seconds in CLIP_LENGTHS_S[1:]:
        n_samples = int(seconds * SAMPLE_RATE)
        for clip in (samples[:n_samples], samples[-n_samples:]):
            spectrogram = Spectrogram(Recording.of(clip), n_mels)
            window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
            windows.append((window.mel, window.n_positions))
    sums: list[Tensor] = []
    n_seen = torch.zeros(n_all, 1, device=model.device)
    for mel, n_own in windows:
        kept = _KeepKeys()
        features = encoder(mel[None].to(model.device, model.dtype), padding=kept)[0]
        is_padding = (torch.arange(n_all, device=model.device) >= n_own).float()[:, None]
        found = [torch.stack(kept.keys), torch.stack(kept.values), features]
        weighed = [x.float() * is_padding for x in found]
        sums = [a + b for a, b in zip(sums, weighed, strict=True)] if sums else weighed
        n_seen += is_padding
    return {name: (x / n_seen).half().cpu() for name, x in zip(STORED, sums, strict=True)}


def speech() -> list[Path]:
    """The recordings that banks are made from: those in data/, which an installed package has."""
    package = Path(__file__).parent.parent
    for folder in (package / "speech", package.parent / "data"):
        if found := sorted(folder.glob("*.flac")):
            return found
    raise AudioError(f"no speech to make a bank from, expected {package / 'speech'}/*.flac")


def cache_folder() -> Path:
    """Where banks are stored."""
    return Path(os.getenv("XDG_CACHE_HOME", Path.home() / ".cache")) / "asrmask"


def file_of(model: Whisper) -> Path:
    """The file of a model's bank, named by a hash of everything that the bank is made from."""
    digest = hashlib.sha256(f"{VERSION} {CLIP_LENGTHS_S}".encode())
    for path in speech():
        digest.update(path.read_bytes())
    hash_weights(model.encoder.state_dict(), digest)
    return cache_folder() / f"padding-{digest.hexdigest()[:32]}.safetensors"


def stored(model: Whisper) -> dict[str, Tensor]:
    """A bank's content: read from its file, or computed and written there.

    If the file is damaged or the folder cannot be written, it is computed again.
    """
    path = file_of(model)
    try:
        content = safetensors.torch.load_file(path)
        if set(content) == set(STORED):
            return content
    except (OSError, safetensors.SafetensorError):
        pass
    made = build(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, binary=True) as file:
            file.write(safetensors.torch.save(made))
    except OSError:
        pass
    return made


_banks: "weakref.WeakKeyDictionary[Whisper, tuple[object, Bank]]" = weakref.WeakKeyDictionary()


@torch.inference_mode()
def bank_of(model: Whisper) -> Bank:
    """The bank of a model with the weights that it has now."""
    state = [  # of all weights: a state_dict would take longer
        (w.data_ptr(), w.dtype, 0 if w.is_inference() else w._version)
        for module in model.modules()
        for w in (*module._parameters.values(), *module._buffers.values())
        if w is not None
    ]
    known = _banks.get(model)
    if known is None or known[0] != state:
        known = _banks[model] = (state, Bank(model, stored(model)))
    return known[1]
