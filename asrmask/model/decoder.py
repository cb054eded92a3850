"""The text decoder: tokens and audio features to logits."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrmask.errors import OptionError
from asrmask.model import masks
from asrmask.model.attention import KeyValues, Recorder
from asrmask.model.blocks import Block
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.kv_cache import KVCache
from asrmask.model.packed import Packed


class TokenEmbedding(nn.Embedding):
    """The table of tokens, in and out: tokens to vectors, and vectors to logits."""

    def __init__(self, n_vocab: int, n_state: int):
        # uniform, not normal: normal takes a second on the meta device, where models are built
        weight = nn.init.uniform_(torch.empty(n_vocab, n_state), -0.1, 0.1)
        super().__init__(n_vocab, n_state, _weight=weight)
        self.packed = Packed()

    def logits(self, x: Tensor) -> Tensor:
        """(…, D) → (…, n_vocab), float32"""
        out = self.packed.product(x, self.weight)
        return F.linear(x, self.weight).float() if out is None else out


class TextDecoder(nn.Module):
    """Layers of causal self-attention over the text and cross-attention to the audio."""

    blocks: Sequence[Block]
    token_embedding: TokenEmbedding

    def __init__(self, dims: ModelDimensions):
        super().__init__()
        n_state = dims.n_text_state
        self.n_ctx = dims.n_text_ctx
        self.token_embedding = TokenEmbedding(dims.n_vocab, n_state)
        positions = nn.init.uniform_(torch.empty(dims.n_text_ctx, n_state), -0.1, 0.1)
        self.positional_embedding = nn.Parameter(positions)
        blocks = nn.ModuleList(
            Block(n_state, dims.n_text_head, f"decoder.{i}", cross=True)
            for i in range(dims.n_text_layer)
        )
        self.blocks = cast("Sequence[Block]", blocks)
        self.ln = nn.LayerNorm(n_state)

    def cross_attention_cache(
        self, features: Tensor, mask: Tensor | None = None
    ) -> CrossAttentionCache:
        """Project audio features (B, T, D) to the keys and values of every layer.

        mask: (B, 1, 1, T) bool, True = may be attended to; None = everything
        """
        span, mask = masks.visible_span(masks.validated(mask), features.shape[1])
        visible = features[:, span]
        layers = []
        for block in self.blocks:
            # contiguous: every later step reads them whole
            keys, values = (x.contiguous() for x in block.cross_attn.keys_values(visible))
            layers.append((KeyValues(keys, values, mask),))
        return CrossAttentionCache(features, tuple(layers), origin=span.start)

    def cache(self, n_rows: int, capacity: int | None = None) -> KVCache:
        """An empty cache with room for `capacity` tokens of n_rows texts; it grows when needed."""
        like = self.ln.weight
        n_head = self.blocks[0].attn.n_head
        shape = (n_rows, n_head, capacity or self.n_ctx, len(like) // n_head)
        return KVCache.empty(len(self.blocks), shape, like)

    def forward(
        self,
        tokens: Tensor,
        audio: CrossAttentionCache,
        cache: KVCache,
        record: Recorder | None = None,
    ) -> tuple[Tensor, KVCache]:
        """The last layer's output for the next tokens of each text, and the grown cache.

        tokens: (B·G, Q) ids, the Q tokens after those in the cache; G texts for each clip of audio
        returns (B·G, Q, D) for `logits`, and the cache with Q more positions
        """
        n_queries = tokens.shape[1]
        n_keys = cache.length + n_queries
        self.check_length(n_keys)
        cache = cache.ensure_capacity(n_queries)
        # a single query is the last of the keys and sees them all
        causal = None if n_queries == 1 else masks.causal(n_queries, n_keys, tokens.device)
        x = self.token_embedding(tokens).to(self.ln.weight.dtype)
        x = x + self.positional_embedding[cache.length : n_keys]
        if record is not None:
            record("decoder.input", "residual", x)
        for i, block in enumerate(self.blocks):
            q, keys, values = block.attn.projections(block.attn_ln(x))
            text = KeyValues(*cache.put(i, keys, values), causal)
            x = block.attn(q, [text], record, residual=x)
            q = block.cross_attn.queries(block.cross_attn_ln(x))
            x = block.cross_attn(q, audio.layers[i], record, residual=x)
            x = block.feed_forward(x)
            if record is not None:
                record(block.place, "residual", x)
        return self.ln(x), cache.advanced(n_queries)

    def check_length(self, n_tokens: int) -> None:
        if n_tokens > self.n_ctx:
            raise OptionError(f"a text must be at most {self.n_ctx} tokens, got {n_tokens}")

    def logits(self, x: Tensor) -> Tensor:
        """(…, D) → (…, n_vocab), float32"""
        return self.token_embedding.logits(x)

    @staticmethod
    def best_tokens(logits: Tensor) -> tuple[list[int], list[float]]:
        """The likeliest token of each row of logits (R, n_vocab), and its log-probability."""
        best, tokens = logits.max(dim=-1)
        return tokens.tolist(), (best - logits.logsumexp(dim=-1)).tolist()
