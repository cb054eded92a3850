"""Labels for attention keys: audio or padding, speech or pause, and the number of positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from asrmask.audio.constants import POSITIONS_PER_SECOND
from asrmask.audio.recording import Recording
from asrmask.audio.vad import VadOptions, speech_spans
from asrmask.errors import OptionError
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import Plan

Spans = Sequence[tuple[float, float]]  # (start, end) of speech, in seconds
# Silero's defaults: a pause of 0.1 s or more is not speech
SPEECH = VadOptions(min_silence_duration_ms=100, speech_pad_ms=30)


def spoken(recording: Recording) -> Spans:
    """Detect the spans of speech in a recording with Silero's detector."""
    return speech_spans(recording, SPEECH)


@dataclass(frozen=True)
class KeyLabels:
    """Labels for every key of a batch.

    audio:       (B, K) bool, True = real audio, False = padding
    last_second: (B, K) bool, the last 50 audio positions (all, if there are fewer)
    speech:      (B, K) bool, audio that is speech; None = unknown
    counts:      (B, K) positions that the key represents: 1, 0 if hidden, more if virtual
    starts:      (B, K) first position of the key, from the start of the audio; negative before it
    """

    audio: Tensor
    last_second: Tensor
    speech: Tensor | None
    counts: Tensor
    starts: Tensor

    @property
    def padding(self) -> Tensor:
        """(B, K) bool: visible padding."""
        return ~self.audio & (self.counts > 0)

    @property
    def padding_s(self) -> float:
        """Seconds of visible padding, summed over the batch."""
        return float((self.counts * self.padding).sum()) / POSITIONS_PER_SECOND

    def cut(self, first: int, end: int) -> "KeyLabels":
        """Return the labels of the keys first..end."""
        parts = (self.audio, self.last_second, self.speech, self.counts, self.starts)
        return KeyLabels(*(None if x is None else x[:, first:end] for x in parts))  # type: ignore[arg-type]

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | Tensor,
        n_keys: int,
        *,
        offsets: Sequence[int] | Tensor | None = None,
        mask: Tensor | None = None,
        speech: Sequence[Spans] | None = None,
    ) -> "KeyLabels":
        """Label the keys of clips with these lengths.

        lengths: (B,) positions of audio, 1 or more
        offsets: (B,) index of the first audio key; None = 0
        mask:    (B, 1, 1, K) as given to `attend`: bool, or the log of each key's positions
        speech:  for each clip its spans of speech
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
            else:  # log of the counts
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


def encoder_key_labels(
    plan: Plan, lengths: Sequence[int], speech: Sequence[Spans] | None = None
) -> KeyLabels:
    """Label the keys of the encoder's self-attention under a plan, as they are recorded."""
    first, end = plan.positions
    n_keys = end - first
    mask = plan.encoder_mask
    if mask is not None:
        n_keys = mask.shape[-1]
    offsets = None if plan.first is None else plan.first - first
    return KeyLabels.of(lengths, n_keys, offsets=offsets, mask=mask, speech=speech)


def cross_key_labels(
    encoded: CrossAttentionCache, lengths: Sequence[int], speech: Sequence[Spans] | None = None
) -> KeyLabels:
    """Label the keys of cross-attention.

    The cache leaves out keys at both ends that are hidden from all clips, which can be audio too.
    So the complete range is labelled, then cut to the keys that exist.
    """
    offsets = torch.tensor([encoded.first_of(i) - encoded.origin for i in range(encoded.n_clips)])
    ((keys, _, mask),) = encoded.layers[0]
    n_keys = keys.shape[2]
    before = max(-int(offsets.min()), 0)
    behind = max(int((offsets + torch.as_tensor(lengths)).max()) - n_keys, 0)
    if mask is not None and mask.dtype == torch.bool:
        mask = pad(mask, (before, behind), value=False)
    whole = KeyLabels.of(
        lengths, before + n_keys + behind, offsets=offsets + before, mask=mask, speech=speech
    )
    return whole.cut(before, before + n_keys)
