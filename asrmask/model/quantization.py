"""Turn a model into an int8 model, in place: rotate its channels, and replace its modules.

Encoder and decoder keep the residual stream rotated (rotation.py). Their layers are those of
int8.py. Convolutions and the decoder's attention to its own text stay in float32.
"""

from typing import cast

import torch
from torch import Tensor, nn

from asrmask.model import masks
from asrmask.model.blocks import Block
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.decoder import TextDecoder
from asrmask.model.encoder import AudioEncoder
from asrmask.model.int8 import (
    Int8CrossAttention,
    Int8FeedForward,
    Int8Linear,
    Int8SelfAttention,
    Int8TokenEmbedding,
    quantize_features,
)
from asrmask.model.rotation import Affine, fold_layernorm, mean_preserving_rotation, take_affine
from asrmask.model.whisper import Whisper


class RotatedAudioEncoder(AudioEncoder):
    """An encoder whose layers work on the rotated residual stream."""

    rotation: Tensor

    def __init__(self, encoder: AudioEncoder, positional_embedding: Tensor, rotation: Tensor):
        """encoder: gives the other parts; positional_embedding: rotated already"""
        nn.Module.__init__(self)
        self.conv1, self.conv2 = encoder.conv1, encoder.conv2
        self.register_buffer("positional_embedding", positional_embedding)
        self.register_buffer("rotation", rotation)
        self.blocks, self.ln_post = encoder.blocks, encoder.ln_post

    def add_positions(self, x: Tensor, first: int) -> Tensor:
        return super().add_positions(x @ self.rotation, first)


class Int8TextDecoder(TextDecoder):
    """A decoder of int8 layers that attends to int8 features, the same for all layers."""

    def __init__(self, decoder: TextDecoder):
        nn.Module.__init__(self)
        self.n_ctx = decoder.n_ctx
        for name, module in decoder.named_children():
            setattr(self, name, module)
        self.positional_embedding = decoder.positional_embedding

    def cross_attention_cache(
        self, features: Tensor, mask: Tensor | None = None
    ) -> CrossAttentionCache:
        span, mask = masks.visible_span(masks.validated(mask), features.shape[1])
        cross_attn = cast("Int8CrossAttention", self.blocks[0].cross_attn)
        group = cross_attn.group(quantize_features(features[:, span]), mask)
        return CrossAttentionCache(features, ((group,),) * len(self.blocks), origin=span.start)


@torch.no_grad()
def quantize(model: Whisper) -> None:
    """Replace the modules of a model on the CPU by int8 ones, in place. Float weights are freed."""
    encoder, decoder = model.encoder, model.decoder
    rotation = mean_preserving_rotation(model.dims.n_audio_state)
    source = take_affine(encoder.ln_post)
    for block in (*encoder.blocks, *decoder.blocks):
        block.float()
        _quantize_block(block, rotation, source)
    positional_embedding = encoder.positional_embedding.float() @ rotation
    model.encoder = RotatedAudioEncoder(encoder, positional_embedding, rotation)
    decoder.positional_embedding.data = decoder.positional_embedding.float() @ rotation
    table = decoder.token_embedding.weight
    embedding = Int8TokenEmbedding.of(table, rotation, take_affine(decoder.ln))
    decoder.token_embedding = embedding  # type: ignore[assignment]
    model.decoder = Int8TextDecoder(decoder)
    model.float()


def empty_like_quantized(model: Whisper) -> None:
    """Replace the modules of a model without weights (on the meta device) as `quantize` does."""
    encoder, decoder = model.encoder, model.decoder
    width = model.dims.n_audio_state
    for block in (*encoder.blocks, *decoder.blocks):
        block.attn = Int8SelfAttention(width, block.attn.n_head, block.attn.place)
        if hasattr(block, "cross_attn"):
            cross = block.cross_attn
            block.cross_attn = Int8CrossAttention(width, cross.n_head, cross.place)
        block.mlp = Int8FeedForward(
            Int8Linear(4 * width, width, normalizes=True),
            nn.GELU(),
            Int8Linear(width, 4 * width, in_blocks=True),
        )
        _remove_norms(block)
    rotation = torch.empty(width, width)
    model.encoder = RotatedAudioEncoder(encoder, encoder.positional_embedding, rotation)
    embedding = Int8TokenEmbedding(model.dims.n_vocab, width)
    decoder.token_embedding = embedding  # type: ignore[assignment]
    model.decoder = Int8TextDecoder(decoder)


def _quantize_block(block: Block, rotation: Tensor, source: Affine) -> None:
    """source: of the layer norm after the encoder"""
    block.attn = Int8SelfAttention.of(block.attn, rotation, take_affine(block.attn_ln))
    if hasattr(block, "cross_attn"):
        norm = take_affine(block.cross_attn_ln)
        block.cross_attn = Int8CrossAttention.of(block.cross_attn, rotation, norm, source)
    up, down = cast("nn.Linear", block.mlp[0]), cast("nn.Linear", block.mlp[2])
    norm = take_affine(block.mlp_ln)
    block.mlp = Int8FeedForward(
        Int8Linear.of(*fold_layernorm(norm, up.weight, up.bias), rotation, normalizes=True),
        nn.GELU(),
        Int8Linear.of(rotation.T @ down.weight, down.bias @ rotation, in_blocks=True),
    )
    _remove_norms(block)


def _remove_norms(block: Block) -> None:
    """The layers after them normalize."""
    for name in ("attn_ln", "cross_attn_ln", "mlp_ln"):
        if hasattr(block, name):
            setattr(block, name, nn.Identity())
