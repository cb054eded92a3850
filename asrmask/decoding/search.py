"""Search for candidate texts of encoded audio: greedy, sampling and beam search.

All share one loop: run the decoder, filter the logits, let the strategy choose tokens, and remove
finished clips from the batch. Clips are independent: a batch gives the same texts as its clips
decoded one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor
from torch.distributions import Categorical

from asrmask.decoding.filters import Filter
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.whisper import Whisper

USUAL_TOKENS = 30  # initial capacity of the cache, beyond the prompt
LEAST_TEMPERATURE = 1e-6  # below, sampling is argmax, and logits / temperature may overflow


@dataclass(frozen=True)
class Candidate:
    """One text found for a clip, without prompt and end token."""

    tokens: list[int]  # including the prefix
    sum_logprob: float  # of the decoded tokens, including the end token if reached
    ended: bool  # whether the end token was reached


@dataclass
class SearchState:
    """The unfinished texts of one clip, all of the same length."""

    texts: list[list[int]] = field(default_factory=lambda: [[]])
    sums: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Candidate] = field(default_factory=list)
    done: bool = False


class Strategy(Protocol):
    """A rule to choose the next tokens."""

    def choose(self, clips: Sequence[SearchState], logits: Tensor) -> list[list[int]]:
        """Extend the texts of each clip by one token.

        logits: (texts of all clips, n_vocab), filtered
        returns, for each clip, the index of the source text of each continued text

        Clips that are done stay unchanged.
        """
        ...

    def candidates(self, clip: SearchState) -> list[Candidate]:
        """Return the candidates of a clip that is done or has reached the token limit."""
        ...


@dataclass(frozen=True)
class Greedy:
    """Choose the likeliest token, or sample above temperature 0, for n independent texts."""

    eot: int
    temperature: float = 0.0
    n_texts: int = 1

    def choose(self, clips: Sequence[SearchState], logits: Tensor) -> list[list[int]]:
        sources = [list(range(len(clip.texts))) for clip in clips]
        if len(clips[0].texts) < self.n_texts:  # first step: copy the one text
            sources = [[0] * self.n_texts for _ in clips]
            for clip in clips:
                clip.texts = [list(clip.texts[0]) for _ in range(self.n_texts)]
                clip.sums = [0.0] * self.n_texts
            logits = logits.repeat_interleave(self.n_texts, dim=0)
        if self.temperature < LEAST_TEMPERATURE:
            picked, chosen = logits.max(dim=-1)
        else:
            # sample for ended texts too: consumes random numbers exactly as upstream
            scaled = logits / self.temperature
            chosen = Categorical(logits=scaled, validate_args=False).sample()
            picked = logits.gather(1, chosen[:, None])[:, 0]
        picked = picked - logits.logsumexp(dim=-1)
        drawn = zip(chosen.tolist(), picked.tolist(), strict=True)
        for clip in clips:
            for i, (token, logprob) in enumerate(islice(drawn, len(clip.texts))):
                if clip.done:
                    continue
                ended = bool(clip.texts[i]) and clip.texts[i][-1] == self.eot
                clip.sums[i] += 0.0 if ended else logprob
                clip.texts[i].append(self.eot if ended else token)
            clip.done = all(text[-1] == self.eot for text in clip.texts)
        return sources

    def candidates(self, clip: SearchState) -> list[Candidate]:
        found = []
        for text, total in zip(clip.texts, clip.sums, strict=True):
            ended = self.eot in text
            tokens = text[: text.index(self.eot)] if ended else text
            found.append(Candidate(tokens, total, ended))
        return found


@dataclass(frozen=True)
class Beam:
    """Keep the n best texts at each step; done when n · patience texts have ended."""

    eot: int
    beam_size: int
    patience: float = 1.0

    @property
    def n_finished(self) -> int:
        return round(self.beam_size * self.patience)

    def choose(self, clips: Sequence[SearchState], logits: Tensor) -> list[list[int]]:
        parts = logits.split([len(clip.texts) for clip in clips])
        return [
            list(range(len(clip.texts))) if clip.done else self._choose(clip, part)
            for clip, part in zip(clips, parts, strict=True)
        ]

    def _choose(self, clip: SearchState, logits: Tensor) -> list[int]:
        logprobs, tokens = logits.log_softmax(dim=-1).topk(self.beam_size + 1)
        sums = torch.tensor(clip.sums, device=logits.device)  # float32, as upstream
        scores = (sums[:, None] + logprobs).flatten()
        order = scores.argsort(descending=True, stable=True).tolist()
        values, flat = scores.tolist(), tokens.flatten().tolist()
        texts: list[list[int]] = []
        totals: list[float] = []
        sources: list[int] = []
        for i in order:
            source = i // (self.beam_size + 1)
            if flat[i] == self.eot:
                if len(clip.finished) < self.n_finished:
                    clip.finished.append(Candidate(clip.texts[source], values[i], ended=True))
                continue
            texts.append([*clip.texts[source], flat[i]])
            totals.append(values[i])
            sources.append(source)
            if len(texts) == self.beam_size:
                break
        clip.texts, clip.sums = texts, totals
        clip.done = len(clip.finished) >= self.n_finished
        return sources

    def candidates(self, clip: SearchState) -> list[Candidate]:
        found = list(clip.finished)
        best_first = sorted(range(len(clip.texts)), key=lambda i: clip.sums[i], reverse=True)
        for i in best_first:
            if len(found) >= self.beam_size:
                break
            found.append(Candidate(clip.texts[i], clip.sums[i], ended=False))
        return found


@dataclass(frozen=True)
class SearchResult:
    """The candidates of one clip."""

    candidates: list[Candidate]
    probability: float  # of the probe token at the probe position, before any filter


@torch.inference_mode()
def search(
    model: Whisper,
    encoded: CrossAttentionCache,
    prompts: Tensor,
    strategy: Strategy,
    filters: Sequence[Filter],
    *,
    n_prefix: int = 0,
    max_tokens: int,
    probe: tuple[int, int],
) -> list[SearchResult]:
    """Return candidate texts for each encoded clip.

    prompts: (clips, P) tokens that the decoder starts with
    n_prefix: how many tokens at the end of each prompt are the prefix of the text
    max_tokens:  maximum number of decoded tokens
    probe:   a prompt position, and the token (no speech) whose probability to read there
    """
    decoder = model.decoder
    n_prompt = prompts.shape[1]
    max_tokens = min(max_tokens, decoder.n_ctx - n_prompt + 1)
    capacity = n_prompt + min(max_tokens, USUAL_TOKENS)
    x, cache = decoder(prompts, encoded, decoder.cache(encoded.n_clips, capacity))
    position, token = probe
    logits = decoder.logits(x[:, position])
    probabilities = logits.softmax(dim=-1)[:, token].tolist()
    if position < n_prompt - 1:
        logits = decoder.logits(x[:, -1])
    given = prompts[:, n_prompt - n_prefix :].tolist()
    clips = [SearchState(texts=[text]) for text in given]
    going = list(clips)
    for step in range(max_tokens):
        texts = [text for clip in going for text in clip.texts]
        for rule in filters:
            rule(logits, texts)
        sources = strategy.choose(going, logits)
        if all(clip.done for clip in going) or step == max_tokens - 1:
            break
        keep = [i for i, clip in enumerate(going) if not clip.done]
        n_before = len(texts) // len(going)  # all clips have the same number of texts
        rows = [i * n_before + source for i in keep for source in sources[i]]
        if rows != list(range(len(texts))):
            cache = cache.select(torch.tensor(rows, device=prompts.device))
        if len(keep) < len(going):
            encoded = encoded.select(keep)
            going = [going[i] for i in keep]
        last = [text[-1] for clip in going for text in clip.texts]
        x, cache = decoder(torch.tensor(last, device=prompts.device)[:, None], encoded, cache)
        logits = decoder.logits(x[:, 0])
    several = zip(clips, probabilities, strict=True)
    return [SearchResult(strategy.candidates(clip), probability) for clip, probability in several]
