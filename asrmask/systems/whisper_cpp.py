"""whisper.cpp through pywhispercpp, with float16 weights or its own quantised formats."""

from pathlib import Path
from typing import Any

from asrmask.systems import DecodingSettings, System, SystemTranscript, TimedText

GREEDY, BEAM = 0, 1  # pywhispercpp's strategies


class WhisperCpp(System):
    def __init__(self, options: dict[str, str], weights: str, threads: int, model_dir: str | None):
        self.weights, self.threads = weights, threads
        self.models: dict[int, Any] = {}

    def model(self, strategy: int) -> Any:
        """Return a model for a search strategy, which is fixed when a model is created."""
        from pywhispercpp.model import Model

        if strategy not in self.models:
            self.models[strategy] = Model(
                self.weights,
                params_sampling_strategy=strategy,
                n_threads=self.threads,
                print_progress=False,
            )
        return self.models[strategy]

    def transcribe(self, path: Path, decoding: DecodingSettings) -> SystemTranscript:
        from pywhispercpp.utils import redirect_stderr

        strategy, options = GREEDY, {}
        if decoding.beam_size is not None:
            strategy = BEAM
            options = {"beam_search": {"beam_size": decoding.beam_size, "patience": -1.0}}
        samples = self.load_audio(path)
        with redirect_stderr(to=None):  # discards what the C library prints
            segments = self.model(strategy).transcribe(
                samples,
                language=decoding.language or "auto",
                translate=decoding.task == "translate",
                **options,
            )
        # times are in hundredths of a second
        found = [TimedText(s.t0 / 100, s.t1 / 100, s.text) for s in segments]
        return SystemTranscript(" ".join(s.text for s in found), found, None, decoding.language)
