"""Virtual padding: what the padding says, without computing it.

The padding of a window is the same for every clip, but for what it hears of the clip. So it is
computed once a model: the *bank*, the keys and values of every encoder layer and the final features
of all 1500 positions, averaged over real clips with padding behind them. A clip computes its own
positions and a margin, and takes the rest from the bank.

Three things bring that closer to real padding, each found by measuring (scripts/policies sweep):

- *Probes.* A few of the padding's positions are computed with the clip after all, from layer to
  layer. How far each is from its entry in the bank is added to the entries around it: the bank
  gives the fine structure over positions, the probes what depends on the clip.
- *Groups.* In the encoder the clip attends to averages of 16 bank positions, with log(count)
  added to the scores. This loses little; the probes, which need their neighbours one by one, see
  the whole bank, and are few.
- Cross-attention, where the end of speech is read, takes one position in 4 for the others beside
  it. Averages blur what positions say: picked ones come as close to real padding as averages of
  half as many positions.
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
from asrmask.attention import Moved, MultiHeadAttention, Recorder, attend
from asrmask.audio import N_FRAMES, SAMPLE_RATE, Recording, Spectrogram, load_audio
from asrmask.errors import AudioError
from asrmask.files import replacing
from asrmask.model import AudioEncoder, Whisper, hash_weights

TAILS_S = (0.0, 0.5, 2.0, 6.0, 16.0)  # of the clips that it is averaged over, two of each length
VERSION = "1"  # of what a bank is: another one is another file
STORED = ("keys", "values", "features", "filling")


@dataclass(frozen=True)
class Design:
    """How a bank is used: the defaults come closest to real padding for their cost."""

    stride: int = 16  # positions that a key of the encoder stands for
    cross_stride: int = 4  # positions that a key of cross-attention stands for
    n_probes: int = 32  # positions of the padding that are computed; 0: the bank as it is


class Bank:
    """The padding of one model.

    keys, values: (layers, H, T, d), of the encoder's self-attention
    features:     (T, D), the encoder's output
    filling:      (D,), what the convolutions make of fill, before the position code
    grouped:      keys and values averaged over `stride` positions, (layers, H, ⌈T / stride⌉, d)
    cross:        each decoder layer's keys and values, (1, H, ⌈T / cross_stride⌉, d)
    """

    def __init__(self, model: Whisper, stored: dict[str, Tensor], design: Design | None = None):
        self.design = design or Design()
        self.keys, self.values, self.features, self.filling = (
            stored[name].to(model.device, model.dtype) for name in STORED
        )
        stride = self.design.stride
        self.grouped = averaged(self.keys, stride), averaged(self.values, stride)
        features = picked(self.features, self.design.cross_stride)[None]
        self.cross = [block.cross_attn.keys_values(features) for block in model.decoder.blocks]

    @property
    def n_positions(self) -> int:
        return self.features.shape[0]


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

    Groups are stretches of `stride` positions, counted from the window's beginning, from the first
    that reaches into any clip's padding. A clip does not see those before its own padding.
    """

    def __init__(self, lengths: Tensor, n_all: int, design: Design):
        self.n_own, self.low = int(lengths.max()), int(lengths.min())
        self.n_all, self.design = n_all, design
        device = lengths.device
        self._lengths = lengths[:, None]  # (B, 1)
        self._left = n_all - self._lengths
        # each probe is in the middle of an equal share of the padding; a clip without padding,
        # beside others, has probes that nobody hears
        shares = torch.arange(design.n_probes, device=device) + 0.5
        middles = (shares * self._left / max(design.n_probes, 1)).long()
        self.probes = (self._lengths + middles).clamp(max=n_all - 1)  # (B, A) positions

        own = (torch.arange(self.n_own, device=device) < self._lengths).long()
        self.each_takes, each = self._groups(1)
        self.group_takes, groups = self._groups(design.stride)
        self.cross_takes, cross = self._groups(design.cross_stride)
        # of a single clip the probes see all
        hidden = masks.counted(torch.cat([own, each], dim=1))
        self.probe_mask = hidden if len(lengths) > 1 else None
        self.mask = masks.counted(torch.cat([own, groups], dim=1))
        self.cross_mask = masks.counted(torch.cat([own, cross], dim=1))

    def _groups(self, stride: int) -> tuple[Tensor, Tensor]:
        """For each group: the probe that speaks for it, and how many of its positions are padding.

        returns (B, groups, probes) of 1 and 0, and (B, groups)
        """
        device = self._lengths.device
        starts = torch.arange(self.low // stride * stride, self.n_all, stride, device=device)
        ends = (starts + stride).clamp(max=self.n_all)
        counts = (ends - torch.maximum(starts, self._lengths)).clamp(min=0)
        n_probes = self.design.n_probes
        near = ((starts + ends) // 2 - self._lengths) * n_probes // self._left.clamp(min=1)
        probes = torch.arange(n_probes, device=device)
        return (near.clamp(0, max(n_probes - 1, 0))[..., None] == probes).float(), counts


class Padding:
    """The virtual padding of a batch of clips on its way through the encoder (a model.Tail)."""

    def __init__(self, bank: Bank, encoder: AudioEncoder, layout: Layout):
        self.bank = bank
        self.layout = layout
        self.encoder = encoder

    def rows(self) -> Tensor:
        """The probes before the first layer, (B, A, D)."""
        return self.bank.filling + self.encoder.positional_embedding[self.layout.probes]

    def attention(
        self,
        layer: int,
        attn: MultiHeadAttention,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        record: Recorder | None,
    ) -> Tensor:
        bank, layout = self.bank, self.layout
        n, low, stride = layout.n_own, layout.low, layout.design.stride
        own = keys[:, :, :n], values[:, :, :n]
        key_shifts, value_shifts = (
            x[:, :, n:] - kept[layer][:, layout.probes].transpose(0, 1)  # (B, H, A, d)
            for x, kept in ((keys, bank.keys), (values, bank.values))
        )
        k, v = (x[layer][:, low // stride :] for x in bank.grouped)
        groups = Moved(k, v, key_shifts, value_shifts, layout.group_takes)
        k, v = (x[layer][:, low:] for x in (bank.keys, bank.values))
        each = Moved(k, v, key_shifts, value_shifts, layout.each_takes)
        k, v = (torch.cat(pair, dim=2) for pair in zip(own, groups.each(), strict=True))
        audio = attend(q[:, :, :n], k, v, layout.mask, record=record, place=attn.place)
        if layout.design.n_probes == 0:
            return attn.merged(audio)
        place = f"encoder.{layer}.probes"
        probes = attend(q[:, :, n:], *own, layout.probe_mask, each, record=record, place=place)
        return attn.merged(torch.cat([audio, probes], dim=2))

    def cross(self, model: Whisper, probes: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the padding for each decoder layer.

        probes: (B, A, D), the encoder's output for them
        """
        layout = self.layout
        first = layout.low // layout.design.cross_stride
        shift = probes - self.bank.features[layout.probes]  # (B, A, D)
        nothing = torch.zeros_like(self.bank.features[None, :1])
        pairs = []
        for block, kept in zip(model.decoder.blocks, self.bank.cross, strict=True):
            # the projections are linear but for a bias: a shift goes through without it
            attn = block.cross_attn
            moved, bias = attn.keys_values(shift), attn.keys_values(nothing)
            keys, values = (x[0, :, first:] for x in kept)
            shifts = moved[0] - bias[0], moved[1] - bias[1]
            pairs.append(Moved(keys, values, *shifts, layout.cross_takes).each())
        return pairs


class _Keeper:
    """A tail that adds nothing and keeps what passes by."""

    def __init__(self, like: Tensor) -> None:
        self._rows = like[:, :0]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def rows(self) -> Tensor:
        return self._rows

    def attention(
        self,
        layer: int,
        attn: MultiHeadAttention,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        record: Recorder | None,
    ) -> Tensor:
        self.keys.append(keys[0])
        self.values.append(values[0])
        return attn(q, keys, values, record=record)


@torch.inference_mode()
def build(model: Whisper) -> dict[str, Tensor]:
    """What a bank is made from, in float16 as it is kept: see Bank, under the names in STORED."""
    samples = torch.cat([torch.from_numpy(load_audio(path)) for path in speech()])
    encoder, n_all, n_mels = model.encoder, model.dims.n_audio_ctx, model.dims.n_mels
    nothing = torch.zeros(1, n_mels, 8, device=model.device, dtype=model.dtype)
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
        keeper = _Keeper(encoder.embed(nothing, 0, 1))
        features = encoder(mel[None].to(model.device, model.dtype), tail=keeper)[0]
        is_padding = (torch.arange(n_all, device=model.device) >= n_own).float()[:, None]
        found = [torch.stack(keeper.keys), torch.stack(keeper.values), features]
        weighed = [x.float() * is_padding for x in found]
        sums = [a + b for a, b in zip(sums, weighed, strict=True)] if sums else weighed
        n_seen += is_padding
    filling = encoder.embed(nothing, 2, 3)[0, 0] - encoder.positional_embedding[2]
    parts = [*(x / n_seen for x in sums), filling]
    return {name: x.half().cpu() for name, x in zip(STORED, parts, strict=True)}


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
    return known[1]
