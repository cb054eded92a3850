"""Whisper: encoder and decoder with openai-whisper's parameter names, so its weights load as is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrmask import masks
from asrmask.attention import KVCache, MultiHeadAttention, Recorder
from asrmask.errors import CheckpointError, OptionError
from asrmask.packed import Packed


@dataclass(frozen=True)
class ModelDimensions:
    """The ten numbers that give a Whisper its shape."""

    n_mels: int
    n_audio_ctx: int  # encoder positions in a window, 50 a second
    n_audio_state: int
    n_audio_head: int
    n_audio_layer: int
    n_vocab: int
    n_text_ctx: int
    n_text_state: int
    n_text_head: int
    n_text_layer: int

    @classmethod
    def of(cls, numbers: Mapping[str, Any]) -> "ModelDimensions":
        """Dimensions from a checkpoint's own table, checked."""
        names = [field.name for field in fields(cls)]
        if set(numbers) != set(names):
            raise CheckpointError(f"dimensions must be {names}, got {sorted(map(str, numbers))}")
        bad = {name: n for name, n in numbers.items() if type(n) is not int or n < 1}
        if bad:
            raise CheckpointError(f"dimensions must be positive whole numbers, got {bad}")
        dims = cls(**numbers)
        if dims.n_audio_state % dims.n_audio_head or dims.n_text_state % dims.n_text_head:
            raise CheckpointError(f"widths must be multiples of their head counts, got {dims}")
        if dims.n_audio_state != dims.n_text_state:
            raise CheckpointError(f"encoder and decoder must be equally wide, got {dims}")
        return dims

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def sinusoids(length: int, channels: int, max_timescale: float = 10_000.0) -> Tensor:
    """The encoder's position table (length, channels): sines in the first half, then cosines."""
    # on the CPU even where a model is only sketched: arithmetic on the meta device takes a second
    step = math.log(max_timescale) / (channels // 2 - 1)
    rates = torch.exp(-step * torch.arange(channels // 2, device="cpu"))
    angles = torch.arange(length, device="cpu")[:, None] * rates[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Block(nn.Module):
    """One layer: self-attention, cross-attention in the decoder, and the feed-forward part."""

    def __init__(self, n_state: int, n_head: int, place: str, cross: bool):
        super().__init__()
        self.attn = MultiHeadAttention(n_state, n_head, f"{place}.self")
        self.attn_ln = nn.LayerNorm(n_state)
        if cross:
            self.cross_attn = MultiHeadAttention(n_state, n_head, f"{place}.cross")
            self.cross_attn_ln = nn.LayerNorm(n_state)
        self.mlp = nn.Sequential(
            nn.Linear(n_state, 4 * n_state), nn.GELU(), nn.Linear(4 * n_state, n_state)
        )
        self.mlp_ln = nn.LayerNorm(n_state)

    def feed_forward(self, x: Tensor) -> Tensor:
        """x and what the feed-forward part adds to it."""
        return self.mlp[2](gelu(self.mlp[0](self.mlp_ln(x)))).add_(x)


def gelu(x: Tensor) -> Tensor:
    """GELU, in the memory of x where no gradient needs it: fresh memory costs more than the sum."""
    return F.gelu(x) if torch.is_grad_enabled() else torch.ops.aten.gelu_(x)


class AudioEncoder(nn.Module):
    """Two convolutions, positions, and layers of unmasked self-attention over the window."""

    positional_embedding: Tensor
    blocks: Sequence[Block]

    def __init__(self, dims: ModelDimensions):
        super().__init__()
        n_state = dims.n_audio_state
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
        self, mel: Tensor, mask: Tensor | None = None, record: Recorder | None = None
    ) -> Tensor:
        """Audio features of log-Mel frames.

        mel:  (B, n_mels, 2T)
        mask: (B, 1, 1, T) bool, True = may be attended to; None = everything
        returns (B, T, D)
        """
        n_mels, most = self.conv1.in_channels, 2 * self.positional_embedding.shape[0]
        if mel.ndim != 3 or mel.shape[1] != n_mels or not 0 < mel.shape[2] <= most:
            raise OptionError(
                f"mel must be (B, {n_mels}, 1..{most} frames), got {tuple(mel.shape)}"
            )
        if mask is not None:
            mask = masks.checked(mask)
        x = gelu(self.conv1(mel))
        x = gelu(self.conv2(x)).transpose(1, 2)  # (B, T, D)
        x = x + self.positional_embedding[: x.shape[1]]
        for block in self.blocks:
            inner = block.attn_ln(x)
            q, (keys, values) = block.attn.queries(inner), block.attn.keys_values(inner)
            x = block.feed_forward(block.attn(q, keys, values, mask, record).add_(x))
        return self.ln_post(x)


@dataclass(frozen=True)
class Memory:
    """What the decoder attends to of a batch of clips, computed once however often it decodes.

    features:     (B, T, D), the encoder's output
    keys, values: one tensor a decoder layer, (B, H, T, d)
    mask:         (B, 1, 1, T) bool, True = may be attended to; None = everything
    """

    features: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor | None = None

    @property
    def n_clips(self) -> int:
        return self.features.shape[0]

    def select(self, clips: Tensor) -> "Memory":
        """The memory of those clips alone."""
        return Memory(
            self.features.index_select(0, clips),
            tuple(k.index_select(0, clips) for k in self.keys),
            tuple(v.index_select(0, clips) for v in self.values),
            None if self.mask is None else self.mask.index_select(0, clips),
        )


class TextDecoder(nn.Module):
    """Layers of causal self-attention over the text and cross-attention to the audio."""

    blocks: Sequence[Block]

    def __init__(self, dims: ModelDimensions):
        super().__init__()
        n_state = dims.n_text_state
        self.n_ctx = dims.n_text_ctx
        # uniform, not normal: the latter takes a second where a model is only sketched (see above)
        vocabulary = nn.init.uniform_(torch.empty(dims.n_vocab, n_state), -0.1, 0.1)
        self.token_embedding = nn.Embedding.from_pretrained(vocabulary, freeze=False)
        positions = nn.init.uniform_(torch.empty(dims.n_text_ctx, n_state), -0.1, 0.1)
        self.positional_embedding = nn.Parameter(positions)
        blocks = nn.ModuleList(
            Block(n_state, dims.n_text_head, f"decoder.{i}", cross=True)
            for i in range(dims.n_text_layer)
        )
        self.blocks = cast("Sequence[Block]", blocks)
        self.ln = nn.LayerNorm(n_state)
        self.packed = Packed()

    def remember(self, features: Tensor, mask: Tensor | None = None) -> Memory:
        """The memory of audio features (B, T, D); mask (B, 1, 1, T) hides some of them."""
        pairs = [block.cross_attn.keys_values(features) for block in self.blocks]
        # contiguous: every later step reads them whole
        keys = tuple(k.contiguous() for k, _ in pairs)
        values = tuple(v.contiguous() for _, v in pairs)
        return Memory(features, keys, values, None if mask is None else masks.checked(mask))

    def cache(self, n_rows: int, capacity: int | None = None) -> KVCache:
        """An empty cache with room for `capacity` tokens of n_rows texts."""
        weight = self.token_embedding.weight
        n_head = self.blocks[0].attn.n_head
        shape = (n_rows, n_head, capacity or self.n_ctx, weight.shape[1] // n_head)
        return KVCache.empty(len(self.blocks), shape, weight)

    def forward(
        self, tokens: Tensor, memory: Memory, cache: KVCache, record: Recorder | None = None
    ) -> tuple[Tensor, KVCache]:
        """The last layer's output for the next tokens of each text, and the grown cache.

        tokens: (B·G, Q) ids, the Q tokens after those in the cache; G texts a clip of the memory
        returns (B·G, Q, D) for `logits`, and the cache with Q more positions
        """
        n_queries = tokens.shape[1]
        n_keys = cache.length + n_queries
        if n_keys > self.n_ctx:
            raise OptionError(f"a text must be at most {self.n_ctx} tokens, got {n_keys}")
        # a single query is the last of the keys and sees them all
        causal = None if n_queries == 1 else masks.causal(n_queries, n_keys, tokens.device)
        x = self.token_embedding(tokens) + self.positional_embedding[cache.length : n_keys]
        for i, block in enumerate(self.blocks):
            inner = block.attn_ln(x)
            q, new = block.attn.queries(inner), block.attn.keys_values(inner)
            x = block.attn(q, *cache.put(i, *new), causal, record).add_(x)
            q = block.cross_attn.queries(block.cross_attn_ln(x))
            seen = block.cross_attn(q, memory.keys[i], memory.values[i], memory.mask, record)
            x = block.feed_forward(seen.add_(x))
        return self.ln(x), cache.advanced(n_queries)

    def logits(self, x: Tensor) -> Tensor:
        """(…, D) → (…, n_vocab), float32."""
        weight = self.token_embedding.weight
        out = self.packed.product(x, weight)
        return F.linear(x, weight).float() if out is None else out


class Whisper(nn.Module):
    """The whole model. It knows nothing of files, text or search."""

    def __init__(self, dims: ModelDimensions):
        super().__init__()
        self.dims = dims
        self.encoder = AudioEncoder(dims)
        self.decoder = TextDecoder(dims)
        # (layer, head) pairs whose cross-attention follows the words in time; official models
        # come with their own list, others use the upper half of the decoder
        self.alignment_heads: tuple[tuple[int, int], ...] = tuple(
            (layer, head)
            for layer in range(dims.n_text_layer // 2, dims.n_text_layer)
            for head in range(dims.n_text_head)
        )

    @property
    def device(self) -> torch.device:
        return self.decoder.token_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.token_embedding.weight.dtype

    @property
    def is_multilingual(self) -> bool:
        return self.dims.n_vocab >= 51_865

    @property
    def num_languages(self) -> int:
        return self.dims.n_vocab - 51_765 - int(self.is_multilingual)

    def encode(
        self, mel: Tensor, mask: Tensor | None = None, record: Recorder | None = None
    ) -> Tensor:
        """Audio features (B, T, D) of log-Mel frames (B, n_mels, 2T); see AudioEncoder.forward."""
        return self.encoder(mel.to(self.device, self.dtype), mask, record)

    def logits(
        self,
        tokens: Tensor,
        audio_features: Tensor,
        cross_mask: Tensor | None = None,
        record: Recorder | None = None,
    ) -> Tensor:
        """Teacher-forced logits: (B, Q) tokens and (B, T, D) features → (B, Q, n_vocab)."""
        memory = self.decoder.remember(audio_features, cross_mask)
        cache = self.decoder.cache(*tokens.shape)
        x, _ = self.decoder(tokens, memory, cache, record)
        return self.decoder.logits(x)

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        """Teacher-forced logits of tokens (B, Q) after the audio mel (B, n_mels, 2T)."""
        return self.logits(tokens, self.encode(mel))
