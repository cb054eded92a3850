"""Measure live transcription in a separate process: `python -m asrmask.benchmark.live_worker`.

The job is JSON on standard input; its `kind` is a function here. The result is the last line of
standard output.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from asrmask.audio.constants import N_SAMPLES
from asrmask.audio.recording import Recording
from asrmask.audio.spectrogram import Features, Spectrogram
from asrmask.benchmark.worker import own_mb, peak_mb, run_job
from asrmask.checkpoints import load_model
from asrmask.decoding.options import DecodingOptions
from asrmask.decoding.quality import runaway_reason
from asrmask.decoding.task import decode_encoded, tokenizer_of
from asrmask.live import LiveTranscriber, push_all
from asrmask.live.events import Event
from asrmask.live.replay import RATE, Shown, read_wav, replay_all
from asrmask.malloc import keep_freed_memory
from asrmask.model.encoding import encode
from asrmask.model.policy import Policy
from asrmask.model.whisper import Whisper
from asrmask.transcription.word_timing import align

PIECE_S = 0.1  # of audio in a push: a block of a microphone
REPEATS = 3
STREAMED_S = 30  # of audio of each of several streams
NEW_TOKENS = 3  # that an update decodes after the prefix
TEXT = DecodingOptions(language="en", without_timestamps=True)


class Ours:
    """asrmask, for `replay`."""

    def __init__(self, model: Whisper, options: dict[str, Any]):
        self.live = LiveTranscriber(model, **options)

    def push(self, samples: np.ndarray, late: bool) -> list[Shown]:
        return list(map(shown, self.live.push(samples, late=late)))

    def finish(self) -> list[Shown]:
        return list(map(shown, self.live.finish()))


def shown(event: Event) -> Shown:
    return event.kind, event.to_dict().get("text", "")


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Load the model and run the job.

    job: kind, weights, model_dir, threads, files, and what the function takes
    """
    keep_freed_memory()
    load: dict[str, Any] = {"device": "cpu", "cpu_threads": job["threads"]}
    load |= {"download_root": job["model_dir"], "compute_type": job.get("compute_type", "int8")}
    model = load_model(job["weights"], **load)
    result: dict[str, Any] = KINDS[job["kind"]](model, job)
    return {**result, "peak_mb": peak_mb(), "own_mb": own_mb()}


def live(model: Whisper, job: dict[str, Any]) -> dict[str, Any]:
    """Replay each file with options of LiveTranscriber."""
    options, step = job["options"], job["options"].get("step", 0.3)
    return {"files": replay_all(job["files"], lambda: Ours(model, options), PIECE_S, step)}


def offline(model: Whisper, job: dict[str, Any]) -> dict[str, Any]:
    """Transcribe each file whole with the preset fast."""
    texts = [model.transcribe(path, preset="fast").text for path in job["files"]]  # type: ignore
    return {"texts": texts}


def words(model: Whisper, job: dict[str, Any]) -> dict[str, Any]:
    """Return each word of each file and its end, by the exact model."""
    found = []
    for path in job["files"]:
        result = model.transcribe(path, word_timestamps=True, temperature=0.0)  # type: ignore[operator]
        found.append([[w.word, w.end] for s in result.segments for w in s.words or []])
    return {"words": found}


def streams(model: Whisper, job: dict[str, Any]) -> dict[str, Any]:
    """Push the first file to several streams in one process, each from another place on."""
    samples = read_wav(job["files"][0])[: STREAMED_S * RATE]
    rows = []
    for n in job["counts"]:
        several = [np.roll(samples, i * len(samples) // n) for i in range(n)]
        transcribers = [LiveTranscriber(model) for _ in range(n)]
        size, clock, lags, position, n_late = round(PIECE_S * RATE), 0.0, [], 0, 0
        while position < len(samples):
            clock = max(clock, (position + size) / RATE)
            end = max(position + size, int(clock * RATE))
            late = end - position > 0.4 * RATE
            start = time.perf_counter()
            push_all(transcribers, [one[position:end] for one in several], late=late)
            clock += time.perf_counter() - start
            position = end
            n_late += late
            lags.append(clock - min(end, len(samples)) / RATE)
        rows.append({"streams": n, "lag_p95": float(np.percentile(lags, 95)), "late": n_late})
    return {"streams": rows}


def updates(model: Whisper, job: dict[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of an update against the seconds of its audio, for each padding."""
    samples = read_wav(job["files"][0])
    tokenizer = tokenizer_of(model, TEXT)
    rows = []
    for seconds in job["lengths"]:
        window = window_of(model, samples[: round(seconds * RATE)])
        for padding in ("virtual", "full"):
            policy = Policy.parse(padding)
            (result,) = decode_encoded(model, encode(model, [window], policy), TEXT)
            prefix = result.tokens[:-NEW_TOKENS] or None
            times = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                encoded = encode(model, [window], policy)
                options = DecodingOptions(language="en", without_timestamps=True, prefix=prefix)
                (result,) = decode_encoded(model, encoded, options)
                align(model, tokenizer, result.tokens, encoded, window.n_frames)
                times.append(1000 * (time.perf_counter() - start))
            row = {"seconds": seconds, "padding": padding, "ms": statistics.median(times)}
            rows.append(row)
    return {"updates": rows}


def cuts(model: Whisper, job: dict[str, Any]) -> dict[str, Any]:
    """Cut clips in the middle of words; compare texts under virtual and full padding."""
    rows = []
    for path in job["clips"]:
        recording = Recording.open(Path(path))
        samples = recording.read(0, min(recording.n_samples, N_SAMPLES))
        for share in (0.4, 0.7):
            window = window_of(model, samples[: int(share * len(samples))])
            results = [
                decode_encoded(model, encode(model, [window], Policy.parse(padding)), TEXT)[0]
                for padding in ("virtual", "full")
            ]
            reasons = [runaway_reason(r, window.n_positions, min_logprob=None) for r in results]
            rows.append({"texts": [r.text for r in results], "runaways": reasons})
    return {"cuts": rows}


def window_of(model: Whisper, samples: np.ndarray) -> Features:
    """Return all of a short recording as one window."""
    spectrogram = Spectrogram(Recording.of(samples), model.dims.n_mels)
    return spectrogram.window(0, spectrogram.n_frames, fill="zero")


KINDS = {f.__name__: f for f in (live, offline, words, streams, updates, cuts)}

if __name__ == "__main__":
    run_job(measure)
