"""What a model is trained towards: transcripts, and what the model itself gives with full padding.

The padded model's output for an example is computed once and kept in a folder, which several runs
may share. Examples are computed one by one, so that the numbers do not depend on batches.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Spectrogram
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import decode_encoded
from asrmask.errors import OptionError
from asrmask.evaluation.corpus import as_written
from asrmask.files import atomic_write
from asrmask.model.cross_attention import CrossAttentionCache
from asrmask.model.encoding import FULL, encode
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.tokenizer.tokenizer import Tokenizer, get_tokenizer
from asrmask.training.examples import Example, rng
from asrmask.training.spec import TrainSpec

VERSION = 1  # part of the file names: change it when the content changes
N_LIKELIEST = 64  # tokens whose probabilities are kept; the others count as one
STORED = ("tokens", "n_prompt", "features", "likeliest", "logprobs")


@dataclass(frozen=True)
class Target:
    """What the model is trained towards, for one example.

    tokens:    (N,) prompt, text and end token
    n_prompt:  how many of them are the prompt
    features:  (T, D) of the padded model, at the audio's own positions; T = 0: not needed
    likeliest: (N − n_prompt, 64) the padded model's likeliest tokens at each token of the text
    logprobs:  likewise, their log-probabilities
    """

    tokens: Tensor
    n_prompt: int
    features: Tensor
    likeliest: Tensor
    logprobs: Tensor

    @property
    def n_text(self) -> int:
        """Tokens that are predicted: the text and its end."""
        return len(self.tokens) - self.n_prompt


class Teacher:
    """The model before training, with full padding."""

    def __init__(self, model: Whisper, sha256: str, spec: TrainSpec, folder: Path):
        """sha256: of the model's weights; folder: where targets are kept"""
        self.model, self.sha256, self.spec, self.folder = model, sha256, spec, folder

    def target(self, example: Example, samples: np.ndarray) -> Target:
        """The target of an example with those samples: read from its file, or computed."""
        is_timed = rng("timestamps", example.clip.id).random() < self.spec.timestamps
        transcript = self._transcript(example)
        if transcript is not None and not self.spec.losses.is_distilling:
            return Target(*self._tokens_of(transcript, example), *self._nothing())
        about = (VERSION, self.sha256, example.clip.language, is_timed, transcript)
        digest = hashlib.sha256(repr(about).encode() + samples.tobytes())
        path = self.folder / f"{digest.hexdigest()[:32]}.safetensors"
        if (target := _read(path)) is not None:
            return target
        made = self._computed(example, samples, is_timed, transcript)
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {name: torch.as_tensor(getattr(made, name)) for name in STORED}
        content = safetensors.torch.save(values)
        with atomic_write(path, binary=True) as file:
            file.write(content)
        return _target(safetensors.torch.load(content))  # not inference tensors, unlike `made`

    def _transcript(self, example: Example) -> str | None:
        """The text to train on, if it is known; without it, the padded model's own is taken."""
        is_wanted = self.spec.losses.text > 0 and not example.is_cut
        return as_written(example.clip.text) if is_wanted and example.clip.text else None

    def _tokenizer(self, example: Example) -> Tokenizer:
        return get_tokenizer(
            self.model.is_multilingual,
            num_languages=self.model.num_languages,
            language=example.clip.language,
            task="transcribe",
        )

    def _tokens_of(self, text: str, example: Example) -> tuple[Tensor, int]:
        tokenizer = self._tokenizer(example)
        prompt = [*tokenizer.sot_sequence, tokenizer.no_timestamps]
        tokens = [*prompt, *tokenizer.encode(" " + text), tokenizer.eot]
        most = self.model.dims.n_text_ctx + 1
        if len(tokens) > most:
            raise OptionError(
                f"{example.clip.id}: a transcript must be up to {most - len(prompt) - 1} tokens, "
                f"got {len(tokens) - len(prompt) - 1}"
            )
        return torch.tensor(tokens), len(prompt)

    def _nothing(self) -> tuple[Tensor, Tensor, Tensor]:
        width = self.model.dims.n_audio_state
        none = torch.empty(0, N_LIKELIEST)
        return torch.empty(0, width).half(), none.int(), none

    @torch.inference_mode()
    def _computed(
        self, example: Example, samples: np.ndarray, is_timed: bool, transcript: str | None
    ) -> Target:
        spectrogram = Spectrogram(Recording.of(samples), self.model.dims.n_mels)
        window = spectrogram.window(0, spectrogram.n_frames, fill=FULL.fill)
        encoded = encode(self.model, [window], Policy())
        if transcript is None:
            tokens, n_prompt = self._written(example, encoded, is_timed)
        else:
            tokens, n_prompt = self._tokens_of(transcript, example)
        row = tokens[None, : max(len(tokens) - 1, n_prompt)].to(self.model.device)
        x, _ = self.model.decoder(row, encoded, self.model.decoder.cache(*row.shape))
        n_text = len(tokens) - n_prompt
        own_x = x[0, n_prompt - 1 :][:n_text]
        steps = self.model.decoder.logits(own_x).log_softmax(dim=-1)
        logprobs, likeliest = steps.topk(N_LIKELIEST)
        own = encoded.features[0, : window.n_positions]
        return Target(tokens, n_prompt, own.half().cpu(), likeliest.int().cpu(), logprobs.cpu())

    def _written(
        self, example: Example, encoded: CrossAttentionCache, is_timed: bool
    ) -> tuple[Tensor, int]:
        """What the padded model writes, as tokens; no text if it does not end."""
        tokenizer = self._tokenizer(example)
        language = example.clip.language if self.model.is_multilingual else None
        options = DecodingOptions(language=language, without_timestamps=not is_timed)
        (result,) = decode_encoded(self.model, encoded, options)
        prompt = list(tokenizer.sot_sequence)
        prompt += [] if is_timed else [tokenizer.no_timestamps]
        text = [*result.tokens, tokenizer.eot] if result.ended else []
        return torch.tensor([*prompt, *text]), len(prompt)


def _read(path: Path) -> Target | None:
    """The target in a file. None: there is none, or it is damaged."""
    try:
        return _target(safetensors.torch.load_file(path))
    except (OSError, KeyError, safetensors.SafetensorError):
        return None


def _target(stored: Mapping[str, Tensor]) -> Target:
    tokens, n_prompt, *rest = (stored[name] for name in STORED)
    return Target(tokens, int(n_prompt), *rest)
