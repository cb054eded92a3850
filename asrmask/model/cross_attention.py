"""The decoder's view of the audio: computed once for a batch of clips, however often it decodes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from asrmask.model.attention import KeyValues

Groups = tuple[KeyValues, ...]


@dataclass(frozen=True)
class CrossAttentionCache:
    """Keys and values of the audio for every decoder layer.

    features: (B, T, D), the encoder's output; T = 0: dropped to save memory
    layers:   for each decoder layer, groups of clips with equally many keys, in the batch's order;
              keys that are hidden from all clips are left out
    first:    (B,) ints, the position of each clip's first audio; None: 0
    origin:   the position of the first key
    sink:     how many of the last keys are the window's last positions; those before follow the
              first one
    """

    features: Tensor
    layers: tuple[Groups, ...]
    first: Tensor | None = None
    origin: int = 0
    sink: int = 0

    @property
    def n_clips(self) -> int:
        return self.features.shape[0]

    @classmethod
    def concatenate(cls, caches: Sequence["CrossAttentionCache"]) -> "CrossAttentionCache":
        """The clips of all caches, in that order, without features and offsets."""
        several = zip(*(one.layers for one in caches), strict=True)
        layers = tuple(tuple(group for part in parts for group in part) for parts in several)
        n_clips = sum(one.n_clips for one in caches)
        return cls(caches[0].features.new_empty(n_clips, 0, 0), layers)

    def select(self, clips: Sequence[int]) -> "CrossAttentionCache":
        """The cache of those clips alone, in that order. Keys and values are views."""

        @cache  # layers may share one tuple
        def chosen(groups: Groups) -> Groups:
            ends = torch.tensor([len(group.keys) for group in groups]).cumsum(0).tolist()
            starts = [0, *ends]
            kept = []
            for first, end in _stretches(clips, ends):
                i = next(i for i, stop in enumerate(ends) if first < stop)
                span = slice(first - starts[i], end - starts[i])
                keys, values, mask = groups[i]
                mask = mask if mask is None or len(mask) == 1 else mask[span]
                kept.append(KeyValues(keys[span], values[span], mask))
            return tuple(kept)

        rows = torch.tensor(clips, device=self.features.device)
        return replace(
            self,
            features=self.features.index_select(0, rows),
            layers=tuple(map(chosen, self.layers)),
            first=None if self.first is None else self.first.index_select(0, rows),
        )

    def first_of(self, clip: int) -> int:
        """The position of a clip's first audio."""
        return 0 if self.first is None else int(self.first[clip])


def _stretches(clips: Iterable[int], borders: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, end), cut at the borders.

    >>> _stretches([0, 1, 2, 5, 6], [2, 8])
    [(0, 2), (2, 3), (5, 7)]
    """
    stretches: list[tuple[int, int]] = []
    for clip in clips:
        if stretches and stretches[-1][1] == clip and clip not in borders:
            stretches[-1] = stretches[-1][0], clip + 1
        else:
            stretches.append((clip, clip + 1))
    return stretches
