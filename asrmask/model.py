"""Whisper: encoder and decoder with openai-whisper's parameter names, so its weights load as is."""

import hashlib
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrmask import masks
from asrmask.attention import Keys, KVCache, MultiHeadAttention, Recorder, Run, Shared, joined
from asrmask.errors import CheckpointError, OptionError, brief
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
            raise CheckpointError(f"dimensions must be {names}, got {brief(list(numbers))}")
        bad = {n: x for n, x in numbers.items() if type(x) is not int or not 0 < x < 2**31}
        if bad:
            raise CheckpointError(
                f"dimensions must be positive whole numbers below 2^31, got {brief(bad)}"
            )
        dims = cls(**numbers)
        if dims.n_audio_state % 2 or dims.n_audio_state < 4:  # see sinusoids
            raise CheckpointError(f"widths must be even and 4 or more, got {dims}")
        if dims.n_audio_state % dims.n_audio_head or dims.n_text_state % dims.n_text_head:
            raise CheckpointError(f"widths must be multiples of their head counts, got {dims}")
        if dims.n_audio_state != dims.n_text_state:
            raise CheckpointError(f"encoder and decoder must be equally wide, got {dims}")
        return dims

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def hash_weights(module: nn.Module, digest: "hashlib._Hash") -> None:
    """Add a module's weights to a hash, as float32, whatever file or precision they came from."""
    for name, weight in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.float().cpu().contiguous().numpy().data)


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
        self.place = place
        self.attn = MultiHeadAttention(n_state, n_head, f"{place}.self")
        self.attn_ln = nn.LayerNorm(n_state)
        if cross:
            self.cross_attn = MultiHeadAttention(n_state, n_head, f"{place}.cross")
            self.cross_attn_ln = nn.LayerNorm(n_state)
        self.mlp = FeedForward(
            nn.Linear(n_state, 4 * n_state), nn.GELU(), nn.Linear(4 * n_state, n_state)
        )
        self.mlp_ln = nn.LayerNorm(n_state)

    def feed_forward(self, x: Tensor) -> Tensor:
        """x and what the feed-forward part adds to it."""
        return self.mlp(self.mlp_ln(x)).add_(x)


