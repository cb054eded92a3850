"""Run a benchmark: one process at a time, by round and system; results go to bench.json."""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from asrmask import __version__
from asrmask.audio.constants import SAMPLE_RATE
from asrmask.audio.recording import as_wav
from asrmask.console import say
from asrmask.errors import AsrmaskError, OptionError
from asrmask.evaluation import corpus
from asrmask.evaluation.corpus import Clip
from asrmask.evaluation.score import errors
from asrmask.files import atomic_write
from asrmask.systems import KINDS, DecodingSettings, Named, load_audio, prepare
from asrmask.systems.upstream import normalizer

CLIP_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
N_CUT = 4  # clips of each length
FILE_MINUTES = (1, 3, 10, 30, 60, 180)
OTHERS_MINUTES = 10  # longest file for other systems: they scale the same way
BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class ClipSet:
    """A named set of clips that is transcribed in one call."""

    name: str
    clips: list[Clip]

    @property
    def language(self) -> str | None:
        """The language of all clips; None if there are several."""
        languages = {clip.language for clip in self.clips}
        return languages.pop() if len(languages) == 1 else None

    @property
    def paths(self) -> list[str]:
        return [str(clip.path) for clip in self.clips]


@dataclass(frozen=True)
class BenchmarkSpec:
    """What to measure."""

    clip_sets: list[ClipSet]
    systems: list[Named]
    decodings: list[DecodingSettings]
    rounds: int
    model: str
    model_dir: str | None
    threads: int
    scaling: list[str]
    longest_min: float
    command: str

    def schedule(self) -> Iterable[tuple[int, ClipSet, DecodingSettings, Named]]:
        """The measurements in order: systems take turns on the same clips and decoding."""
        return product(range(1, self.rounds + 1), self.clip_sets, self.decodings, self.systems)


def run(spec: BenchmarkSpec, out: Path) -> dict[str, Any]:
    """Run all measurements; `out`/bench.json is saved after each one."""
    result: dict[str, Any] = {"about": describe(spec), "runs": [], "scaling": []}

    def add(kind: str, title: str, entry: dict[str, Any]) -> None:
        result[kind].append(entry)
        say(title + format_measurement(entry))
        save(result, out)

    with tempfile.TemporaryDirectory(prefix="asrmask-") as folder:
        runner = Runner(spec, Path(folder))
        say("limits of the machine")
        job = {"model": spec.model, "model_dir": spec.model_dir, "repeats": 2 * spec.rounds + 1}
        result["machine"] = run_module("asrmask.benchmark.limits", job, spec.threads)
        result["works"] = {
            clip_set.name: {
                "clips": len(clip_set.clips),
                "seconds": sum(clip.recording().duration_s for clip in clip_set.clips),
                "speakers": [clip.speaker or clip.path.name for clip in clip_set.clips],
            }
            for clip_set in spec.clip_sets
        }
        for number, clip_set, decoding, system in spec.schedule():
            settings = replace(decoding, language=clip_set.language)
            measured = runner.measure(system, settings, [clip_set.paths])
            entry = {"system": str(system), "decoding": str(decoding), "work": clip_set.name}
            title = f"round {number} of {spec.rounds}: {clip_set.name}, {decoding}, {system}"
            add("runs", title, {**entry, "round": number, **score(measured, clip_set)})
        for axis in spec.scaling:
            for entry in runner.measure_scaling(axis):
                add("scaling", f"{axis} {entry['size']}: {entry['system']}", entry)
    return result


def format_measurement(entry: dict[str, Any]) -> str:
    if "error" in entry:
        return f": failed, {entry['error']}"
    own = entry.get("own_mb")
    memory = f"{entry['peak_mb']:.0f} MB" + ("" if own is None else f" ({own:.0f} its own)")
    return f": {entry['seconds']:.1f} s, {memory}"


