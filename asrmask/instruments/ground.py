"""What lies under an attention's keys: audio or padding, speech or a pause, and how much of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from asrmask import masks
from asrmask.audio import Recording
from asrmask.encoding import Plan
from asrmask.errors import OptionError
from asrmask.model import Memory
from asrmask.policy import POSITIONS_PER_SECOND
from asrmask.vad import VadOptions, speech_spans

Spans = Sequence[tuple[float, float]]  # (start, end) of speech, in seconds
# Silero's own: a pause of a tenth of a second is none of the speech
SPEECH = VadOptions(min_silence_duration_ms=100, speech_pad_ms=30)


def spoken(recording: Recording) -> Spans:
    """Where somebody speaks in a recording, by Silero's detector."""
    return speech_spans(recording, SPEECH)


@dataclass(frozen=True)
class Ground:
    """The keys of a batch, key by key.

    audio:       (B, K) bool, a position of the clip's own; the rest is padding
    last_second: (B, K) bool, one of the last 50 of those (of all, if there are fewer)
    speech:      (B, K) bool, one of those in which somebody speaks; None: nobody has said
    counts:      (B, K) positions that the key stands for: 1, 0 if hidden, more if virtual
    starts:      (B, K) its first position, counted from the clip's beginning: negative before it
    """

    audio: Tensor
    last_second: Tensor
    speech: Tensor | None
    counts: Tensor
    starts: Tensor

    @property
    def padding(self) -> Tensor:
        """(B, K) bool: padding that is not hidden."""
        return ~self.audio & (self.counts > 0)

    def cut(self, first: int, end: int) -> "Ground":
        """The same of keys first..end alone."""
        parts = (self.audio, self.last_second, self.speech, self.counts, self.starts)
        return Ground(*(None if x is None else x[:, first:end] for x in parts))  # type: ignore[arg-type]

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | Tensor,
        n_keys: int,
        *,
        offsets: Sequence[int] | Tensor | None = None,
        mask: Tensor | None = None,
        speech: Sequence[Spans] | None = None,
    ) -> "Ground":
        """The ground of clips that have so many positions each.

        lengths: (B,) positions of audio, 1 or more
        offsets: (B,) the key that each clip's audio begins at; None: 0
        mask:    as `attend` is given it, (B, 1, 1, K): hidden keys, or how many each stands for
        speech:  for each clip, where somebody speaks
        """
        lengths = torch.as_tensor(lengths)
        device = lengths.device
        begins = torch.zeros_like(lengths) if offsets is None else torch.as_tensor(offsets)
        begins = begins.to(device)
        if (
            int(lengths.min()) < 1
            or int(begins.min()) < 0
            or int((begins + lengths).max()) > n_keys
        ):
            raise OptionError(
                f"audio must be 1 position or more of {n_keys} keys, got {lengths.tolist()} from "
                f"{begins.tolist()}"
            )
        keys = torch.arange(n_keys, device=device) - begins[:, None]  # (B, K)
        ends = lengths[:, None]
        audio = (keys >= 0) & (keys < ends)
        n_clips = len(lengths)
        counts, starts = torch.ones(n_clips, n_keys, device=device), keys
        if mask is not None:
            row = mask[:, 0, 0].expand(n_clips, -1)
            if mask.dtype == torch.bool:
                counts = row.float()
            else:  # log of a count: one key takes as many positions
                counts = row.exp().round()
                starts = (counts.cumsum(dim=1) - counts).long()
        spoken = None
        if speech is not None:
            spoken = torch.zeros_like(audio)
            for row, places, pairs in zip(spoken, keys, speech, strict=True):
                for start_s, end_s in pairs:
                    first, end = (round(s * POSITIONS_PER_SECOND) for s in (start_s, end_s))
                    row |= (places >= first) & (places < end)
            spoken &= audio
        return cls(audio, audio & (keys >= ends - POSITIONS_PER_SECOND), spoken, counts, starts)


def of_encoder(plan: Plan, lengths: Sequence[int], speech: Sequence[Spans] | None = None) -> Ground:
    """The keys of the encoder's self-attention, as it is recorded under a plan."""
    first, end = plan.positions
    n_keys = end - first
    mask = plan.encoder_mask
    if mask is not None:
        n_keys = mask.shape[-1]
    offsets = None if plan.first is None else plan.first - first
    return Ground.of(lengths, n_keys, offsets=offsets, mask=mask, speech=speech)


def of_memory(
    memory: Memory, lengths: Sequence[int], speech: Sequence[Spans] | None = None
) -> Ground:
    """The keys of cross-attention to a memory.

    It is without the stretches that a mask hides from everyone, which may be audio too.
    """
    offsets = torch.tensor([memory.first_of(i) - memory.origin for i in range(memory.n_clips)])
    n_keys, mask = memory.keys[0].shape[2], memory.mask
    if memory.shared:
        mask = masks.joined_keys(mask, n_keys, memory.shared[0].mask)
        n_keys = mask.shape[-1]
    before = max(-int(offsets.min()), 0)
    behind = max(int((offsets + torch.as_tensor(lengths)).max()) - n_keys, 0)
    if mask is not None and mask.dtype == torch.bool:
        mask = pad(mask, (before, behind), value=False)
    whole = Ground.of(
        lengths, before + n_keys + behind, offsets=offsets + before, mask=mask, speech=speech
    )
    return whole.cut(before, before + n_keys)
