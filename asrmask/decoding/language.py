"""Language detection."""

from collections.abc import Sequence

import torch
from torch import Tensor

from asrmask.audio.spectrogram import Features
from asrmask.decoding.windows import _batch, _policy
from asrmask.errors import OptionError
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer


@torch.inference_mode()
def language_of(
    model: Whisper, encoded: CrossAttentionCache, tokenizer: Tokenizer
) -> list[tuple[str, dict[str, float]]]:
    """Return the likeliest language of each clip, and the probabilities of all languages."""
    if not model.is_multilingual:
        raise OptionError("languages are detected by multilingual models only, got an English one")
    start = torch.full((encoded.n_clips, 1), tokenizer.sot, device=model.device)
    x, _ = model.decoder(start, encoded, model.decoder.cache(encoded.n_clips, 1))
    tokens = tokenizer.language_tokens
    logits = model.decoder.logits(x[:, 0])[:, list(tokens.values())]
    found = []
    for row in logits.softmax(dim=-1).tolist():
        probs = dict(zip(tokens, row, strict=True))
        found.append((max(probs, key=lambda code: probs[code]), probs))
    return found


def detect_language(
    model: Whisper,
    mel: Tensor | Features | Sequence[Features],
    tokenizer: Tokenizer | None = None,
    *,
    padding: Policy | str | None = None,
) -> tuple[Tensor, dict[str, float] | list[dict[str, float]]]:
    """Return language tokens and probabilities of one window (n_mels, 3000) or a batch."""
    windows, single = _batch(mel)
    if tokenizer is None:
        tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    found = language_of(model, encode(model, windows, _policy(padding, windows)), tokenizer)
    tokens = torch.tensor([tokenizer.language_tokens[code] for code, _ in found])
    probs = [p for _, p in found]
    return (tokens[0], probs[0]) if single else (tokens, probs)
