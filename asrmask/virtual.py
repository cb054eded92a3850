"""Virtual padding: what the padding says, without computing it.

The padding of a window is the same for every clip, but for what it hears of the clip. So it is
computed once a model: the *bank*, the keys and values of every encoder layer and the final features
of all 1500 positions, averaged over real clips with padding behind them. A clip computes its own
positions and a margin, and takes the rest from the bank: in the encoder averages of 16 positions,
with log(count) added to their scores; in cross-attention, where the end of speech is read, one
position in 4 for those beside it, since averages blur what positions say.
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

from asrmask import masks
from asrmask.allocation import give_back
from asrmask.audio import N_FRAMES, SAMPLE_RATE, Recording, Spectrogram, load_audio
from asrmask.errors import AudioError
from asrmask.files import replacing
from asrmask.model import Whisper, hash_weights

TAILS_S = (0.0, 0.5, 2.0, 6.0, 16.0)  # of the clips that it is averaged over, two of each length
VERSION = "2"  # of what a bank is: another one is another file
STORED = ("keys", "values", "features")


@dataclass(frozen=True)
class Design:
    """How a bank is used: the defaults come closest to real padding for their cost."""

    stride: int = 16  # positions that a key of the encoder stands for
    cross_stride: int = 4  # positions that a key of cross-attention stands for


class Bank:
    """The padding of one model, as it is attended to.

    groups: each encoder layer's keys and values, averaged over `stride` positions, (H, groups, d)
    cross:  each decoder layer's keys and values, of one position in `cross_stride`, (H, groups, d)
    """

    def __init__(self, model: Whisper, stored: dict[str, Tensor], design: Design | None = None):
        self.design = design or Design()
        keys, values, features = (stored[name].to(model.device, model.dtype) for name in STORED)
        stride = self.design.stride
        means = averaged(keys, stride), averaged(values, stride)
        self.groups = list(zip(*means, strict=True))
        few = picked(features, self.design.cross_stride)[None]
        pairs = [block.cross_attn.keys_values(few) for block in model.decoder.blocks]
        self.cross = [(k[0], v[0]) for k, v in pairs]


def averaged(x: Tensor, stride: int) -> Tensor:
    """(…, T, d) → (…, ⌈T / stride⌉, d): averages of `stride` positions in a row."""
    rows = x.flatten(0, -3).transpose(-1, -2)
    means = avg_pool1d(rows.float(), stride, ceil_mode=True).to(x.dtype)
    return means.transpose(-1, -2).unflatten(0, x.shape[:-2]).contiguous()


def picked(x: Tensor, stride: int) -> Tensor:
    """(…, T, d) → (…, ⌈T / stride⌉, d): the middle of `stride` positions in a row.

    >>> picked(torch.arange(5)[:, None], 2)[:, 0].tolist()
    [1, 3, 4]
    """
    n = x.shape[-2]
    middles = torch.arange(stride // 2, n + stride // 2, stride, device=x.device)
    return x.index_select(-2, middles.clamp(max=n - 1))


class Layout:
    """Who stands for what in the virtual padding of a batch of clips.

    lengths: (B,) positions that each clip computes itself; the encoder computes the longest
    n_all:   positions of a window

    own:        (B, 1, 1, longest) bool, what each clip computes itself
    mask:       the bias of that and of the groups behind it, in the encoder
    cross_mask: the bias of the groups in cross-attention

    Groups are stretches of `stride` positions, counted from the window's beginning; in the encoder
    from the first that reaches into any clip's padding. A clip does not see those before its own
    padding.
    """

    def __init__(self, lengths: Tensor, n_all: int, design: Design):
        self.n_own, self.low = int(lengths.max()), int(lengths.min())
        self.n_all, self.design = n_all, design
        self.own = masks.padding(lengths, self.n_own)
        counts = self._counts(lengths, design.stride)[:, self.low // design.stride :]
        self.mask = masks.counted(torch.cat([self.own[:, 0, 0].long(), counts], dim=1))
        self.cross_mask = masks.counted(self._counts(lengths, design.cross_stride))

    def _counts(self, lengths: Tensor, stride: int) -> Tensor:
        """Positions of each clip's padding that each group stands for, (B, groups)."""
        starts = torch.arange(0, self.n_all, stride, device=lengths.device)
        ends = (starts + stride).clamp(max=self.n_all)
        return (ends - torch.maximum(starts, lengths[:, None])).clamp(min=0)