class FeedForward(nn.Sequential):
    """Four times the width and back: a linear layer, GELU and a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self[2](gelu(self[0](x)))


def gelu(x: Tensor) -> Tensor:
    """GELU, in the memory of x where no gradient needs it: fresh memory costs more than the sum."""
    return F.gelu(x) if torch.is_grad_enabled() else torch.ops.aten.gelu_(x)


class Tail(Protocol):
    """What stands in for padding that the encoder does not compute (virtual.py)."""

    def joined(
        self, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """A layer's keys and values, (B, H, T, d), with more behind them, and the mask of all."""
        ...


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
        self.enter: nn.Module = nn.Identity()  # the channels that layers work in (int8.py)

    def forward(
        self,
        mel: Tensor,
        mask: Tensor | None = None,
        record: Recorder | None = None,
        *,
        positions: tuple[int, int] | None = None,
        tail: Tail | None = None,
    ) -> Tensor:
        """Audio features of log-Mel frames.

        mel:       (B, n_mels, 2T)
        mask:      (B, 1, 1, T) bool, True = may be attended to; None = everything
        positions: (first, end) of those to compute; None: all. The others exist for nobody, but the
                   convolutions see the frames beside the border, as they do under a mask
        tail:      padding to attend to that is not computed, with masks of its own
        returns (B, T, D)
        """
        n_mels, most = self.conv1.in_channels, 2 * self.positional_embedding.shape[0]
        if mel.ndim != 3 or mel.shape[1] != n_mels or not 0 < mel.shape[2] <= most:
            raise OptionError(
                f"mel must be (B, {n_mels}, 1..{most} frames), got {tuple(mel.shape)}"
            )
        stretch, mask = slice(None), masks.checked(mask)
        if record is None:  # a record is of all keys
            stretch, mask = masks.seen(mask, -(-mel.shape[2] // 2))

        def attended(i: int, block: Block, x: Tensor) -> Tensor:
            """x and what self-attention adds to it; queries, keys and values end with the call."""
            q, keys, values = block.attn.projections(block.attn_ln(x))
            if tail is None:
                keys, values, seen = keys[:, :, stretch], values[:, :, stretch], mask
            else:
                keys, values, seen = tail.joined(i, keys, values)
            return block.attn(q, keys, values, seen, record).add_(x)

        x = self.embed(mel, *(positions or (0, -(-mel.shape[2] // 2))))
        if record is not None:
            record("encoder.input", "residual", x)
        for i, block in enumerate(self.blocks):
            x = block.feed_forward(attended(i, block, x))
            if record is not None:
                record(block.place, "residual", x)
        return self.ln_post(x)

    def embed(self, mel: Tensor, first: int, end: int) -> Tensor:
        """Positions first..end before the first layer, (B, end − first, D).

        Position t reads the frames 2t − 2 … 2t + 2.
        """
        if mel.device.type == "cpu" and len(mel) > 1:
            # one by one: for other shapes libraries add in another order
            return torch.cat([self.embed(one, first, end) for one in mel.split(1)])
        frames = mel[:, :, max(2 * first - 2, 0) : 2 * end + 1]
        x = gelu(self.conv1(frames))
        x = self.enter(gelu(self.conv2(x)).transpose(1, 2))
        skipped = 1 if first else 0  # it read beyond the cut
        return x[:, skipped : skipped + end - first] + self.positional_embedding[first:end]


@dataclass(frozen=True)
class Memory:
    """What the decoder attends to of a batch of clips, computed once however often it decodes.

    features:     (B, T, D), the encoder's output; T = 0: it was let go
    keys, values: one tensor a decoder layer, (B, H, K, d), without what is hidden from all clips
    mask:         (B, 1, 1, K) bool, True = may be attended to; None = everything
    shared:       for each decoder layer, what all clips attend to beside it; none: nothing
    first:        (B,) ints, the position code of each clip's first audio; None: 0
    origin:       the position code of the first key
    runs:         its clips, where keys and values are spaces that several lie in
    """

    features: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor | None = None
    shared: tuple[Shared, ...] = ()
    first: Tensor | None = None
    origin: int = 0
    runs: tuple[Run, ...] = ()

    @property
    def n_clips(self) -> int:
        return self.features.shape[0]

    @cached_property
    def layers(self) -> list[tuple[Keys, Keys]]:
        """The keys and values that each decoder layer attends to."""
        if not self.runs:
            return list(zip(self.keys, self.values, strict=True))
        cut = cache(lambda space: [run.of(space) for run in self.runs])
        return [(cut(k), cut(v)) for k, v in zip(self.keys, self.values, strict=True)]

    def without_features(self) -> "Memory":
        """What decoding needs of it."""
        return replace(self, features=self.features.new_empty(self.n_clips, 0, 0))

    def with_shared(self, keys: Sequence["Place"], mask: Tensor) -> "Memory":
        """The same, with more that all clips attend to: keys and values (1, H, K, d) a layer.

        mask: (B, 1, 1, K), a bias
        """
        mask = masks.aside(mask)
        return replace(self, shared=tuple(Shared(k, v, mask) for k, v in keys))

    def one(self, clip: int) -> "Memory":
        """The memory of one clip, in the same place."""
        only = slice(clip, clip + 1)
        take = self._clips[clip].of if self.runs else lambda x: x[only]
        return Memory(
            self.features[only],
            tuple(map(take, self.keys)),
            tuple(map(take, self.values)),
            None if self.mask is None else self.mask[only],
            tuple(replace(one, mask=one.mask[only]) for one in self.shared),
            None if self.first is None else self.first[only],
            self.origin,
        )

    def select(self, clips: Sequence[int]) -> "Memory":
        """The memory of those clips alone, in that order."""
        index = torch.tensor(clips, device=self.features.device)

        @cache  # layers may have the same one
        def chosen(x: Tensor) -> Tensor:
            return x.index_select(0, index)

        keys, values = self.keys, self.values
        if not self.runs:  # in those, they stay where they are
            keys, values = tuple(map(chosen, keys)), tuple(map(chosen, values))
        shared = self.shared
        if shared:
            mask = chosen(shared[0].mask)  # of all layers
            shared = tuple(replace(one, mask=mask) for one in shared)
        return Memory(
            chosen(self.features),
            keys,
            values,
            None if self.mask is None else chosen(self.mask),
            shared,
            None if self.first is None else chosen(self.first),
            self.origin,
            joined(self._clips[clip] for clip in clips) if self.runs else (),
        )

    @property
    def _clips(self) -> list[Run]:
        """Each clip by itself, where they are in runs."""
        return [clip for run in self.runs for clip in run.clips()]

    def first_of(self, clip: int) -> int:
        """The position code of a clip's first audio."""
        return 0 if self.first is None else int(self.first[clip])


# for a layer's keys and values of some clips, (B, H, K, d) each; one if they are the same
Place = tuple[Tensor, ...]


class Room:
    """Space for what is remembered of a batch, which the next batch has again."""

    def __init__(self, model: "Whisper", n_keys: int):
        """n_keys: of all clips together, at the most"""
        n_places, n_parts, n_head, width = self._shape(model)
        # of the kernel, not of the C library: what is not reached is not taken, and nothing that is
        # smaller comes to lie around it
        memory = mmap.mmap(-1, self.bytes_of_key(model) * n_keys)
        space = torch.frombuffer(memory, dtype=model.dtype)
        space = space.view(n_places, n_parts, n_keys, n_head, width)
        self.places: list[Place] = [tuple(place) for place in space]

    @staticmethod
    def bytes_of_key(model: "Whisper") -> int:
        """What one position takes, with its values, in all layers."""
        return math.prod(Room._shape(model)) * model.decoder.ln.weight.element_size()

    @staticmethod
    def _shape(model: "Whisper") -> tuple[int, int, int, int]:
        """(places, parts of each, heads, width of a head)"""
        dims = model.dims
        if model.decoder.attends_to_features:
            return 1, 1, 1, dims.n_text_state
        return dims.n_text_layer, 2, dims.n_text_head, dims.n_text_state // dims.n_text_head


def _room_for(x: Tensor, n_keys: int) -> Tensor:
    """(B, H, n_keys, d) for keys or values: in one piece, since every later step reads it whole."""
    return torch.empty((*x.shape[:2], n_keys, x.shape[3]), dtype=x.dtype, device=x.device)


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
        self.attends_to_features = False  # instead of keys and values of them (int8.py)

    def remember(
        self,
        features: Tensor,
        mask: Tensor | None = None,
        places: Sequence[Place] = (),
    ) -> Memory:
        """The memory of audio features (B, T, D).

        mask:   (B, 1, 1, T) bool, hides some of them
        places: where to put them, a layer each
        """
        stretch, mask = masks.seen(masks.checked(mask), features.shape[1])
        n_keys = stretch.stop - stretch.start
        kept: list[Place] = []
        for i, own in enumerate(self._kept(features)):
            kept.append(places[i] if places else tuple(_room_for(x, n_keys) for x in own))
            for into, x in zip(kept[i], own, strict=True):
                into.copy_(x[:, :, stretch])
        return Memory(features, *self.by_layer(kept), mask, origin=stretch.start)

    def _kept(self, features: Tensor) -> Iterator[Place]:
        """What is remembered of features: a pair for each layer, or one thing for all of them."""
        if self.attends_to_features:
            yield (features[:, None],)
            return
        for block in self.blocks:
            yield block.cross_attn.keys_values(features)

    def by_layer(self, kept: Sequence[Place]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Every layer's keys, and every layer's values."""
        several = list(kept) * (len(self.blocks) // len(kept))
        return tuple(place[0] for place in several), tuple(place[-1] for place in several)

    def cache(self, n_rows: int, capacity: int | None = None) -> KVCache:
        """An empty cache with room for `capacity` tokens of n_rows texts; it grows when needed."""
        like = self.ln.weight
        n_head = self.blocks[0].attn.n_head
        shape = (n_rows, n_head, capacity or self.n_ctx, len(like) // n_head)
        return KVCache.empty(len(self.blocks), shape, like)

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
        cache = cache.with_room(n_queries)
        causal = None if n_queries == 1 else masks.causal(n_queries, n_keys, tokens.device)
        x = self.token_embedding(tokens).to(self.ln.weight.dtype)
        x = x + self.positional_embedding[cache.length : n_keys]
        if record is not None:
            record("decoder.input", "residual", x)
        for i, block in enumerate(self.blocks):
            q, keys, values = block.attn.projections(block.attn_ln(x))
            x = block.attn(q, *cache.put(i, keys, values), causal, record).add_(x)
            q = block.cross_attn.queries(block.cross_attn_ln(x))
            shared = memory.shared[i] if memory.shared else None
            seen = block.cross_attn(q, *memory.layers[i], memory.mask, record, shared)
            x = block.feed_forward(seen.add_(x))
            if record is not None:
                record(block.place, "residual", x)
        return self.ln(x), cache.advanced(n_queries)

    def logits(self, x: Tensor) -> Tensor:
        """(…, D) → (…, n_vocab), float32."""
        if not isinstance(self.token_embedding, nn.Embedding):
            return self.token_embedding.logits(x)
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
        return self.decoder.ln.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations: weights may take less room."""
        return self.decoder.ln.weight.dtype

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
