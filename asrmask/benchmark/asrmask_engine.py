"""The parts of asrmask's own models, for parts.py and limits.py."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from asrmask.audio.constants import POSITIONS_PER_SECOND
from asrmask.benchmark.parts import Engine, noise_window
from asrmask.checkpoints import load_model
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.task import decode_encoded
from asrmask.malloc import keep_freed_memory
from asrmask.model.encoding import Plan, plan
from asrmask.model.policy import Policy
from asrmask.model.virtual_padding import VirtualPadding, bank_of

VIRTUAL_S = (15.0, 7.5, 0.5)  # clips that are encoded with virtual padding


class AsrmaskEngine(Engine):
    def __init__(self, weights: str, compute_type: str, threads: int, model_dir: str | None):
        keep_freed_memory()  # as the command line does
        self.model = load_model(
            weights, "cpu", model_dir, compute_type=compute_type, cpu_threads=threads
        )
        self.dims = self.model.dims
        self.n_mels, self.width = self.dims.n_mels, self.dims.n_audio_state
        self.is_multilingual = self.dims.is_multilingual
        self.num_languages = self.dims.num_languages
        self.encode = partial(self._encode, self._mel(30.0), Plan())
        self.encode_virtual = {
            part: partial(self._encode, self._mel(seconds), planned)
            for part, (seconds, planned) in virtual_plans().items()
        }

    def _mel(self, seconds: float) -> Tensor:
        return torch.from_numpy(noise_window(self.n_mels, seconds))[None]

    @torch.inference_mode()
    def _encode(self, mel: Tensor, planned: Plan) -> None:
        virtual = planned.virtual
        padding = None if virtual is None else VirtualPadding(bank_of(self.model), virtual)
        self.model.encoder(mel, positions=planned.positions, padding=padding)

    def load_features(self, features: np.ndarray) -> Tensor:
        return torch.from_numpy(features)

    @torch.inference_mode()
    def decode(self, features: Tensor, n_tokens: int) -> list[int]:
        encoded = self.model.decoder.cross_attention_cache(features)
        options = DecodingOptions(
            language="en",
            without_timestamps=True,
            suppress_tokens=self.suppressed,
            sample_len=n_tokens,
        )
        return [len(result.tokens) for result in decode_encoded(self.model, encoded, options)]


def virtual_plans() -> dict[str, tuple[float, Plan]]:
    """Return the seconds of audio and the plan of each part with virtual padding."""
    virtual = Policy("virtual")
    plans = {}
    for seconds in VIRTUAL_S:
        visible = virtual.visible(int(POSITIONS_PER_SECOND * seconds))
        plans[f"encoder, {seconds:g} s, virtual padding"] = (seconds, plan(virtual, [visible]))
    return plans