@dataclass(frozen=True)
class Padding:
    """The virtual padding of a batch of clips (a model.Tail)."""

    bank: Bank
    layout: Layout

    def joined(
        self, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        first = self.layout.low // self.layout.design.stride
        k, v = (
            torch.cat([own, groups[None, :, first:].expand(len(own), -1, -1, -1)], dim=2)
            for own, groups in zip((keys, values), self.bank.groups[layer], strict=True)
        )
        return k, v, self.layout.mask

    def cross(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the padding for each decoder layer, (1, H, groups, d)."""
        return [(k[None], v[None]) for k, v in self.bank.cross]


class _Keeper:
    """A tail that adds nothing and keeps what passes by."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def joined(
        self, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        self.keys.append(keys[0])
        self.values.append(values[0])
        return keys, values, None


@torch.inference_mode()
def build(model: Whisper) -> dict[str, Tensor]:
    """What a bank is made from, in float16 as it is kept: see Bank, under the names in STORED."""
    samples = torch.cat([torch.from_numpy(load_audio(path)) for path in speech()])
    encoder, n_all, n_mels = model.encoder, model.dims.n_audio_ctx, model.dims.n_mels
    windows = [(torch.zeros(n_mels, N_FRAMES), 0)]
    for seconds in TAILS_S[1:]:
        n_samples = int(seconds * SAMPLE_RATE)
        for clip in (samples[:n_samples], samples[-n_samples:]):
            spectrogram = Spectrogram(Recording.of(clip), n_mels)
            window = spectrogram.window(0, spectrogram.n_frames, fill="zero")
            windows.append((window.mel, window.n_positions))
    sums: list[Tensor] = []
    n_seen = torch.zeros(n_all, 1, device=model.device)
    for mel, n_own in windows:
        keeper = _Keeper()
        features = encoder(mel[None].to(model.device, model.dtype), tail=keeper)[0]
        is_padding = (torch.arange(n_all, device=model.device) >= n_own).float()[:, None]
        found = [torch.stack(keeper.keys), torch.stack(keeper.values), features]
        weighed = [x.float() * is_padding for x in found]
        sums = [a + b for a, b in zip(sums, weighed, strict=True)] if sums else weighed
        n_seen += is_padding
    return {name: (x / n_seen).half().cpu() for name, x in zip(STORED, sums, strict=True)}


def speech() -> list[Path]:
    """What banks are made from: the recordings in data/, which an installed package carries."""
    package = Path(__file__).parent
    for folder in (package / "speech", package.parent / "data"):
        if found := sorted(folder.glob("*.flac")):
            return found
    raise AudioError(f"no speech to make a bank from, expected {package / 'speech'}/*.flac")


def cache_folder() -> Path:
    """Where banks are kept."""
    return Path(os.getenv("XDG_CACHE_HOME", Path.home() / ".cache")) / "asrmask"


def file_of(model: Whisper) -> Path:
    """The file that a model's bank is kept in: named by what it is made from."""
    digest = hashlib.sha256(f"{VERSION} {TAILS_S}".encode())
    for path in speech():
        digest.update(path.read_bytes())
    hash_weights(model.encoder, digest)
    return cache_folder() / f"padding-{digest.hexdigest()[:32]}.safetensors"


def stored(model: Whisper) -> dict[str, Tensor]:
    """What a model's bank is made from: read from its file, or built and kept there.

    A file that is damaged, or a folder that cannot be written, costs the time to build it again.
    """
    path = file_of(model)
    try:
        kept = safetensors.torch.load_file(path)
        if set(kept) == set(STORED):
            return kept
    except (OSError, safetensors.SafetensorError):
        pass
    made = build(model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, binary=True) as file:
            file.write(safetensors.torch.save(made))
    except OSError:
        pass
    return made


_banks: "weakref.WeakKeyDictionary[Whisper, tuple[object, Bank]]" = weakref.WeakKeyDictionary()


@torch.inference_mode()
def bank_of(model: Whisper) -> Bank:
    """The bank of a model with the weights that it has now."""
    state = [  # of all weights, without the time that a state_dict takes
        (w.data_ptr(), w.dtype, 0 if w.is_inference() else w._version)
        for module in model.modules()
        for w in (*module._parameters.values(), *module._buffers.values())
        if w is not None
    ]
    known = _banks.get(model)
    if known is None or known[0] != state:
        known = _banks[model] = (state, Bank(model, stored(model)))
        give_back()
    return known[1]
