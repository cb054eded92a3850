"""The losses of a batch, as sums with what they are divided by.

A step may accumulate several batches. Its loss is the sum over all of their tokens (or positions)
divided by the number of those, so a token counts the same whatever batch it is in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asrmask.audio.constants import N_POSITIONS
from asrmask.audio.spectrogram import Features
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import encode_with_gradients
from asrmask.model.policy import Policy
from asrmask.model.virtual_padding import Bank
from asrmask.model.whisper import Whisper
from asrmask.training.spec import LossWeights
from asrmask.training.teacher import Target

NAMES = ("text", "features", "logits")


@dataclass(frozen=True)
class TrainingBatch:
    """Windows with their targets, to be encoded under one policy."""

    windows: Sequence[Features]
    targets: Sequence[Target]
    policy: Policy

    @property
    def n_tokens(self) -> int:
        """Tokens that are predicted."""
        return sum(target.n_text for target in self.targets)

    @property
    def energy(self) -> float:
        """The sum of squares of the padded model's features."""
        return sum(float(target.features.float().square().sum()) for target in self.targets)

    def denominators(self) -> dict[str, float]:
        """What the sum of each loss is divided by."""
        return {"text": self.n_tokens, "features": self.energy, "logits": self.n_tokens}


def sums(
    model: Whisper, batch: TrainingBatch, weights: LossWeights, bank: Bank | None = None
) -> dict[str, Tensor]:
    """The sum of each loss over a batch, for the losses that have a weight.

    bank: for virtual padding; None: the model's own, without gradients
    """
    encoded = encode_with_gradients(model, batch.windows, batch.policy, bank=bank)
    found = {}
    if weights.features:
        found["features"] = feature_error(encoded, batch.targets)
    if weights.text or weights.logits:
        logits = forced_logits(model, encoded, batch.targets)
        if weights.text:
            labels = torch.cat([target.tokens[target.n_prompt :] for target in batch.targets])
            found["text"] = F.cross_entropy(logits, labels.to(logits.device), reduction="sum")
        if weights.logits:
            found["logits"] = divergence(logits, batch.targets)
    return found


def forced_logits(
    model: Whisper, encoded: CrossAttentionCache, targets: Sequence[Target]
) -> Tensor:
    """Teacher forcing: the logits of every token of the texts, in one pass: (tokens, n_vocab).

    Texts are padded at their end, where no token sees it: the mask is causal. Neither prompts nor
    padding give logits.
    """
    n_most = max(max(len(target.tokens) - 1, target.n_prompt) for target in targets)
    tokens = torch.zeros(len(targets), n_most, dtype=torch.long)
    is_text = torch.zeros(len(targets), n_most, dtype=torch.bool)
    for i, target in enumerate(targets):
        n_read = max(len(target.tokens) - 1, target.n_prompt)
        tokens[i, :n_read] = target.tokens[:n_read]
        is_text[i, target.n_prompt - 1 : target.n_prompt - 1 + target.n_text] = True
    cache = model.decoder.cache(*tokens.shape)
    x, _ = model.decoder(tokens.to(model.device), encoded, cache)
    return model.decoder.logits(x[is_text.to(model.device)])


def feature_error(encoded: CrossAttentionCache, targets: Sequence[Target]) -> Tensor:
    """The sum of squared differences of features at each clip's own positions."""
    total = encoded.features.new_zeros((), dtype=torch.float32)
    for i, target in enumerate(targets):
        first = encoded.first_of(i)
        if encoded.first is not None:  # the last positions of the window were computed
            first -= N_POSITIONS - encoded.features.shape[1]
        own = encoded.features[i, first : first + len(target.features)].float()
        total = total + (own - target.features.to(own)).square().sum()
    return total


def divergence(logits: Tensor, targets: Sequence[Target]) -> Tensor:
    """The sum of Kullback-Leibler divergences, KL(padded model ‖ model), over tokens.

    Tokens that are not among the likeliest of the padded model count as one.
    """
    likeliest = torch.cat([target.likeliest for target in targets]).to(logits.device)
    theirs = torch.cat([target.logprobs for target in targets]).to(logits.device)
    ours = logits.gather(1, likeliest.long()) - logits.logsumexp(dim=-1, keepdim=True)
    theirs, ours = _with_rest(theirs), _with_rest(ours)
    return (theirs.exp() * (theirs - ours)).sum()


def _with_rest(logprobs: Tensor) -> Tensor:
    """Log-probabilities (N, K) of some tokens, and of all others together: (N, K + 1)."""
    rest = (1 - logprobs.exp().sum(dim=-1, keepdim=True)).clamp(min=1e-6)
    return torch.cat([logprobs, rest.log()], dim=-1)
