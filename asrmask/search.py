"""Search: from a model, a memory and a prompt to candidate texts. Greedy, sampling and beam.

The loop is one for all: run the decoder, filter the logits, let the strategy choose, and leave
clips out of the batch when they are done. Each clip goes its own way, so that a batch gives what
its clips give one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor
from torch.distributions import Categorical

from asrmask.filters import Filter
from asrmask.model import Memory, Whisper

USUAL_TOKENS = 30  # that the cache has room for at first
LEAST_TEMPERATURE = 1e-6  # below, drawing gives the likeliest token, and logits / it may overflow


@dataclass(frozen=True)
class Candidate:
    """One text that the search found for a clip: its tokens, without the prompt and the end."""

    tokens: list[int]  # first those that were given
    sum_logprob: float  # of the tokens that were found, and of the end token if it came
    ended: bool  # whether the end token came


@dataclass
class Clip:
    """One clip's texts in the making. All of them are equally long."""

    texts: list[list[int]] = field(default_factory=lambda: [[]])
    sums: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Candidate] = field(default_factory=list)
    done: bool = False


class Strategy(Protocol):
    """How the next tokens are chosen."""

    def choose(self, clips: Sequence[Clip], logits: Tensor) -> list[list[int]]:
        """Extend each clip's texts by a token, from filtered logits (all their texts, n_vocab).

        Returns, clip by clip, for each text that goes on the index of the text it was made from.
        A clip that is done stays as it is.
        """
        ...

    def candidates(self, clip: Clip) -> list[Candidate]:
        """What the clip ends with, once it is done or out of room."""
        ...


@dataclass(frozen=True)
class Greedy:
    """The likeliest token, or with a temperature a drawn one, for n independent texts."""

    eot: int
    temperature: float = 0.0
    n_texts: int = 1

    def choose(self, clips: Sequence[Clip], logits: Tensor) -> list[list[int]]:
        sources = [list(range(len(clip.texts))) for clip in clips]
        if len(clips[0].texts) < self.n_texts:  # the first step: all texts begin alike
            sources = [[0] * self.n_texts for _ in clips]
            for clip in clips:
                clip.texts = [list(clip.texts[0]) for _ in range(self.n_texts)]
                clip.sums = [0.0] * self.n_texts
            logits = logits.repeat_interleave(self.n_texts, dim=0)
        if self.temperature < LEAST_TEMPERATURE:
            picked, chosen = logits.max(dim=-1)
        else:
            # drawn for ended texts too: so the random numbers are used up as upstream does
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

    def candidates(self, clip: Clip) -> list[Candidate]:
        found = []
        for text, total in zip(clip.texts, clip.sums, strict=True):
            ended = self.eot in text
            tokens = text[: text.index(self.eot)] if ended else text
            found.append(Candidate(tokens, total, ended))
        return found


@dataclass(frozen=True)
class Beam:
    """The n best texts at each step; done when n · patience of them have ended."""

    eot: int
    beam_size: int
    patience: float = 1.0

    @property
    def n_finished(self) -> int:
        return round(self.beam_size * self.patience)

    def choose(self, clips: Sequence[Clip], logits: Tensor) -> list[list[int]]:
        parts = logits.split([len(clip.texts) for clip in clips])
        return [
            list(range(len(clip.texts))) if clip.done else self._choose(clip, part)
            for clip, part in zip(clips, parts, strict=True)
        ]

    def _choose(self, clip: Clip, logits: Tensor) -> list[int]:
        logprobs, tokens = logits.log_softmax(dim=-1).topk(self.beam_size + 1)
        sums = torch.tensor(clip.sums, device=logits.device)  # float32, as upstream adds them
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

    def candidates(self, clip: Clip) -> list[Candidate]:
        found = list(clip.finished)
        best_first = sorted(range(len(clip.texts)), key=lambda i: clip.sums[i], reverse=True)
        for i in best_first:
            if len(found) >= self.beam_size:
                break
            found.append(Candidate(clip.texts[i], clip.sums[i], ended=False))
        return found


@dataclass(frozen=True)
class Found:
    """What `search` gives back for one clip."""

    candidates: list[Candidate]
    probability: float  # of the token asked for at the position asked for, before any rule


@torch.inference_mode()
def search(
    model: Whisper,
    memory: Memory,
    prompts: Tensor,
    strategy: Strategy,
    filters: Sequence[Filter],
    *,
    n_given: int = 0,
    n_most: int,
    probe: tuple[int, int],
) -> list[Found]:
    """Candidate texts for each clip of the memory.

    prompts: (clips, P) tokens that the decoder is told at first
    n_given: how many of their last are the beginning of the text
    n_most:  how many tokens are found at most
    probe:   position in the prompt, and the token (no speech) whose probability is read there
    """
    decoder = model.decoder
    n_prompt = prompts.shape[1]
    n_most = min(n_most, decoder.n_ctx - n_prompt + 1)
    capacity = n_prompt + min(n_most, USUAL_TOKENS)
    x, cache = decoder(prompts, memory, decoder.cache(memory.n_clips, capacity))
    position, token = probe
    logits = decoder.logits(x[:, position])
    probabilities = logits.softmax(dim=-1)[:, token].tolist()
    if position < n_prompt - 1:
        logits = decoder.logits(x[:, -1])
    given = prompts[:, n_prompt - n_given :].tolist()
    clips = [Clip(texts=[text]) for text in given]
    going = list(clips)
    for step in range(n_most):
        texts = [text for clip in going for text in clip.texts]
        for rule in filters:
            rule(logits, texts)
        sources = strategy.choose(going, logits)
        if all(clip.done for clip in going) or step == n_most - 1:
            break
        keep = [i for i, clip in enumerate(going) if not clip.done]
        n_before = len(texts) // len(going)  # each clip has as many texts as the others
        rows = [i * n_before + source for i in keep for source in sources[i]]
        if rows != list(range(len(texts))):
            cache = cache.select(torch.tensor(rows, device=prompts.device))
        if len(keep) < len(going):
            memory = memory.select(keep)
            going = [going[i] for i in keep]
        last = [text[-1] for clip in going for text in clip.texts]
        x, cache = decoder(torch.tensor(last, device=prompts.device)[:, None], memory, cache)
        logits = decoder.logits(x[:, 0])
    several = zip(clips, probabilities, strict=True)
    return [Found(strategy.candidates(clip), probability) for clip, probability in several]
