"""Search for candidate texts of encoded audio: greedy, sampling and beam search.

All share one loop: run the decoder, filter the logits, let the strategy choose tokens, and remove
finished clips from the batch. Clips are independent: a batch gives the same texts as its clips
decoded one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor
from torch.distributions import Categorical

from asrmask.decoding.filters import Filter
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.decoder import TextDecoder
from asrmask.model.whisper import Whisper

USUAL_TOKENS = 30  # initial capacity of the cache, beyond the prompt
MIN_TEMPERATURE = 1e-6  # below, sampling is argmax, and logits / temperature may overflow


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


@dataclass(frozen=True)
class Greedy:
    """Choose the likeliest token, or sample above temperature 0, for n independent texts.

    best_tokens: the likeliest token of each row of logits, and its log-probability
    """

    eot: int
    temperature: float = 0.0
    n_texts: int = 1
    best_tokens: Callable[[Tensor], tuple[list[int], list[float]]] = TextDecoder.best_tokens

    def choose(self, clips: Sequence[SearchState], logits: Tensor) -> list[list[int]]:
        """Extend the texts of each clip by one token. Clips that are done stay unchanged.

        logits: (texts of all clips, n_vocab), filtered
        returns, for each clip, the index of the source text of each continued text
        """
        sources = [list(range(len(clip.texts))) for clip in clips]
        if len(clips[0].texts) < self.n_texts:  # first step: copy the one text
            sources = [[0] * self.n_texts for _ in clips]
            for clip in clips:
                clip.texts = [list(clip.texts[0]) for _ in range(self.n_texts)]
                clip.sums = [0.0] * self.n_texts
            logits = logits.repeat_interleave(self.n_texts, dim=0)
        if self.temperature < MIN_TEMPERATURE:
            tokens, logprobs = self.best_tokens(logits)
        else:
            # sample for ended texts too: consumes random numbers exactly as upstream
            scaled = logits / self.temperature
            chosen = Categorical(logits=scaled, validate_args=False).sample()
            chosen_logits = logits.gather(1, chosen[:, None])[:, 0]
            tokens, logprobs = chosen.tolist(), (chosen_logits - logits.logsumexp(dim=-1)).tolist()
        pairs = zip(tokens, logprobs, strict=True)
        for clip in clips:
            for i, (token, logprob) in enumerate(islice(pairs, len(clip.texts))):
                if clip.done:
                    continue
                ended = bool(clip.texts[i]) and clip.texts[i][-1] == self.eot
                clip.sums[i] += 0.0 if ended else logprob
                clip.texts[i].append(self.eot if ended else token)
            clip.done = all(text[-1] == self.eot for text in clip.texts)
        return sources

    def candidates(self, clip: SearchState) -> list[Candidate]:
        """Return the candidates of a clip that is done or has reached the token limit."""
        candidates = []
        for text, total in zip(clip.texts, clip.sums, strict=True):
            n_tokens = text.index(self.eot) if self.eot in text else len(text)
            candidates.append(Candidate(text[:n_tokens], total, ended=n_tokens < len(text)))
        return candidates


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
        """See Greedy.choose."""
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
        best: list[int] = []
        for i in order:
            if flat[i] != self.eot:
                best.append(i)
            elif len(clip.finished) < self.n_finished:
                text = clip.texts[i // (self.beam_size + 1)]
                clip.finished.append(Candidate(text, values[i], ended=True))
            if len(best) == self.beam_size:
                break
        sources = [i // (self.beam_size + 1) for i in best]
        clip.texts = [[*clip.texts[i // (self.beam_size + 1)], flat[i]] for i in best]
        clip.sums = [values[i] for i in best]
        clip.done = len(clip.finished) >= self.n_finished
        return sources

    def candidates(self, clip: SearchState) -> list[Candidate]:
        """Return the finished texts, then the best unfinished ones up to beam_size."""
        best_first = sorted(range(len(clip.texts)), key=lambda i: clip.sums[i], reverse=True)
        n_missing = max(self.beam_size - len(clip.finished), 0)
        return clip.finished + [
            Candidate(clip.texts[i], clip.sums[i], ended=False) for i in best_first[:n_missing]
        ]


Strategy = Greedy | Beam


@torch.inference_mode()
def search(
    model: Whisper,
    encoded: CrossAttentionCache,
    prompts: Tensor,
    strategy: Strategy,
    filters: Sequence[Filter],
    *,
    n_prefix: int,
    max_tokens: int,
    probe: tuple[int, int],
) -> tuple[list[list[Candidate]], list[float]]:
    """Return candidate texts for each encoded clip, and the probability of the probe token.

    prompts:    (clips, P) tokens that the decoder starts with
    n_prefix:   how many tokens at the end of each prompt are the prefix of the text
    max_tokens: maximum number of decoded tokens
    probe:      a prompt position, and the token (no speech) whose probability to read there,
                before any filter
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
    clips = [SearchState([prefix]) for prefix in prompts[:, n_prompt - n_prefix :].tolist()]
    active = list(clips)
    for step in range(max_tokens):
        texts = [text for clip in active for text in clip.texts]
        for apply_filter in filters:
            apply_filter(logits, texts)
        sources = strategy.choose(active, logits)
        if all(clip.done for clip in active) or step == max_tokens - 1:
            break
        unfinished = [i for i, clip in enumerate(active) if not clip.done]
        n_texts = len(texts) // len(active)  # all clips have the same number of texts
        rows = [i * n_texts + source for i in unfinished for source in sources[i]]
        if rows != list(range(len(texts))):
            cache = cache.select(torch.tensor(rows, device=prompts.device))
        if len(unfinished) < len(active):
            encoded = encoded.select(unfinished)
            active = [active[i] for i in unfinished]
        last = [text[-1] for clip in active for text in clip.texts]
        x, cache = decoder(torch.tensor(last, device=prompts.device)[:, None], encoded, cache)
        logits = decoder.logits(x[:, 0])
    return [strategy.candidates(clip) for clip in clips], probabilities
