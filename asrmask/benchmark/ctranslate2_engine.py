"""The parts of a model in CTranslate2, for parts.py."""

from functools import partial
from typing import Any

import ctranslate2
import numpy as np

from asrmask.benchmark.parts import Engine, noise_window


class CTranslate2Engine(Engine):
    """A model in CTranslate2, without faster-whisper."""

    def __init__(self, weights: str, compute_type: str, threads: int, model_dir: str | None):
        options: dict[str, Any] = {"compute_type": compute_type, "intra_threads": threads}
        self.model = ctranslate2.models.Whisper(weights, device="cpu", **options)
        self.n_mels, self.is_multilingual = self.model.n_mels, self.model.is_multilingual
        self.num_languages = self.model.num_languages
        self._to_storage = ctranslate2.StorageView.from_array
        window = self._to_storage(noise_window(self.n_mels, 30.0)[None])
        self.encode, self.encode_virtual = partial(self.model.encode, window), {}
        self.width = self.encode().shape[-1]

    def load_features(self, features: np.ndarray) -> Any:
        return self._to_storage(features)

    def decode(self, features: Any, n_tokens: int) -> list[int]:
        prompt = self.prompt
        # for a text half of this, or what the prompt leaves of it (without its last token)
        longest = max(2 * n_tokens, n_tokens + len(prompt) - 1)
        options: dict[str, Any] = {"beam_size": 1, "suppress_tokens": self.suppressed}
        options |= {"max_length": longest}
        results = self.model.generate(features, [prompt] * features.shape[0], **options)
        return [len(result.sequences_ids[0]) for result in results]
