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
from importlib.util import find_spec
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from asrmask import __version__
from asrmask.audio.constants import SAMPLE_RATE
from asrmask.audio.recording import as_wav
from asrmask.benchmark.parts import COMPUTE_TYPES, ENCODER, LIBRARIES
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
N_ALONE = 5  # clips that are also timed one by one


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
    """What to measure.

    models:    official names or paths
    shapes:    names of official models whose parts are measured with random weights
    parts:     parts of models (parts.py) are measured, and no clips
    one_clip_s: clips that are closest to this length are timed one by one; None: the first clips
    """

    models: list[str]
    clip_sets: list[ClipSet]
    systems: list[Named]
    decodings: list[DecodingSettings]
    rounds: int
    threads: int
    command: str
    model_dir: str | None = None
    shapes: Sequence[str] = ()
    parts: bool = False
    one_clip_s: float | None = None
    scaling: Sequence[str] = ()
    longest_min: float = 10.0

    def schedule(self) -> Iterable[tuple[int, str, ClipSet, DecodingSettings, Named]]:
        """The measurements in order: systems take turns on the same clips and decoding."""
        rounds = range(1, self.rounds + 1)
        return product(rounds, self.names, self.clip_sets, self.decodings, self.systems)

    def schedule_parts(self) -> Iterable[tuple[int, str, str, str]]:
        """The measurements of parts in order: libraries take turns on the same model."""
        if not self.parts:
            return ()
        libraries = [name for name in LIBRARIES if find_spec(name.lower())]
        models = [*self.names, *map(shape_name, self.shapes)]
        return product(range(1, self.rounds + 1), models, COMPUTE_TYPES, libraries)

    @property
    def names(self) -> list[str]:
        """The names of the models in results."""
        return [model_name(model) for model in self.models]


def model_name(model: str) -> str:
    """Return the name of a model in results: an official name, or that of a file or folder.

    >>> model_name("weights/base.en.bin")
    'base.en.bin'
    """
    return Path(model).name or Path(model).resolve().name


def shape_name(shape: str) -> str:
    """Return the name of a model of random weights.

    >>> shape_name("turbo")
    'turbo shape'
    """
    return f"{shape} shape"


def run(spec: BenchmarkSpec, out: Path) -> dict[str, Any]:
    """Run all measurements; `out`/bench.json is saved after each one."""
    result: dict[str, Any] = {"about": describe(spec), "machine": {}}
    result |= {"works": {}, "alone": {}, "runs": [], "parts": [], "scaling": []}

    def add(kind: str, title: str, entry: dict[str, Any]) -> None:
        result[kind].append(entry)
        say(title + format_measurement(entry))
        save(result, out)

    with tempfile.TemporaryDirectory(prefix="asrmask-") as folder:
        runner = Runner(spec, Path(folder))
        for model in runner.sources:
            say(f"limits of the machine, for {model}")
            result["machine"][model] = runner.measure_limits(model)
        for clip_set in spec.clip_sets:
            result["works"][clip_set.name] = describe_clips(clip_set)
            result["alone"][clip_set.name] = clips_alone(clip_set, spec.one_clip_s)
        for number, model, clip_set, decoding, system in spec.schedule():
            settings = replace(decoding, language=clip_set.language)
            alone = [clip["path"] for clip in result["alone"][clip_set.name]]
            measured = runner.measure(model, system, settings, [clip_set.paths], alone)
            entry: dict[str, Any] = {"model": model, "system": str(system)}
            entry["decoding"] = str(decoding)
            entry["work"] = clip_set.name
            title = f"round {number} of {spec.rounds}: {', '.join(entry.values())}"
            add("runs", title, {**entry, "round": number, **score(measured, clip_set)})
        for number, model, compute_type, library in spec.schedule_parts():
            entry = {"model": model, "library": library, "compute_type": compute_type}
            measured = runner.measure_parts(**entry)
            title = f"round {number} of {spec.rounds}: {', '.join(entry.values())}"
            add("parts", title, {**entry, "round": number, **measured})
        for axis in spec.scaling:
            for entry in runner.measure_scaling(axis):
                title = f"{axis} {entry['size']}: {entry['model']}, {entry['system']}"
                add("scaling", title, entry)
    return result


