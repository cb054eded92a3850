"""Run the benchmark of live transcription; results go to live.json.

Every measurement is a process of its own: asrmask (live_worker.py), or another system in an
environment that has its packages (peers.py). All get the same recordings, and the same weights
where they take them.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from asrmask import __version__
from asrmask.audio.constants import SAMPLE_RATE
from asrmask.audio.recording import as_wav
from asrmask.benchmark.live_summary import score
from asrmask.benchmark.run import ClipSet, model_name, processor, run_module
from asrmask.console import say
from asrmask.errors import AsrmaskError
from asrmask.evaluation.corpus import Clip
from asrmask.evaluation.score import errors
from asrmask.files import atomic_write
from asrmask.live import peers
from asrmask.systems import Named, prepare
from asrmask.systems.upstream import normalizer

SHORT_S = 30.0  # clips that are shorter on average are joined
JOINED_S = 150.0  # of clips in a joined recording, at least
PAUSES_S = (0.3, 3.0)  # between joined clips
STEPS_S = (0.2, 0.3, 0.5, 1.0, 2.0)
LENGTHS_S = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 28.0)
STREAMS = (1, 6)
POLICIES = ("attention",)  # beside the default one
NAMES = ("model", "work", "system", "options", "streams", "padding", "seconds")  # of an entry
PEER_STEP_S = 1.0  # of other systems, for which a second is usual


@dataclass(frozen=True)
class LiveSpec:
    """What to measure.

    peers: program of Python in an environment with the packages of other systems; None: no others
    """

    models: list[str]
    clip_sets: list[ClipSet]
    threads: int
    command: str
    step: float = 0.3
    peers: str | None = None
    model_dir: str | None = None


@dataclass(frozen=True)
class Talk:
    """A recording to replay."""

    name: str
    path: str
    text: str


def talks_of(clip_set: ClipSet, folder: Path) -> list[Talk]:
    """Write a set's recordings as WAV files; short clips are joined with pauses."""
    sounds = [clip.recording() for clip in clip_set.clips]
    mean_s = sum(sound.duration_s for sound in sounds) / len(sounds)
    if mean_s >= SHORT_S:
        groups = [[clip] for clip in clip_set.clips]
    else:
        groups = group_clips(clip_set.clips, [sound.duration_s for sound in sounds])
    rng = np.random.default_rng(0)
    talks = []
    for i, group in enumerate(groups):
        parts = []
        for clip in group:
            sound = clip.recording()
            if len(group) > 1:
                parts.append(np.zeros(round(rng.uniform(*PAUSES_S) * SAMPLE_RATE), np.float32))
            parts.append(sound.read(0, sound.n_samples))
        path = folder / f"{clip_set.name}-{i}.wav"
        path.write_bytes(as_wav(np.concatenate(parts)))
        talks.append(Talk(path.stem, str(path), " ".join(clip.text or "" for clip in group)))
    return talks


def group_clips(clips: Sequence[Clip], seconds: Sequence[float]) -> list[list[Clip]]:
    """Group clips in order, each group of at least JOINED_S; the last may be shorter."""
    groups: list[list[Clip]] = [[]]
    total_s = 0.0
    for clip, length_s in zip(clips, seconds, strict=True):
        if total_s >= JOINED_S:
            groups.append([])
            total_s = 0.0
        groups[-1].append(clip)
        total_s += length_s
    return groups


def run(spec: LiveSpec, out: Path) -> dict[str, Any]:
    """Run all measurements; `out`/live.json is saved after each one."""
    result: dict[str, Any] = {"about": describe(spec), "runs": [], "offline": []}
    result |= {"streams": [], "updates": [], "cuts": []}
    with tempfile.TemporaryDirectory(prefix="asrmask-") as folder:
        runner = LiveRunner(spec, Path(folder))

        def add(kind: str, entry: dict[str, Any]) -> None:
            result[kind].append(entry)
            named = [str(entry[name]) for name in NAMES if name in entry]
            say(f"{kind}: {', '.join(named)}{': ' * ('error' in entry)}{entry.get('error', '')}")
            save(result, out)

        for model in spec.models:
            for kind, entry in runner.measurements(model):
                add(kind, entry)
    return result


Measured = Iterator[tuple[str, dict[str, Any]]]


