"""Turn a model into an int8 model, in place: rotate its channels, and replace its modules.

Encoder and decoder keep the residual stream rotated (rotation.py). Their layers are those of
int8.py. Convolutions and the decoder's attention to its own text stay in float32.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from asrmask import kernels
from asrmask.kernels import PackedFeatures
from asrmask.model import masks
from asrmask.model.attention import Recorder
from asrmask.model.blocks import Block
from asrmask.model.calibration import BlockMoments, calibrate
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.decoder import TextDecoder
from asrmask.model.encoder import AudioEncoder
from asrmask.model.int8 import (
    FEATURE_STEP,
    Int8CrossAttention,
    Int8FeedForward,
    Int8Linear,
    Int8SelfAttention,
    Int8TokenEmbedding,
    quantize_features,
)
from asrmask.model.kv_cache import KVCache
from asrmask.model.rotation import Affine, fold_layernorm, mean_preserving_rotation, take_affine
from asrmask.model.whisper import Whisper


class RotatedAudioEncoder(AudioEncoder):
    """An encoder whose layers work on the rotated residual stream.

    Convolutions and rotation are 16-bit integers where the kernels run, otherwise float32.
    """

    rotation: Tensor

    def __init__(self, encoder: AudioEncoder):
        """Parts are those of an encoder; what is added is empty."""
        nn.Module.__init__(self)
        self.n_mels = encoder.n_mels
        self.blocks, self.ln_post = encoder.blocks, encoder.ln_post
        n_ctx, n_state = encoder.positional_embedding.shape
        self.register_buffer("positional_embedding", torch.empty(n_ctx, n_state))
        is_whole = n_state % kernels.BLOCK == 0 and self.n_mels % kernels.LANES == 0
        self.is_packed = kernels.available() and is_whole
        if self.is_packed:
            sizes = {"conv1": (self.n_mels, 3), "conv2": (n_state, 3), "rotation": (n_state, 1)}
            for name, (n_in, n_taps) in sizes.items():
                taps = kernels.empty_taps(n_state, n_in, n_taps)
                self.register_buffer(f"{name}_weight", taps)
                self.register_buffer(f"{name}_scale", torch.empty(n_state))
                self.register_buffer(f"{name}_bias", torch.empty(n_state))
        else:
            self.conv1, self.conv2 = encoder.conv1, encoder.conv2
            self.register_buffer("rotation", torch.empty(n_state, n_state))

    @classmethod
    def of(cls, encoder: AudioEncoder, rotation: Tensor) -> "RotatedAudioEncoder":
        rotated = cls(encoder)
        rotated.positional_embedding = encoder.positional_embedding.float() @ rotation
        if rotated.is_packed:
            no_bias = torch.zeros(len(rotation))
            rotated._pack("conv1", encoder.conv1.weight, encoder.conv1.bias)
            rotated._pack("conv2", encoder.conv2.weight, encoder.conv2.bias)
            rotated._pack("rotation", rotation.T[:, :, None], no_bias)
        else:
            rotated.conv1, rotated.conv2 = encoder.conv1.float(), encoder.conv2.float()
            rotated.rotation = rotation
        return rotated

    def _pack(self, name: str, weight: Tensor, bias: Tensor | None) -> None:
        assert bias is not None
        integers, scale = kernels.pack_taps(weight.detach().float())
        setattr(self, f"{name}_weight", integers)
        setattr(self, f"{name}_scale", scale)
        setattr(self, f"{name}_bias", bias.detach().float())

    def embed(self, mel: Tensor, first: int, end: int) -> Tensor:
        if not self.is_packed:
            return super().embed(mel, first, end)
        skipped = 1 if first else 0  # it reads beyond the cut
        frames = mel[:, :, 2 * (first - skipped) : 2 * end + 1]
        positions = self.positional_embedding[first - skipped :][: (frames.shape[2] + 1) // 2]
        weights = [
            getattr(self, f"{name}_{part}")
            for name in ("conv1", "conv2", "rotation")
            for part in ("weight", "scale", "bias")
        ]
        rows = [kernels.embed(one.T.float(), weights, positions) for one in frames]
        return torch.stack(rows)[:, skipped : skipped + end - first]

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
        self._listed: tuple[tuple[int, ...], kernels.Addresses, kernels.Addresses] | None = None

    def cross_attention_cache(
        self, features: Tensor, mask: Tensor | None = None
    ) -> CrossAttentionCache:
        span, mask = masks.visible_span(masks.validated(mask), features.shape[1])
        cross_attn = cast("Int8CrossAttention", self.blocks[0].cross_attn)
        group = cross_attn.group(quantize_features(features[:, span]), mask)
        return CrossAttentionCache(features, ((group,),) * len(self.blocks), origin=span.start)

    def forward(
        self,
        tokens: Tensor,
        audio: CrossAttentionCache,
        cache: KVCache,
        record: Recorder | None = None,
    ) -> tuple[Tensor, KVCache]:
        """See TextDecoder.forward. One token more is a single call of the kernels."""
        features = [group.keys for group in audio.layers[0]]
        if record is not None or tokens.shape[1] != 1 or cache.length == 0 or not self.is_packed:
            return super().forward(tokens, audio, cache, record)
        self.check_length(cache.length + 1)
        cache = cache.ensure_capacity(1)
        table, layers = self._addresses()
        x = kernels.decoder_step(
            tokens,
            table,
            layers,
            cast("list[PackedFeatures]", features),
            [tensor for pair in zip(cache.keys, cache.values, strict=True) for tensor in pair],
            cache.length,
            FEATURE_STEP,
        )
        return x, cache.advanced(1)

    @property
    def is_packed(self) -> bool:
        cross_attn = cast("Int8CrossAttention", self.blocks[0].cross_attn)
        return kernels.available() and cross_attn.is_packed

    def _addresses(self) -> tuple[kernels.Addresses, kernels.Addresses]:
        """Of the table of tokens, and of all layers; listed again if the weights moved."""
        matrices = (cast("Int8SelfAttention", self.blocks[i].attn).out for i in (0, -1))
        state = tuple(matrix.scale.data_ptr() for matrix in matrices)
        if self._listed is None or self._listed[0] != state:
            table = cast("Int8TokenEmbedding", self.token_embedding).table
            tensors = [tensor for block in self.blocks for tensor in _weights_of(block)]
            positions = self.positional_embedding
            self._listed = (
                state,
                kernels.Addresses([table, positions]),
                kernels.Addresses(tensors),
            )
        return self._listed[1:]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_listed": None}  # addresses are of this process

    @staticmethod
    def best_tokens(logits: Tensor) -> tuple[list[int], list[float]]:
        choose = kernels.choose_tokens if kernels.available() else TextDecoder.best_tokens
        return choose(logits)


def _weights_of(block: Block) -> list[Tensor]:
    """The weights of a layer, in the order of a Layer in decoder.c."""
    attn, cross = (
        cast("Int8SelfAttention", block.attn),
        cast("Int8CrossAttention", block.cross_attn),
    )
    up, _, down = cast("Int8FeedForward", block.mlp)
    matrices = (attn.fused, attn.out, cross.query, cross.out, up, down)
    tensors = [tensor for matrix in matrices for tensor in cast("Int8Linear", matrix).matrix]
    return [*tensors, cross.inward.weight, cross.outward.weight, cross.outward.bias]


@torch.no_grad()
def quantize(model: Whisper) -> None:
    """Replace the modules of a model on the CPU by int8 ones, in place. Float weights are freed."""
    encoder, decoder = model.encoder, model.decoder
    rotation = mean_preserving_rotation(model.dims.n_audio_state)
    source = take_affine(encoder.ln_post)
    for block, moments in calibrate(encoder):
        _quantize_block(block, rotation, source, moments)
    for block in decoder.blocks:
        _quantize_block(block.float(), rotation, source)
    model.encoder = RotatedAudioEncoder.of(encoder, rotation)
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
        two_digits = hasattr(block, "cross_attn")
        block.attn = Int8SelfAttention(width, block.attn.n_head, block.attn.place, two_digits)
        if hasattr(block, "cross_attn"):
            cross = block.cross_attn
            block.cross_attn = Int8CrossAttention(width, cross.n_head, cross.place)
        block.mlp = Int8FeedForward(
            Int8Linear(4 * width, width, normalizes=True, two_digits=two_digits),
            nn.GELU(),
            Int8Linear(width, 4 * width, in_blocks=True, two_digits=two_digits),
        )
        _remove_norms(block)
    model.encoder = RotatedAudioEncoder(encoder)
    embedding = Int8TokenEmbedding(model.dims.n_vocab, width)
    decoder.token_embedding = embedding  # type: ignore[assignment]
    model.decoder = Int8TextDecoder(decoder)


def _quantize_block(
    block: Block, rotation: Tensor, source: Affine, moments: BlockMoments | None = None
) -> None:
    """Inputs of the decoder's layers have two digits: its rows are few, and texts hang on them.

    source: of the layer norm after the encoder
    """
    seen = moments or BlockMoments()
    two_digits = hasattr(block, "cross_attn")
    norm = take_affine(block.attn_ln)
    block.attn = Int8SelfAttention.of(block.attn, rotation, norm, seen, two_digits)
    if hasattr(block, "cross_attn"):
        norm = take_affine(block.cross_attn_ln)
        block.cross_attn = Int8CrossAttention.of(block.cross_attn, rotation, norm, source)
    up, down = cast("nn.Linear", block.mlp[0]), cast("nn.Linear", block.mlp[2])
    weight, bias = fold_layernorm(take_affine(block.mlp_ln), up.weight, up.bias)
    first = Int8Linear.of(weight, bias, rotation, seen.up, normalizes=True, two_digits=two_digits)
    weight, bias = rotation.T @ down.weight, down.bias @ rotation
    second = Int8Linear.of(weight, bias, moments=seen.down, in_blocks=True, two_digits=two_digits)
    block.mlp = Int8FeedForward(first, nn.GELU(), second)
    _remove_norms(block)


def _remove_norms(block: Block) -> None:
    """The layers after them normalize."""
    for name in ("attn_ln", "cross_attn_ln", "mlp_ln"):
        if hasattr(block, name):
            setattr(block, name, nn.Identity())
