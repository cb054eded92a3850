"""Measure other live systems: `PYTHON -m asrmask.live.peers`, with their packages.

The job is JSON on standard input, as for live_worker.py. Runs in an environment without asrmask's
packages: it needs NumPy and the system that the job names.
"""

import json
import logging
import sys
from importlib.metadata import version
from typing import Any

import numpy as np

from asrmask.live.replay import RATE, Shown, replay_all


class WhisperStreaming:
    """whisper-streaming with faster-whisper int8: LocalAgreement-2, its audio trimmed to 15 s."""

    package = "whisper-streaming"

    def __init__(self, job: dict[str, Any], model: Any = None):
        sys.modules.setdefault("alsaaudio", type(sys)("alsaaudio"))  # its receivers are not used
        sys.modules.setdefault("websockets", type(sys)("websockets"))
        from whisper_streaming import processor
        from whisper_streaming.backend import faster_whisper_backend as backend
        from whisper_streaming.base import Backend

        one = processor.ASRProcessor
        config = one.ProcessorConfig(
            sampling_rate=RATE,
            prompt_size=100,
            audio_receiver_timeout=1.0,
            audio_trimming=processor.TimeTrimming(15),
            language="en",
        )
        weights = backend.FasterWhisperModelConfig(
            job["weights"], device="cpu", compute_type="int8", cpu_threads=job["threads"]
        )
        if model is not None:  # loaded once for all files
            backend.FasterWhisperASR._load_model = lambda *_: model
        search = backend.FasterWhisperTranscribeConfig(beam_size=job.get("beam_size", 1))
        features = backend.FasterWhisperFeatureExtractorConfig()
        self.one = one(config, None, [], Backend.FASTER_WHISPER, weights, search, features)

    def push(self, samples: np.ndarray, late: bool) -> list[Shown]:
        committed = self.one._process(samples)
        shown = [] if committed is None else [("committed", committed.word)]
        return [*shown, ("partial", self._limbo())]

    def finish(self) -> list[Shown]:
        return [("committed", self._limbo())]  # it has no endpoints

    def _limbo(self) -> str:
        words = self.one._transcription_buffer.transcriptions_in_limbo
        return "".join(word.word for word in words)


class Moonshine:
    """moonshine-voice with the English model in its package. A line is final when it ends."""

    package = "moonshine-voice"

    def __init__(self, job: dict[str, Any], model: Any = None):
        import moonshine_voice as moonshine

        if model is None:
            path = moonshine.get_model_path("tiny-en")
            arch = moonshine.ModelArch.TINY
            model = moonshine.Transcriber(str(path), arch, update_interval=job["step"])
        self.model = model
        self.stream = model.create_stream(update_interval=job["step"])
        self.shown: list[Shown] = []
        self.stream.add_listener(self._hear)
        self.stream.start()

    def _hear(self, event: Any) -> None:
        name = type(event).__name__
        if name == "LineCompleted":
            self.shown += [("committed", " " + event.line.text), ("endpoint", "")]
        elif name in {"LineStarted", "LineTextChanged"}:
            self.shown.append(("partial", event.line.text))

    def push(self, samples: np.ndarray, late: bool) -> list[Shown]:
        self.stream.add_audio(samples.tolist(), RATE)
        return self._take()

    def finish(self) -> list[Shown]:
        self.stream.stop()
        return self._take()

    def _take(self) -> list[Shown]:
        shown, self.shown = self.shown, []
        return shown


SYSTEMS: dict[str, Any] = {"whisper-streaming": WhisperStreaming, "moonshine": Moonshine}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Replay each file.

    job: system, weights (of CTranslate2), threads, step, files
    """
    logging.disable()
    system = SYSTEMS[job["system"]]
    first = system(job)
    model = first.one.backend.model if job["system"] == "whisper-streaming" else first.model
    piece_s = job["step"] if job["system"] == "whisper-streaming" else 0.1
    files = replay_all(job["files"], lambda: system(job, model), piece_s, job["step"])
    return {"files": files, "package": f"{system.package} {version(system.package)}"}


if __name__ == "__main__":
    try:
        result = measure(json.load(sys.stdin))
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    print()
    print(json.dumps(result), flush=True)