def run_module(module: str, job: dict[str, Any], threads: int) -> dict[str, Any]:
    """Run a module with a job in a separate process; return the last line it prints, parsed."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    python_path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        input=json.dumps({**job, "threads": threads}),
        capture_output=True,
        text=True,
        env={**os.environ, **limits, "PYTHONPATH": python_path},
    )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"ended with exit code {done.returncode}: {last[:200]}"}


def score(measured: dict[str, Any], clip_set: ClipSet) -> dict[str, Any]:
    """Return one entry of `runs`: times, memory, texts, and errors of clips with a transcript."""
    if "error" in measured:
        return measured
    (group,) = measured.pop("groups")
    counts = []
    for clip, text in zip(clip_set.clips, group["texts"], strict=True):
        if clip.text is not None:
            normalise = normalizer(clip.language)
            counts.append(asdict(errors(normalise(clip.text), normalise(text))))
    return {**group, **measured, "errors": counts}


class Runner:
    """Runs the systems of a benchmark, each time in a separate process."""

    def __init__(self, spec: BenchmarkSpec, folder: Path):
        """folder: for weights in other formats, and for cut clips"""
        self.spec, self.folder = spec, folder
        self.weights = {
            str(_without_batch(system)): prepare(system, spec.model, folder, spec.model_dir)
            for system in spec.systems
        }

    def measure(
        self, system: Named, decoding: DecodingSettings, groups: list[list[str]]
    ) -> dict[str, Any]:
        """Return the result of a worker, or its error.

        groups: paths of the files that are transcribed in one call
        """
        job: dict[str, Any] = {"system": str(system), "model_dir": self.spec.model_dir}
        job |= {"weights": self.weights[str(_without_batch(system))], "groups": groups}
        job |= {"decoding": asdict(decoding), "start": time.monotonic()}
        return run_module("asrmask.benchmark.worker", job, self.spec.threads)

    def measure_scaling(self, axis: str) -> Iterator[dict[str, Any]]:
        """Measure along one axis: clip length, file length, or batch size."""
        decoding = DecodingSettings(language=self.spec.clip_sets[0].language)
        for system, sizes, groups in self._scaling_jobs(axis):
            measured = self.measure(system, decoding, groups)
            label = _without_batch(system) if axis == "batch" else system
            entry = {"axis": axis, "system": str(label)}
            if "error" in measured:
                yield {**entry, "size": sizes[0], "error": measured["error"]}
                continue
            memory = {name: measured[name] for name in ("peak_mb", "own_mb")}
            for size, group in zip(sizes, measured["groups"], strict=True):
                seconds = group["seconds"] / (N_CUT if axis == "clip" else 1)
                yield {**entry, "size": size, "seconds": seconds, "parts": group["parts"], **memory}

    def _scaling_jobs(self, axis: str) -> Iterator[tuple[Named, Sequence[float], list[list[str]]]]:
        """Yield each process of an axis: system, sizes, and the files of each size."""
        clip_set, systems = self.spec.clip_sets[0], self.spec.systems
        if axis == "batch":
            batched = [system for system in systems if "batch" in KINDS[system.name].options]
            distinct = {str(system): system for system in map(_without_batch, batched)}
            for size, system in product(BATCHES, distinct.values()):
                options = {**system.options, "batch": str(size)}
                yield Named(system.name, options), [size], [clip_set.paths]
            return
        samples = np.concatenate([load_audio(clip.path) for clip in clip_set.clips])
        if axis == "clip":
            lengths = [length for length in CLIP_S if length * SAMPLE_RATE <= len(samples)]
            groups = [[str(path) for path in cut(samples, s, self.folder)] for s in lengths]
            for system in systems:
                yield system, lengths, groups
            return
        for minutes in (m for m in FILE_MINUTES if m <= self.spec.longest_min):
            path = self.folder / f"{minutes}.wav"
            path.write_bytes(as_wav(np.resize(samples, minutes * 60 * SAMPLE_RATE)))
            for system in systems:
                if system.name == "asrmask" or minutes <= OTHERS_MINUTES:
                    yield system, [minutes], [[str(path)]]
            path.unlink()


def _without_batch(system: Named) -> Named:
    return Named(system.name, {k: v for k, v in system.options.items() if k != "batch"})


def cut(samples: np.ndarray, seconds: float, folder: Path) -> list[Path]:
    """Write clips of that length, evenly spaced over the samples; return their paths."""
    n = int(seconds * SAMPLE_RATE)
    paths = [folder / f"clip-{seconds}-{i}.wav" for i in range(N_CUT)]
    for path, start in zip(paths, np.linspace(0, len(samples) - n, N_CUT, dtype=int), strict=True):
        path.write_bytes(as_wav(samples[start : start + n]))
    return paths


# ---------------------------------------------------------------- files


def describe(spec: BenchmarkSpec) -> dict[str, Any]:
    """Describe the machine, the packages and the settings of a benchmark."""
    packages = {}
    for name in ("torch", *(KINDS[system.name].install for system in spec.systems)):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "unknown"
    return {
        "command": spec.command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "asrmask": __version__,
        **{name: getattr(spec, name) for name in ("model", "threads", "rounds")},
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": packages,
    }


def processor() -> str:
    """Return the processor's name and its vector instruction sets."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    words = set(text.split())
    flags = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if flag in words]
    return f"{name[1] if name else platform.machine()} ({', '.join(flags)})"