def describe_clips(clip_set: ClipSet) -> dict[str, Any]:
    return {
        "clips": len(clip_set.clips),
        "seconds": sum(clip.recording().duration_s for clip in clip_set.clips),
        "speakers": [clip.speaker or clip.path.name for clip in clip_set.clips],
    }


def clips_alone(clip_set: ClipSet, one_clip_s: float | None) -> list[dict[str, Any]]:
    """Return path and seconds of the clips that are timed one by one; the first also from cold.

    one_clip_s: the closest to this length; None: the first of the set
    """
    found: list[dict[str, Any]] = [
        {"path": str(clip.path), "seconds": clip.recording().duration_s}
        for clip in (clip_set.clips if one_clip_s is not None else clip_set.clips[:N_ALONE])
    ]
    if one_clip_s is not None:
        found.sort(key=lambda clip: abs(clip["seconds"] - one_clip_s))
    return found[:N_ALONE]


def format_measurement(entry: dict[str, Any]) -> str:
    if "error" in entry:
        return f": failed, {entry['error']}"
    own = entry.get("own_mb")
    memory = f"{entry['peak_mb']:.0f} MB" + ("" if own is None else f" ({own:.0f} its own)")
    if "parts" in entry and "seconds" not in entry:
        return f": {1000 * entry['parts'][ENCODER]:.0f} ms for a window, {memory}"
    return f": {entry['seconds']:.1f} s, {memory}"


