"""Encode windows under a padding policy: a batch of features in, the decoder's view of them out.

Here the policy takes effect: which positions the encoder computes, and which masks hide the rest.

Where positions are hidden from everyone (mask:both, trim), their frames are hidden from the
convolutions too: the two frames beside each border, which the visible position there would still
read, are set to 0, under the mask and in the trimmed window alike. So `trim` and `mask:both` give
the same numbers, and nothing in hidden padding changes anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from asrmask.audio.constants import FRAMES_PER_POSITION, N_FRAMES, N_POSITIONS
from asrmask.audio.spectrogram import Features, pad_or_trim
from asrmask.errors import OptionError
from asrmask.model import masks
from asrmask.model.attention import Recorder
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.policy import Policy
from asrmask.model.virtual_padding import Bank, Design, Layout, VirtualPadding, bank_of
from asrmask.model.whisper import Whisper

FULL = Policy()
BORDER = 2  # frames beyond its own that a position reads
MAX_BATCH_POSITIONS = 1024  # of short windows that a CPU encodes at a time


@dataclass(frozen=True)
class Plan:
    """What a policy means for a batch of windows.

    positions:    (first, end) of those that the encoder computes
    sink:         the window's last positions, where it computes them beside those
    encoder_mask: for the encoder's self-attention, (B, 1, 1, K); None: everything is visible
    cross_mask:   for cross-attention, likewise
    first:        (B,) position of each clip's first audio; None: 0
    virtual:      which keys stand for the padding, if it is virtual
    """

    positions: tuple[int, int] = (0, N_POSITIONS)
    encoder_mask: Tensor | None = None
    cross_mask: Tensor | None = None
    first: Tensor | None = None
    virtual: Layout | None = None
    sink: int = 0

    @property
    def n_computed(self) -> int:
        """Positions that the encoder computes."""
        return self.positions[1] - self.positions[0] + self.sink


def plan(
    policy: Policy,
    visible: Sequence[int],
    design: Design | None = None,
    device: torch.device | None = None,
) -> Plan:
    """The plan for clips with `visible` positions of audio and margin each.

    design: of virtual padding
    """
    lengths = torch.tensor(visible, device=device)
    is_last = policy.positions == "last"
    first = N_POSITIONS - lengths if is_last else None
    sink = policy.sink_positions
    if policy.kind == "full" or min(visible) + sink >= N_POSITIONS:
        return Plan(first=first)
    if policy.kind == "virtual":
        layout = Layout(lengths, design or Design())
        return Plan((0, layout.n_own), layout.mask, layout.cross_mask, virtual=layout)
    n = min(max(visible) + sink, N_POSITIONS) if policy.kind == "trim" else N_POSITIONS
    mask = masks.validated(masks.padding(lengths, n, last=is_last, sink=sink))
    beside = sink if n < N_POSITIONS else 0
    return Plan(
        (N_POSITIONS - n, N_POSITIONS) if is_last else (0, n - beside),
        None if policy.kind == "mask:cross" else mask,
        None if policy.kind == "mask:encoder" else mask,
        first,
        sink=beside,
    )


@torch.inference_mode()
def encode(
    model: Whisper,
    windows: Tensor | Sequence[Features],
    policy: Policy | str = FULL,
    record: Recorder | None = None,
    *,
    bank: Bank | None = None,
) -> CrossAttentionCache:
    """Encode a batch of windows for the decoder.

    windows: features, or log-Mel frames (B, n_mels, 3000), which only `full` can take: they do not
             know how many of their frames are real
    bank:    for virtual padding; None: the model's own
    """
    return encode_with_gradients(model, windows, policy, record, bank=bank)


def encode_with_gradients(
    model: Whisper,
    windows: Tensor | Sequence[Features],
    policy: Policy | str = FULL,
    record: Recorder | None = None,
    *,
    bank: Bank | None = None,
) -> CrossAttentionCache:
    """`encode`, for training: gradients pass through it."""
    policy = Policy.parse(policy)
    mel, visible = _frames(windows, policy)
    planned = plan(policy, visible, None if bank is None else bank.design, model.device)
    padding = _virtual_padding(model, planned, bank)
    features = _features(model, mel, visible, policy, planned, padding, record)
    return _cross_attention_cache(model, features, planned, padding)


@torch.inference_mode()
def encode_all(model: Whisper, windows: Sequence[Features], policy: Policy) -> CrossAttentionCache:
    """Encode many windows, without keeping their features. No clip's numbers depend on the others.

    On a CPU, neighbours of equal length are encoded together as long as they are short.
    """
    if model.device.type != "cpu" or policy.positions == "last":  # there each begins elsewhere
        return encode(model, windows, policy)
    caches = []
    for n, group in groupby(windows, lambda window: _n_computed(policy, window)):
        alike = list(group)
        planned = plan(policy, [n], device=model.device)
        padding = _virtual_padding(model, planned)
        size = max(MAX_BATCH_POSITIONS // (n + planned.sink), 1)
        parts = []
        for i in range(0, len(alike), size):
            mel, visible = _frames(alike[i : i + size], policy)
            parts.append(_features(model, mel, visible, policy, planned, padding))
        caches.append(_cross_attention_cache(model, torch.cat(parts), planned, padding))
    return CrossAttentionCache.concatenate(caches)


def _virtual_padding(
    model: Whisper, planned: Plan, bank: Bank | None = None
) -> VirtualPadding | None:
    if planned.virtual is None:
        return None
    return VirtualPadding(bank or bank_of(model), planned.virtual)


def _features(
    model: Whisper,
    mel: Tensor,
    visible: Sequence[int],
    policy: Policy,
    planned: Plan,
    padding: VirtualPadding | None,
    record: Recorder | None = None,
) -> Tensor:
    """The encoder's output for frames (B, n_mels, N) under a plan."""
    mel = mel.to(model.device, model.dtype)
    is_last = policy.positions == "last"
    if is_last:
        # the audio and its margin to the window's end, the padding to its beginning
        shifts = [FRAMES_PER_POSITION * (N_POSITIONS - n) for n in visible]
        mel = torch.stack([m.roll(n, dims=-1) for m, n in zip(mel, shifts, strict=True)])
    if policy.kind in {"mask:both", "trim"}:
        mel = _zero_border(mel, [_hidden_frames(policy, n) for n in visible])
    mask = planned.encoder_mask if padding is None else None
    return model.encoder(
        mel, mask, record, positions=planned.positions, sink=planned.sink, padding=padding
    )