def save(result: dict[str, Any], out: Path) -> None:
    with atomic_write(out / "bench.json") as file:
        json.dump(result, file, indent=1, ensure_ascii=False)
        file.write("\n")


def read(path: Path) -> dict[str, Any]:
    """Read the benchmark in a bench.json, or in a folder that has one."""
    path = path / "bench.json" if path.is_dir() else path
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AsrmaskError(f"{path}: {error.strerror}, expected a benchmark") from None
    except (ValueError, RecursionError) as error:
        raise AsrmaskError(f"{path}: expected the JSON of a benchmark, got {error}") from None
    if not isinstance(result, dict) or not {"about", "runs", "works"} <= set(result):
        raise AsrmaskError(f"{path}: expected the JSON of a benchmark, got another")
    return result


def parse_decoding(text: str) -> DecodingSettings:
    """Parse `greedy` or `beamN`."""
    size = text.removeprefix("beam")
    if text == "greedy":
        return DecodingSettings()
    if not text.startswith("beam") or not size.isdecimal() or int(size) < 1:
        raise OptionError(f"--settings must be of greedy, beam5, …, got {text!r}")
    return DecodingSettings(beam_size=int(size))


def read_clip_sets(sources: list[Path], most: int | None, mixed: int | None) -> list[ClipSet]:
    """Read data sets, each with at most `most` clips; add one with `mixed` clips of each."""
    clip_sets = []
    for source in sources:
        clips = sample(corpus.read(source), most)
        if missing := [clip for clip in clips if not os.path.isfile(clip.path)]:
            raise OptionError(f"{source}: no such file: {missing[0].path}")
        clip_sets.append(ClipSet(source.name if source.is_dir() else source.stem, clips))
    if mixed is not None:
        clip_sets.append(mix(clip_sets, mixed))
    if len({clip_set.name for clip_set in clip_sets}) < len(clip_sets):
        raise OptionError("data sets must have different names, got the same twice")
    return clip_sets


def mix(clip_sets: Sequence[ClipSet], n_each: int) -> ClipSet:
    """Interleave n_each clips of every set, like a folder of mixed recordings."""
    turns = zip_longest(*(sample(clip_set.clips, n_each) for clip_set in clip_sets))
    return ClipSet("mixed", [clip for turn in turns for clip in turn if clip is not None])


def sample(clips: Sequence[Clip], n: int | None) -> list[Clip]:
    """Return at most n clips, evenly spaced over the list."""
    if n is None or n >= len(clips):
        return list(clips)
    if n < 1:
        raise OptionError(f"clips of a data set must be 1 or more, got {n}")
    return [clips[i * len(clips) // n] for i in range(n)]
