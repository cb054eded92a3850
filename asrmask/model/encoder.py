"""The audio encoder: log-Mel frames to audio features."""

import math
from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from asrmask.errors import OptionError
from asrmask.model import masks
from asrmask.model.attention import KeyValues, Recorder
from asrmask.model.blocks import Block, gelu
from asrmask.model.dimensions import ModelDimensions


def sinusoids(length: int, channels: int, max_timescale: float = 10_000.0) -> Tensor:
    """The encoder's position table (length, channels): sines in the first half, then cosines."""
    # on the CPU always: on the meta device, where models are built, this arithmetic takes a second
    step = math.log(max_timescale) / (channels // 2 - 1)
    rates = torch.exp(-step * torch.arange(channels // 2, device="cpu"))
    angles = torch.arange(length, device="cpu")[:, None] * rates[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class PaddingKeys(Protocol):
    """Keys and values for padding that the encoder does not compute (virtual_padding.py)."""

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> KeyValues:
        """A layer's own keys and values, (B, H, T, d), followed by those of the padding."""
        ...


class AudioEncoder(nn.Module):
    """Two convolutions, positions, and layers of unmasked self-attention over the window."""

    positional_embedding: Tensor
    blocks: Sequence[Block]

    def __init__(self, dims: ModelDimensions):
        super().__init__()
        n_state, self.n_mels = dims.n_audio_state, dims.n_mels
        self.conv1 = nn.Conv1d(dims.n_mels, n_state, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(n_state, n_state, kernel_size=3, stride=2, padding=1)
        self.register_buffer("positional_embedding", sinusoids(dims.n_audio_ctx, n_state))
        blocks = nn.ModuleList(
            Block(n_state, dims.n_audio_head, f"encoder.{i}", cross=False)
            for i in range(dims.n_audio_layer)
        )
        self.blocks = cast("Sequence[Block]", blocks)
        self.ln_post = nn.LayerNorm(n_state)

    def forward(
        self,
        mel: Tensor,
        mask: Tensor | None = None,
        record: Recorder | None = None,
        *,
        positions: tuple[int, int] | None = None,
        sink: int = 0,
        padding: PaddingKeys | None = None,
    ) -> Tensor:
        """Encode log-Mel frames into audio features.

        mel:       (B, n_mels, 2T)
        mask:      (B, 1, 1, T) bool, True = may be attended to; None = everything
        positions: (first, end) of those to compute; None: all. Nobody attends to the others, but
                   the convolutions read the frames beside the border, as they do under a mask
        sink:      the window's last positions, computed too, as if they followed the others
        padding:   keys and values of padding that is not computed, with masks of their own
        returns (B, T, D)
        """
        n_mels, most = self.n_mels, 2 * self.positional_embedding.shape[0]
        if mel.ndim != 3 or mel.shape[1] != n_mels or not 0 < mel.shape[2] <= most:
            raise OptionError(
                f"mel must be (B, {n_mels}, 1..{most} frames), got {tuple(mel.shape)}"
            )
        span, mask = slice(None), masks.validated(mask)
        if record is None:  # records hold all keys
            span, mask = masks.visible_span(mask, -(-mel.shape[2] // 2))

        def self_attention(i: int, block: Block, x: Tensor) -> Tensor:
            """A function of its own, so that queries, keys and values are freed when it returns."""
            q, keys, values = block.attn.projections(block.attn_ln(x))
            if padding is None:
                group = KeyValues(keys[:, :, span], values[:, :, span], mask)
            else:
                group = padding.extend(i, keys, values)
            return block.attn(q, [group], record, residual=x)

        n = len(self.positional_embedding)
        beside = self.embed(mel, n - sink, n) if sink else None
        x = self.embed(mel, *(positions or (0, -(-mel.shape[2] // 2))))
        x = x if beside is None else torch.cat([x, beside], dim=1)
        if record is not None:
            record("encoder.input", "residual", x)
        for i, block in enumerate(self.blocks):
            x = block.feed_forward(self_attention(i, block, x))
            if record is not None:
                record(block.place, "residual", x)
        return self.ln_post(x)

    def embed(self, mel: Tensor, first: int, end: int) -> Tensor:
        """The input of the first layer at positions first..end: (B, end − first, D).

        Position t reads the frames 2t − 2 … 2t + 2.
        """
        if mel.device.type == "cpu" and len(mel) > 1:
            # one by one: libraries add in another order for other shapes
            return torch.cat([self.embed(one, first, end) for one in mel.split(1)])
        frames = mel[:, :, max(2 * first - 2, 0) : 2 * end + 1]
        x = gelu(self.conv1(frames))
        x = gelu(self.conv2(x)).transpose(1, 2)
        skipped = 1 if first else 0  # it read beyond the cut
        return self.add_positions(x[:, skipped : skipped + end - first], first)

    def add_positions(self, x: Tensor, first: int) -> Tensor:
        """x (B, N, D) with the embedding of positions first..first + N added."""
        return x + self.positional_embedding[first : first + x.shape[1]]