def run_module(
    module: str,
    job: dict[str, Any],
    threads: int,
    cache: Path | None = None,
    python: str | None = None,
) -> dict[str, Any]:
    """Run a module with a job in a separate process; return the last line it prints, parsed.

    cache:  folder for what the process stores; None: the user's
    python: of another environment, which gets only this package of ours; None: this one
    """
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    if cache is not None:
        limits["XDG_CACHE_HOME"] = str(cache)
    ours = str(Path(__file__).parent.parent.parent)
    python_path = os.pathsep.join(filter(None, sys.path)) if python is None else ours
    done = subprocess.run(
        [python or sys.executable, "-W", "ignore", "-m", module],
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
        # of each model by name: an official name, or a path
        self.sources = dict(zip(spec.names, spec.models, strict=True))
        for shape in spec.shapes:
            from asrmask.benchmark import shapes

            name = shape_name(shape)
            say(f"random weights: {name}")
            shapes.write(shape, folder / name)
            self.sources[name] = str(folder / name)
        systems = [] if spec.parts else spec.systems
        self.weights = {
            (model, str(_without_batch(system))): self._prepare(system, model)
            for model, system in product(spec.names, systems)
        }

    def _prepare(self, system: Named, model: str) -> str:
        """Return the weights of a model for a system; each model has a folder for files."""
        folder = self.folder / "weights" / model
        folder.mkdir(parents=True, exist_ok=True)
        return prepare(system, self.sources[model], folder, self.spec.model_dir)

    def measure(
        self,
        model: str,
        system: Named,
        decoding: DecodingSettings,
        groups: list[list[str]],
        alone: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return the result of a worker, or its error.

        groups: paths of the files that are transcribed in one call
        alone:  paths of files that are also transcribed one by one
        """
        weights = self.weights[model, str(_without_batch(system))]
        job: dict[str, Any] = {"system": str(system), "model_dir": self.spec.model_dir}
        job |= {"weights": weights, "groups": groups, "alone": alone}
        job |= {"decoding": asdict(decoding), "start": time.monotonic()}
        return run_module("asrmask.benchmark.worker", job, self.spec.threads)

    def measure_parts(self, model: str, library: str, compute_type: str) -> dict[str, Any]:
        """Return the seconds of the parts of a model in a library, and its memory; or its error."""
        source = self.sources[model]
        if library == "CTranslate2":
            source = self._prepare(Named("faster-whisper", {}), model)
        job: dict[str, Any] = {"library": library, "weights": source, "compute_type": compute_type}
        job |= {"model_dir": self.spec.model_dir}
        return run_module("asrmask.benchmark.parts", job, self.spec.threads, self._cache(model))

    def measure_limits(self, model: str) -> dict[str, Any]:
        """Return the limits of the machine, and the share of them that asrmask reaches."""
        job: dict[str, Any] = {"model": self.sources[model], "model_dir": self.spec.model_dir}
        job |= {"repeats": 2 * self.spec.rounds + 1}
        return run_module("asrmask.benchmark.limits", job, self.spec.threads, self._cache(model))

    def _cache(self, model: str) -> Path | None:
        """A folder for the stored padding of random weights: nobody needs it later."""
        is_random = Path(self.sources[model]).parent == self.folder
        return self.folder / "cache" if is_random else None

    def measure_scaling(self, axis: str) -> Iterator[dict[str, Any]]:
        """Measure along one axis: clip length, file length, or batch size."""
        decoding = DecodingSettings(language=self.spec.clip_sets[0].language)
        for model, system, sizes, groups in self._scaling_jobs(axis):
            measured = self.measure(model, system, decoding, groups)
            label = _without_batch(system) if axis == "batch" else system
            entry = {"axis": axis, "model": model, "system": str(label)}
            if "error" in measured:
                yield {**entry, "size": sizes[0], "error": measured["error"]}
                continue
            memory = {name: measured[name] for name in ("peak_mb", "own_mb")}
            for size, group in zip(sizes, measured["groups"], strict=True):
                seconds = group["seconds"] / (N_CUT if axis == "clip" else 1)
                yield {**entry, "size": size, "seconds": seconds, "parts": group["parts"], **memory}

    def _scaling_jobs(
        self, axis: str
    ) -> Iterator[tuple[str, Named, Sequence[float], list[list[str]]]]:
        """Yield each process of an axis: model, system, sizes, and the files of each size."""
        models, clip_set, systems = self.spec.names, self.spec.clip_sets[0], self.spec.systems
        if axis == "batch":
            batched = [system for system in systems if "batch" in KINDS[system.name].options]
            distinct = {str(system): system for system in map(_without_batch, batched)}
            for size, model, system in product(BATCHES, models, distinct.values()):
                options = {**system.options, "batch": str(size)}
                yield model, Named(system.name, options), [size], [clip_set.paths]
            return
        samples = np.concatenate([load_audio(clip.path) for clip in clip_set.clips])
        if axis == "clip":
            lengths = [length for length in CLIP_S if length * SAMPLE_RATE <= len(samples)]
            groups = [[str(path) for path in cut(samples, s, self.folder)] for s in lengths]
            for model, system in product(models, systems):
                yield model, system, lengths, groups
            return
        for minutes in (m for m in FILE_MINUTES if m <= self.spec.longest_min):
            path = self.folder / f"{minutes}.wav"
            path.write_bytes(as_wav(np.resize(samples, minutes * 60 * SAMPLE_RATE)))
            for model, system in product(models, systems):
                if system.name == "asrmask" or minutes <= OTHERS_MINUTES:
                    yield model, system, [minutes], [[str(path)]]
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
    used = LIBRARIES if spec.parts else (KINDS[system.name].install for system in spec.systems)
    for name in ("torch", *used):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "unknown"
    return {
        "command": spec.command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "asrmask": __version__,
        "model": ", ".join([*spec.names, *map(shape_name, spec.shapes)]),
        **{name: getattr(spec, name) for name in ("threads", "rounds")},
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
    return _upgrade(result)


def _upgrade(result: dict[str, Any]) -> dict[str, Any]:
    """Add what files of one model lack, from before there could be several."""
    model = model_name(result["about"]["model"])
    for entry in (*result["runs"], *result.get("scaling", [])):
        entry.setdefault("model", model)
    machine = result.setdefault("machine", {})
    if machine.keys() & {"limits", "error"}:
        result["machine"] = {model: machine}
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
