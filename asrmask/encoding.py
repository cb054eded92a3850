"""Encoding: a batch of windows and a policy in, what the decoder attends to out.

Here the policy takes effect: which positions the encoder computes, and which masks hide the rest.

Where positions are hidden from everyone (mask:both, trim), so are their frames from the
convolutions: the two frames on the hidden side of a border, which the last visible position would
still read, are set to 0, under the mask and in the trimmed window alike. So `trim` and `mask:both`
give the same numbers, and nothing that lies in hidden padding changes anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asrmask import attention, masks, virtual
from asrmask.attention import Recorder, Run
from asrmask.audio import FRAMES_PER_POSITION, N_FRAMES, Features, pad_or_trim
from asrmask.errors import OptionError
from asrmask.model import Memory, Place, Room, Whisper
from asrmask.policy import N_POSITIONS, Policy
from asrmask.virtual import Design, Layout

FULL = Policy()
BORDER = 2  # frames beyond its own that a position reads
MOST_TOGETHER = 1024  # positions that short windows are encoded by at a time


@dataclass(frozen=True)
class Plan:
    """What a policy comes to for a batch of windows.

    positions:     (first, end) of those that the encoder computes
    encoder_mask:  for the encoder's self-attention, (B, 1, 1, K); None: everything is visible
    cross_mask:    for cross-attention, likewise; where padding is virtual, to what is computed
    first:         (B,) position codes of each clip's first audio; None: 0
    virtual:       who stands for the padding, where that is virtual
    """

    positions: tuple[int, int] = (0, N_POSITIONS)
    encoder_mask: Tensor | None = None
    cross_mask: Tensor | None = None
    first: Tensor | None = None
    virtual: Layout | None = None


def plan(
    policy: Policy,
    visible: Sequence[int],
    design: Design | None = None,
    device: torch.device | None = None,
) -> Plan:
    """The plan for clips of which so many positions are audio or margin."""
    lengths = torch.tensor(visible, device=device)
    last = policy.positions == "last"
    first = N_POSITIONS - lengths if last else None
    if policy.kind == "full" or min(visible) == N_POSITIONS:
        return Plan(first=first)
    if policy.kind == "virtual":
        layout = Layout(lengths, N_POSITIONS, design or Design())
        return Plan((0, layout.n_own), layout.mask, masks.checked(layout.own), virtual=layout)
    n = max(visible) if policy.kind == "trim" else N_POSITIONS
    mask = masks.checked(masks.padding(lengths, n, last=last))
    return Plan(
        (N_POSITIONS - n, N_POSITIONS) if last else (0, n),
        None if policy.kind == "mask:cross" else mask,
        None if policy.kind == "mask:encoder" else mask,
        first,
    )


def n_keys(policy: Policy, visible: int) -> int:
    """How many keys are remembered of a clip with so many positions of audio or margin."""
    return N_POSITIONS if policy.kind in {"full", "mask:encoder"} else visible


@torch.inference_mode()
def encode(
    model: Whisper,
    windows: Tensor | Sequence[Features],
    policy: Policy | str = FULL,
    record: Recorder | None = None,
    places: Sequence[Place] = (),
) -> Memory:
    """What the decoder needs of a batch of windows, computed once whatever is decoded afterwards.

    windows: features, or log-Mel frames (B, n_mels, 3000), which only `full` can take: they do not
             know how many of their frames are real
    places:  where to put its keys and values (see TextDecoder.remember)
    """
    policy = Policy.parse(policy)
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
        sizes, looked_at = {window.size for window in windows}, N_FRAMES
        if policy.kind in {"trim", "virtual"} and policy.positions == "first":
            looked_at = min(N_FRAMES, FRAMES_PER_POSITION * max(visible) + BORDER)
        mel = torch.stack([pad_or_trim(window.frames, looked_at) for window in windows])
    if sizes != {N_FRAMES}:
        raise OptionError(f"a window must be {N_FRAMES} frames, got {min(sizes - {N_FRAMES})}")
    mel = mel.to(model.device, model.dtype)
    planned = plan(policy, visible, device=model.device)
    if planned.virtual is not None:
        return with_bank(model, virtual.bank_of(model), mel, planned, record, places)
    last = policy.positions == "last"
    if last:
        # the audio and its margin to the window's end, the padding behind them to its beginning
        shifts = [FRAMES_PER_POSITION * (N_POSITIONS - n) for n in visible]
        mel = torch.stack([m.roll(n, dims=-1) for m, n in zip(mel, shifts, strict=True)])
    if policy.kind in {"mask:both", "trim"}:
        mel = _bordered(mel, visible, last)
    features = model.encoder(mel, planned.encoder_mask, record, positions=planned.positions)
    memory = model.decoder.remember(features, planned.cross_mask, places=places)
    return replace(memory, first=planned.first, origin=planned.positions[0] + memory.origin)


def encode_all(
    model: Whisper, windows: Sequence[Features], policy: Policy, room: Room | None = None
) -> Memory:
    """The memory of many windows, for one use, without their features.

    A CPU encodes them one by one, since each fills it; but short ones of the same length together.
    None of their numbers depend on the others.
    room: where they are put, if there is one already
    """
    if model.device.type != "cpu" or policy.positions == "last":  # there each begins elsewhere
        return encode(model, windows, policy)
    visible = [policy.visible(window.n_positions) for window in windows]
    room = room or Room(model, sum(n_keys(policy, n) for n in visible))
    several: list[Memory] = []
    runs: list[Run] = []
    first = n_taken = 0
    while first < len(windows):
        n = visible[first] if policy.kind in {"trim", "virtual"} else N_POSITIONS
        end = first + 1
        while end < len(windows) and visible[end] == n and (end + 1 - first) * n <= MOST_TOGETHER:
            end += 1
        run = Run(n_taken, end - first, n_keys(policy, visible[first]))
        places = [tuple(map(run.of, place)) for place in room.places]
        memory = encode(model, windows[first:end], policy, places=places)
        assert memory.mask is None  # they are equally long, and without what is hidden from all
        several.append(memory.without_features())
        runs.append(run)
        first, n_taken = end, run.end
    features = torch.cat([one.features for one in several])
    joined = Memory(features, *model.decoder.by_layer(room.places), runs=attention.joined(runs))
    shared = next((one.shared for one in several if one.shared), ())
    if not shared:
        return joined
    unseen = torch.full_like(shared[0].mask[:1], -torch.inf)
    seen = [
        one.shared[0].mask if one.shared else unseen.expand(one.n_clips, -1, -1, -1)
        for one in several
    ]
    return joined.with_shared([(one.keys, one.values) for one in shared], torch.cat(seen))


def with_bank(
    model: Whisper,
    bank: virtual.Bank,
    mel: Tensor,
    planned: Plan,
    record: Recorder | None = None,
    places: Sequence[Place] = (),
) -> Memory:
    """The memory of windows (B, n_mels, 3000) whose padding is that bank's."""
    assert planned.virtual is not None
    padding = virtual.Padding(bank, planned.virtual)
    features = model.encoder(mel, None, record, positions=planned.positions, tail=padding)
    memory = model.decoder.remember(features, planned.cross_mask, places)
    return memory.with_shared(padding.cross(), planned.virtual.cross_mask)


def _bordered(mel: Tensor, visible: Sequence[int], last: bool) -> Tensor:
    """The same frames, with zeros beside the border between what is visible and what is hidden."""
    mel = mel.clone()
    for frames, n in zip(mel, visible, strict=True):
        n_frames = FRAMES_PER_POSITION * n
        if last:
            frames[:, max(N_FRAMES - n_frames - BORDER, 0) : N_FRAMES - n_frames] = 0
        else:
            frames[:, n_frames : n_frames + BORDER] = 0
    return mel
