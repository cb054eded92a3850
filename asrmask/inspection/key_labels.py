"""Labels for attention keys: audio or padding, speech or pause, and the number of positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from asrmask.audio.constants import N_POSITIONS, POSITIONS_PER_SECOND
from asrmask.audio.recording import Recording
from asrmask.audio.vad import VadOptions, speech_spans
from asrmask.errors import OptionError
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import Plan

Spans = Sequence[tuple[float, float]]  # (start, end) of speech, in seconds
# Silero's defaults: a pause of 0.1 s or more is not speech
SPEECH = VadOptions(min_silence_duration_ms=100, speech_pad_ms=30)


def find_speech(recording: Recording) -> Spans:
    """Find the speech in a recording with Silero's detector."""
    return speech_spans(recording, SPEECH)


@dataclass(frozen=True)
class KeyLabels:
    """Labels for the keys of one clip, each (1, K)."""

    audio: Tensor  # bool: real audio; the others are padding
    last_second: Tensor  # bool: the last 50 audio positions (all, if there are fewer)
    speech: Tensor | None  # bool: audio that is speech; None = unknown
    counts: Tensor  # positions that the key represents: 1, 0 if hidden, more if virtual
    starts: Tensor  # first position of the key, from the start of the audio; negative before it

    @property
    def padding(self) -> Tensor:
        """(1, K) bool: visible padding."""
        return ~self.audio & (self.counts > 0)

    @property
    def padding_s(self) -> float:
        """Seconds of visible padding."""
        return float((self.counts * self.padding).sum()) / POSITIONS_PER_SECOND

    @classmethod
    def of(
        cls,
        n_positions: int,
        n_keys: int,
        *,
        first: int = 0,
        mask: Tensor | None = None,
        speech: Spans | None = None,
        sink: int = 0,
    ) -> "KeyLabels":
        """Label the keys of a clip with n_positions of audio.

        first: index of the first audio key
        mask:  (1, 1, 1, K) as given to `attend`: bool, or the log of each key's positions
        sink:  how many of the last keys are the window's last positions
        """
        if n_positions < 1 or first < 0 or first + n_positions > n_keys:
            raise OptionError(
                f"audio must be 1 position or more of {n_keys} keys, got {n_positions} from {first}"
            )
        starts = torch.arange(-first, n_keys - first)[None]
        starts[:, n_keys - sink :] += N_POSITIONS - n_keys
        audio = (starts >= 0) & (starts < n_positions)
        last_second = audio & (starts >= n_positions - POSITIONS_PER_SECOND)
        is_speech = None
        if speech is not None:
            is_speech = torch.zeros_like(audio)
            for span in speech:
                begin, end = (round(s * POSITIONS_PER_SECOND) for s in span)
                is_speech |= audio & (starts >= begin) & (starts < end)
        counts = torch.ones_like(starts).float() if mask is None else mask[:, 0, 0].float()
        if mask is not None and mask.dtype != torch.bool:  # log of the counts
            counts = counts.exp().round()
            starts = (counts.cumsum(dim=1) - counts).long()
        return cls(audio, last_second, is_speech, counts, starts)


def encoder_key_labels(plan: Plan, n_positions: int, speech: Spans | None = None) -> KeyLabels:
    """Label the keys of the encoder's self-attention for one clip under a plan."""
    mask = plan.encoder_mask
    return KeyLabels.of(
        n_positions,
        plan.n_computed if mask is None else mask.shape[-1],
        first=0 if plan.first is None else int(plan.first) - plan.positions[0],
        mask=mask,
        speech=speech,
        sink=plan.sink,
    )


def cross_key_labels(
    encoded: CrossAttentionCache, n_positions: int, speech: Spans | None = None
) -> KeyLabels:
    """Label the keys of cross-attention for one clip.

    The cache leaves out hidden keys at both ends, which can be audio too. So the complete range is
    labelled, then cut to the keys that exist.
    """
    first = encoded.first_of(0) - encoded.origin
    ((keys, _, mask),) = encoded.layers[0]
    n_keys = keys.shape[2]
    n_before, n_after = max(-first, 0), max(first + n_positions - n_keys, 0)
    if mask is not None and mask.dtype == torch.bool:
        mask = pad(mask, (n_before, n_after), value=False)
    n = n_before + n_keys + n_after
    labels = KeyLabels.of(
        n_positions, n, first=first + n_before, mask=mask, speech=speech, sink=encoded.sink
    )
    cut: dict[str, Any] = {
        name: None if tensor is None else tensor[:, n_before : n_before + n_keys]
        for name, tensor in vars(labels).items()
    }
    return KeyLabels(**cut)
