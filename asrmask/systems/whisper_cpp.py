"""whisper.cpp through pywhispercpp, with float16 weights or its own quantised formats."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asrmask.systems import DecodingSettings, Piece, System, SystemTranscript

GREEDY, BEAM = 0, 1  # pywhispercpp's strategies


def load(options: Mapping[str, str], weights: str, threads: int, model_dir: str | None) -> System:
    return WhisperCpp(weights, threads)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While active, discard standard error, including what the C library writes."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class WhisperCpp(System):
    def __init__(self, weights: str, threads: int):
        super().__init__()
        self.weights, self.threads = weights, threads
        self.models: dict[int, Any] = {}

    def model(self, strategy: int) -> Any:
        """Return a model for a search strategy, which is fixed when a model is created."""
        from pywhispercpp.model import Model

        if strategy not in self.models:
            with quiet():
                self.models[strategy] = Model(
                    self.weights,
                    params_sampling_strategy=strategy,
                    n_threads=self.threads,
                    print_progress=False,
                )
        return self.models[strategy]

    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        model, choices = self.model(GREEDY), {}
        if decoding.beam_size is not None:
            choices = {"beam_search": {"beam_size": decoding.beam_size, "patience": -1.0}}
            model = self.model(BEAM)
        samples = self.load_audio(path)
        with quiet():
            found = model.transcribe(
                samples,
                language=decoding.language or "auto",
                translate=decoding.task == "translate",
                **choices,
            )
        # times are in hundredths of a second
        pieces = [Piece(s.t0 / 100, s.t1 / 100, s.text) for s in found]
        return SystemTranscript(
            " ".join(piece.text for piece in pieces), pieces, None, decoding.language
        )