def _cross_attention_cache(
    model: Whisper, features: Tensor, planned: Plan, padding: VirtualPadding | None
) -> CrossAttentionCache:
    joined = features if padding is None else padding.extend_features(features)
    audio = model.decoder.cross_attention_cache(joined, planned.cross_mask)
    return replace(
        audio,
        features=features,
        first=planned.first,
        origin=planned.positions[0] + audio.origin,
        sink=planned.sink,
    )


def _n_computed(policy: Policy, window: Features) -> int:
    """Positions that the encoder computes for a window, or that a mask leaves visible."""
    return policy.visible(window.n_positions) if policy.kind != "full" else N_POSITIONS


def _frames(windows: Tensor | Sequence[Features], policy: Policy) -> tuple[Tensor, list[int]]:
    """The frames (B, n_mels, N) that the encoder reads, and each clip's visible positions."""
    if isinstance(windows, Tensor):
        if policy.kind != "full" or policy.positions != "first":
            raise OptionError(
                f"padding {policy} needs Features, which know how many frames are real, got frames"
            )
        mel, visible, sizes = windows, [N_POSITIONS] * len(windows), {windows.shape[-1]}
    else:
        for window in windows:
            if window.n_frames < N_FRAMES and window.fill != policy.fill:
                raise OptionError(
                    f"windows must be filled as the policy says, got {window.fill} with {policy}, "
                    f"which is {policy.fill}"
                )
        visible = [policy.visible(window.n_positions) for window in windows]
        sizes, n_read = {window.size for window in windows}, N_FRAMES
        if policy.kind in {"trim", "virtual"} and policy.positions == "first" and not policy.sink:
            n_read = min(N_FRAMES, FRAMES_PER_POSITION * max(visible) + BORDER)
        mel = torch.stack([pad_or_trim(window.frames, n_read) for window in windows])
    if sizes != {N_FRAMES}:
        raise OptionError(f"a window must be {N_FRAMES} frames, got {min(sizes - {N_FRAMES})}")
    return mel, visible


def _hidden_frames(policy: Policy, n_visible: int) -> tuple[int, int]:
    """The (first, end) frame that a clip with so many visible positions hides; none: end ≤ first"""
    n = FRAMES_PER_POSITION * n_visible
    if policy.positions == "last":
        return 0, N_FRAMES - n
    return n, N_FRAMES - FRAMES_PER_POSITION * policy.sink_positions


def _zero_border(mel: Tensor, hidden: Sequence[tuple[int, int]]) -> Tensor:
    """The same frames, with zeros at both ends of what each clip hides: (first, end) frames."""
    mel = mel.clone()
    for i, (first, end) in enumerate(hidden):
        mel[i, :, first : min(first + BORDER, end)] = 0
        mel[i, :, max(end - BORDER, first) : end] = 0
    return mel