class LiveRunner:
    """Runs the measurements, each in a process of its own."""

    def __init__(self, spec: LiveSpec, folder: Path):
        """folder: for recordings, and for weights in other formats"""
        self.spec, self.folder = spec, folder
        self.talks = {one.name: talks_of(one, folder) for one in spec.clip_sets}
        self.words: dict[tuple[str, str], list[Any]] = {}  # (model, set) → words with their ends

    def measurements(self, model: str) -> Measured:
        """Yield everything that is measured of a model, with its place in the results.

        Other systems, and steps for the first model, are measured on the first set.
        """
        first, *others = self.spec.clip_sets
        yield self._offline(model, first)
        yield self._live(model, first, {})
        if self.spec.peers is not None:
            for system in peers.SYSTEMS:
                yield self._peer(system, model, first)
            yield self._live(model, first, {"step": PEER_STEP_S})
        yield from self._parts(model, first)
        for clip_set in others:
            yield self._offline(model, clip_set)
            yield self._live(model, clip_set, {})
        if model == self.spec.models[0]:
            measured = {self.spec.step, *([PEER_STEP_S] if self.spec.peers else [])}
            for step in STEPS_S:
                if step not in measured:
                    yield self._live(model, first, {"step": step})
            for policy in POLICIES:
                yield self._live(model, first, {"commit": policy})

    def _offline(self, model: str, clip_set: ClipSet) -> tuple[str, dict[str, Any]]:
        """Transcribe whole files."""
        talks = self.talks[clip_set.name]
        offline = self._ours(model, talks, {"kind": "offline"})
        if "error" in offline:
            raise AsrmaskError(f"{model}: {offline['error']}")
        normalise = normalizer(clip_set.language or "en")
        pairs = zip(talks, offline["texts"], strict=True)
        counts = [errors(normalise(talk.text), normalise(text)) for talk, text in pairs]
        names = {"model": model_name(model), "work": clip_set.name}
        return "offline", {**names, "texts": offline["texts"], "errors": list(map(asdict, counts))}

    def _live(
        self, model: str, clip_set: ClipSet, options: dict[str, Any]
    ) -> tuple[str, dict[str, Any]]:
        """Measure asrmask with options of LiveTranscriber."""
        options = {"step": self.spec.step, **options}
        job = {"kind": "live", "options": options}
        measured = self._ours(model, self.talks[clip_set.name], job)
        return self._run_entry("asrmask", model, clip_set, options, measured)

    def _run_entry(
        self,
        system: str,
        model: str,
        clip_set: ClipSet,
        options: dict[str, Any],
        measured: dict[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        entry = {"system": system, "model": model_name(model), "work": clip_set.name}
        return "runs", {**entry, "options": options, **self._score(model, clip_set, measured)}

    def _parts(self, model: str, clip_set: ClipSet) -> Measured:
        """Measure several streams together, updates by their length, and clips cut in words."""
        talks = self.talks[clip_set.name]
        longest = sorted(talks, key=lambda talk: -os.path.getsize(talk.path))[:1]
        jobs: dict[str, dict[str, Any]] = {
            "streams": {"counts": STREAMS},
            "updates": {"lengths": LENGTHS_S},
            "cuts": {"clips": clip_set.paths},
        }
        for kind, job in jobs.items():
            measured = self._ours(model, longest, {"kind": kind, **job})
            for row in measured.get(kind, [measured]):
                yield kind, {"model": model_name(model), **row}

    def _score(self, model: str, clip_set: ClipSet, measured: dict[str, Any]) -> dict[str, Any]:
        """Return what the events of a run amount to."""
        if "error" in measured:
            return {"error": measured["error"]}
        talks = self.talks[clip_set.name]
        key = model, clip_set.name
        if key not in self.words:
            job = {"kind": "words", "compute_type": "float32"}
            self.words[key] = self._ours(model, talks, job)["words"]
        references = [talk.text for talk in talks]
        normalise = normalizer(clip_set.language or "en")
        scored = score(measured["files"], references, self.words[key], normalise)
        scored |= {name: measured[name] for name in ("peak_mb", "package") if name in measured}
        return scored

    def _ours(self, model: str, talks: Sequence[Talk], job: dict[str, Any]) -> dict[str, Any]:
        job = {"weights": model, "model_dir": self.spec.model_dir, **job}
        job["files"] = [talk.path for talk in talks]
        return run_module("asrmask.benchmark.live_worker", job, self.spec.threads)

    def _peer(self, system: str, model: str, clip_set: ClipSet) -> tuple[str, dict[str, Any]]:
        """Run another system with the Python that has its packages."""
        assert self.spec.peers is not None
        folder = self.folder / "weights" / model_name(model)
        folder.mkdir(parents=True, exist_ok=True)
        weights = prepare(Named("faster-whisper", {}), model, folder, self.spec.model_dir)
        files = [talk.path for talk in self.talks[clip_set.name]]
        job = {"system": system, "weights": weights, "step": PEER_STEP_S, "files": files}
        measured = run_module("asrmask.live.peers", job, self.spec.threads, python=self.spec.peers)
        return self._run_entry(system, model, clip_set, {"step": PEER_STEP_S}, measured)


def describe(spec: LiveSpec) -> dict[str, Any]:
    return {
        "command": spec.command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "asrmask": __version__,
        "models": [model_name(model) for model in spec.models],
        "threads": spec.threads,
        "step": spec.step,
        "processor": processor(),
    }


def save(result: dict[str, Any], out: Path) -> None:
    with atomic_write(out / "live.json") as file:
        json.dump(result, file, ensure_ascii=False)
        file.write("\n")


def read(path: Path) -> dict[str, Any]:
    """Read the live.json of a folder."""
    try:
        return json.loads((path / "live.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AsrmaskError(f"{path}: expected the live.json of a benchmark, got {error}") from None
