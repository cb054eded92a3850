"""openai-whisper itself, with the same weights: the only place that imports its code.

`compare` runs one clip through both and says by how much each stage differs, and where their
tokens part.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrmask.audio import N_FRAMES, N_SAMPLES, Recording, Spectrogram
from asrmask.decoding import DecodingOptions, DecodingResult, decode_memory
from asrmask.model import Whisper
from asrmask.tokenizer import get_tokenizer


@cache
def whisper() -> Any:
    """The module openai-whisper."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that it imports
        import whisper
        import whisper.normalizers
    return whisper


def twin(model: Whisper) -> Any:
    """openai-whisper's model with the very weights of `model`."""
    module = whisper().model
    other = module.Whisper(module.ModelDimensions(**model.dims.as_dict()))
    other.load_state_dict(model.state_dict(), assign=True)
    heads = torch.zeros(model.dims.n_text_layer, model.dims.n_text_head, dtype=torch.bool)
    for layer, head in model.alignment_heads:
        heads[layer, head] = True
    other.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)
    return other.to(model.device).eval()


@cache
def normalizer(language: str = "en") -> Callable[[str], str]:
    """Whisper's own text normaliser for scoring: English, or the basic one."""
    module = whisper().normalizers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves a file open
        return module.EnglishTextNormalizer() if language == "en" else module.BasicTextNormalizer()


@dataclass(frozen=True)
class Parting:
    """The first step at which two token sequences differ, and how near the choice was."""

    step: int
    ours: int | None  # token; None: the sequence has ended
    theirs: int | None
    gap: float  # how much better upstream's logits are for its own choice


@dataclass(frozen=True)
class Comparison:
    """One clip through both, in one decoding mode."""

    mode: str
    ours: DecodingResult
    theirs: Any
    parting: Parting | None  # None: the same tokens

    @property
    def is_same(self) -> bool:
        return self.parting is None


@dataclass(frozen=True)
class Stages:
    """The largest differences of one clip, stage by stage."""

    log_mel: float
    encoder: float
    logits: float


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"without_timestamps": True},
    "greedy, times": {},
    "beam 5": {"beam_size": 5, "without_timestamps": True},
    "beam 5, times": {"beam_size": 5},
}


@torch.inference_mode()
def compare(
    model: Whisper, other: Any, samples: np.ndarray, modes: dict[str, dict[str, Any]] = MODES
) -> tuple[Stages, list[Comparison]]:
    """The first window of a clip through both models: stages, then tokens in each mode."""
    spectrogram = Spectrogram(Recording.of(samples), model.dims.n_mels)
    n_frames = min(spectrogram.n_frames, N_FRAMES)
    mel = spectrogram.window(0, n_frames, fill="zero").mel
    whole = whisper().log_mel_spectrogram(samples, model.dims.n_mels, padding=N_SAMPLES)
    their_mel = whisper().pad_or_trim(whole[:, :n_frames], N_FRAMES)

    features = model.encode(mel[None])
    their_features = other.encoder(their_mel[None])
    memory = model.decoder.remember(features)
    comparisons = []
    for mode, choices in modes.items():
        (ours,) = decode_memory(model, memory, DecodingOptions(language="en", **choices))
        options = whisper().DecodingOptions(language="en", fp16=False, **choices)
        theirs = whisper().decode(other, their_features[0].clone(), options)
        parting = _parting(model, other, their_features, ours.tokens, theirs.tokens, choices)
        comparisons.append(Comparison(mode, ours, theirs, parting))

    tokens = _forced(model, comparisons[0].theirs.tokens, choices={"without_timestamps": True})
    difference = model.logits(tokens, features) - other.logits(tokens, their_features)
    return (
        Stages(
            log_mel=float((mel - their_mel).abs().max()),
            encoder=float((features - their_features).abs().max()),
            logits=float(difference.abs().max()),
        ),
        comparisons,
    )


def _forced(model: Whisper, tokens: list[int], choices: dict[str, Any]) -> Tensor:
    """(1, Q): the opening of a transcript and its tokens."""
    tokenizer = get_tokenizer(model.is_multilingual, num_languages=model.num_languages)
    opening = list(tokenizer.sot_sequence)
    if choices.get("without_timestamps"):
        opening.append(tokenizer.no_timestamps)
    return torch.tensor([[*opening, *tokens]], device=model.device)


def _parting(
    model: Whisper,
    other: Any,
    features: Tensor,
    ours: list[int],
    theirs: list[int],
    choices: dict[str, Any],
) -> Parting | None:
    if ours == theirs:
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    step = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    our = ours[step] if step < len(ours) else None
    their = theirs[step] if step < len(theirs) else None
    if "beam_size" in choices:  # a beam chooses between whole texts
        gap = _mean_logprob(model, other, features, theirs, choices)
        gap -= _mean_logprob(model, other, features, ours, choices)
    else:
        logits = other.logits(_forced(model, theirs[:step], choices), features)[0, -1]
        eot = get_tokenizer(model.is_multilingual, num_languages=model.num_languages).eot
        gap = float(logits[eot if their is None else their] - logits[eot if our is None else our])
    return Parting(step, our, their, gap)


def _mean_logprob(
    model: Whisper, other: Any, features: Tensor, tokens: list[int], choices: dict[str, Any]
) -> float:
    eot = get_tokenizer(model.is_multilingual, num_languages=model.num_languages).eot
    forced = _forced(model, [*tokens, eot], choices)
    n_opening = forced.shape[1] - len(tokens) - 1
    logprobs = other.logits(forced, features)[0].log_softmax(dim=-1)
    picked = logprobs[n_opening - 1 : -1].gather(1, forced[0, n_opening:, None])
    return float(picked.sum()) / max(len(tokens), 1)
