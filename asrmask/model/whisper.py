"""Whisper: encoder and decoder with openai-whisper's parameter names, so its weights load as is."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from asrmask.model.attention import Recorder
from asrmask.model.decoder import TextDecoder
from asrmask.model.dimensions import ModelDimensions
from asrmask.model.encoder import AudioEncoder


def hash_weights(weights: Mapping[str, Tensor], digest: "hashlib._Hash") -> None:
    """Add weights by name to a hash: floats as float32, whatever precision they came from."""
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        values = weight.detach().float() if weight.is_floating_point() else weight
        digest.update(values.cpu().contiguous().numpy().data)


def sha256_of_weights(weights: Mapping[str, Tensor]) -> str:
    """The sha256 of weights by name, as a model's `state_dict()` has them."""
    digest = hashlib.sha256()
    hash_weights(weights, digest)
    return digest.hexdigest()


class Whisper(nn.Module):
    """The whole model. It knows nothing of files, text or search."""

    def __init__(self, dims: ModelDimensions):
        super().__init__()
        self.dims = dims
        self.encoder = AudioEncoder(dims)
        self.decoder = TextDecoder(dims)
        # (layer, head) pairs whose cross-attention follows the words in time; official models
        # come with their own list
        self.alignment_heads = dims.default_alignment_heads

    @property
    def device(self) -> torch.device:
        return self.decoder.ln.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations: weights may take less room."""
        return self.decoder.ln.weight.dtype

    @property
    def is_multilingual(self) -> bool:
        return self.dims.is_multilingual

    @property
    def num_languages(self) -> int:
        return self.dims.num_languages

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
        audio = self.decoder.cross_attention_cache(audio_features, cross_mask)
        cache = self.decoder.cache(*tokens.shape)
        x, _ = self.decoder(tokens, audio, cache, record)
        return self.decoder.logits(x)

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        """Teacher-forced logits of tokens (B, Q) after the audio mel (B, n_mels, 2T)."""
        return self.logits(tokens, self.encode(mel))
