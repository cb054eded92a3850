"""Run a benchmark: one process at a time, by round and system; results go to bench.json."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from asrmask import __version__
from asrmask.audio.constants import SAMPLE_RATE
from asrmask.audio.recording import as_wav
from asrmask.errors import AsrmaskError, OptionError
from asrmask.evaluation.corpus import Clip
from asrmask.evaluation.score import errors
from asrmask.files import atomic_write
from asrmask.systems import KINDS, DecodingSettings, Named, load_audio, prepare
from asrmask.systems.upstream import normalizer

CLIP_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
N_CUT = 4  # clips of each length
FILE_MINUTES = (1, 3, 10, 30, 60, 180)
BATCHES = (1, 2, 4, 8, 16, 32)
SCALINGS = ("clip", "file", "batch")


class BenchError(AsrmaskError):
    """A benchmark that cannot be read."""


@dataclass(frozen=True)
class BenchmarkRun:
    """A named set of clips that is transcribed in one call."""

    name: str
    clips: list[Clip]

    @property
    def language(self) -> str | None:
        """The language of all clips; None if there are several."""
        several = {clip.language for clip in self.clips}
        return several.pop() if len(several) == 1 else None


@dataclass(frozen=True)
class Request:
    """What to measure."""

    works: list[BenchmarkRun]
    systems: list[Named]
    decodings: list[DecodingSettings]
    rounds: int
    model: str
    model_dir: str | None
    threads: int
    scaling: list[str]
    longest_min: float
    command: str


Say = Callable[[str], None]


def run(request: Request, out: Path, say: Say) -> dict[str, Any]:
    """Run all measurements; `out`/bench.json is saved after each one."""
    result: dict[str, Any] = {"about": about(request), "runs": [], "scaling": []}
    with tempfile.TemporaryDirectory(prefix="asrmask-") as temporary:
        folder = Path(temporary)
        weights = {
            str(named): prepare(named, request.model, folder, request.model_dir)
            for named in request.systems
        }
        say("limits of the machine")
        result["machine"] = limits(request)
        seconds = {work.name: [duration_s(c) for c in work.clips] for work in request.works}
        result["works"] = {
            work.name: {
                "clips": len(work.clips),
                "seconds": sum(seconds[work.name]),
                "speakers": [clip.speaker or clip.path.name for clip in work.clips],
            }
            for work in request.works
        }
        for number, (work, decoding, named) in rounds(request):
            title = f"round {number} of {request.rounds}: {work.name}, {decoding}, {named}"
            paths = [str(clip.path) for clip in work.clips]
            asked = DecodingSettings(decoding.beam_size, work.language)
            done = measured(named, weights[str(named)], asked, [paths], request)
            entry = {"system": str(named), "decoding": str(decoding), "work": work.name}
            result["runs"].append({**entry, "round": number, **scored(done, work)})
            say(title + told(result["runs"][-1]))
            save(result, out)
        for axis in request.scaling:
            for entry in grown(axis, request, weights, folder):
                result["scaling"].append(entry)
                say(f"{axis} {entry['size']}: {entry['system']}{told(entry)}")
                save(result, out)
    save(result, out)
    return result


def rounds(request: Request) -> Iterator[tuple[int, tuple[BenchmarkRun, DecodingSettings, Named]]]:
    """Yield the measurements in order: systems take turns on the same work and decoding."""
    for number in range(1, request.rounds + 1):
        for work in request.works:
            for decoding in request.decodings:
                for named in request.systems:
                    yield number, (work, decoding, named)


def told(entry: dict[str, Any]) -> str:
    if "error" in entry:
        return f": failed, {entry['error']}"
    own = entry.get("own_mb")
    memory = f"{entry['peak_mb']:.0f} MB" + ("" if own is None else f" ({own:.0f} its own)")
    return f": {entry['seconds']:.1f} s, {memory}"


def measured(
    named: Named,
    weights: str,
    decoding: DecodingSettings,
    groups: list[list[str]],
    request: Request,
) -> dict[str, Any]:
    """Measure a system in a worker process; return its result, or its error."""
    job = {
        "system": str(named),
        "weights": weights,
        "model_dir": request.model_dir,
        "threads": request.threads,
        "decoding": asdict(decoding),
        "groups": groups,
        "begun": time.monotonic(),
    }
    return in_process("asrmask.benchmark.worker", job, request.threads)


def in_process(module: str, job: dict[str, Any], threads: int) -> dict[str, Any]:
    """Run a module in a separate process with a job; return the last line it prints, parsed."""
    number = str(threads)
    environment = {**os.environ, "OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        return {"error": f"ended with exit code {done.returncode}: {last[:200]}"}


def limits(request: Request) -> dict[str, Any]:
    job = {"model": request.model, "model_dir": request.model_dir, "threads": request.threads}
    return in_process("asrmask.benchmark.limits", job, request.threads)


def scored(done: dict[str, Any], work: BenchmarkRun) -> dict[str, Any]:
    """Return one entry of `runs`: times, memory, texts, and errors of clips with a transcript."""
    if "error" in done:
        return done
    (group,) = done.pop("groups")
    texts = group.pop("texts")
    found = []
    for clip, text in zip(work.clips, texts, strict=True):
        if clip.text is not None:
            normalise = normalizer(clip.language)
            found.append(asdict(errors(normalise(clip.text), normalise(text))))
    return {**group, **done, "errors": found, "texts": texts}


def duration_s(clip: Clip) -> float:
    return clip.recording().duration_s


# ---------------------------------------------------------------- scaling


def grown(
    axis: str, request: Request, weights: dict[str, str], folder: Path
) -> Iterator[dict[str, Any]]:
    """Measure along one axis: clip length, file length, or batch size."""
    if axis == "batch":
        yield from _batches(request, folder)
        return
    decoding = DecodingSettings(language=request.works[0].language)
    samples = np.concatenate([load_audio(clip.path) for clip in request.works[0].clips])
    if axis == "clip":
        groups = [
            [str(path) for path in cut(samples, seconds, folder)]
            for seconds in CLIP_S
            if seconds * SAMPLE_RATE <= len(samples)
        ]
        for named in request.systems:
            done = measured(named, weights[str(named)], decoding, groups, request)
            if "error" in done:
                yield {"axis": axis, "system": str(named), "size": 0, "error": done["error"]}
                continue
            for seconds, group in zip(CLIP_S, done["groups"], strict=False):
                yield _entry(axis, named, seconds, group["seconds"] / N_CUT, group, done)
        return
    for minutes in FILE_MINUTES:
        if minutes > request.longest_min:
            break
        path = folder / f"{minutes}.wav"
        path.write_bytes(as_wav(np.resize(samples, minutes * 60 * SAMPLE_RATE)))
        for named in request.systems:
            if not (named.name == "asrmask" or minutes <= 10):
                continue  # the others scale the same way: measuring hours adds nothing
            done = measured(named, weights[str(named)], decoding, [[str(path)]], request)
            if "error" in done:
                yield {"axis": axis, "system": str(named), "size": minutes, "error": done["error"]}
                continue
            (group,) = done["groups"]
            yield _entry(axis, named, minutes, group["seconds"], group, done)
        path.unlink()


def _batches(request: Request, folder: Path) -> Iterator[dict[str, Any]]:
    work = request.works[0]
    paths = [str(clip.path) for clip in work.clips]
    able = [named for named in request.systems if "batch" in KINDS[named.name].options]
    for size in BATCHES:
        for one in {str(Named(n.name, {**n.options, "batch": "1"})): n for n in able}.values():
            named = Named(one.name, {**one.options, "batch": str(size)})
            weights = prepare(named, request.model, folder, request.model_dir)
            done = measured(
                named, weights, DecodingSettings(language=work.language), [paths], request
            )
            label = Named(one.name, {k: v for k, v in one.options.items() if k != "batch"})
            if "error" in done:
                yield {"axis": "batch", "system": str(label), "size": size, "error": done["error"]}
                continue
            (group,) = done["groups"]
            yield _entry("batch", label, size, group["seconds"], group, done)


def _entry(
    axis: str,
    named: Named,
    size: float,
    seconds: float,
    group: dict[str, Any],
    done: dict[str, Any],
) -> dict[str, Any]:
    return {
        "axis": axis,
        "system": str(named),
        "size": size,
        "seconds": seconds,
        "parts": group["parts"],
        "peak_mb": done["peak_mb"],
        "own_mb": done["own_mb"],
    }


def cut(samples: np.ndarray, seconds: float, folder: Path) -> list[Path]:
    """Write clips of that length, evenly spaced over the samples; return their paths."""
    n = int(seconds * SAMPLE_RATE)
    starts = np.linspace(0, len(samples) - n, N_CUT).astype(int)
    paths = [folder / f"clip-{seconds}-{i}.wav" for i in range(N_CUT)]
    for path, start in zip(paths, starts, strict=True):
        path.write_bytes(as_wav(samples[start : start + n]))
    return paths


# ---------------------------------------------------------------- files


def about(request: Request) -> dict[str, Any]:
    """Describe the machine, the packages and the settings of a benchmark."""
    packages = {}
    for name in ("torch", *(KINDS[named.name].install for named in request.systems)):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "unknown"
    return {
        "command": request.command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "asrmask": __version__,
        "model": request.model,
        "threads": request.threads,
        "rounds": request.rounds,
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": packages,
    }


def processor() -> str:
    """Return the processor's name and its vector instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = set(facts.get("flags", "").split())
    able = [name for name in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if name in flags]
    return f"{facts.get('model name', platform.machine())} ({', '.join(able)})"


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
        raise BenchError(f"{path}: {error.strerror}, expected a benchmark") from None
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{path}: expected the JSON of a benchmark, got {error}") from None
    if not isinstance(result, dict) or not {"about", "runs", "works"} <= set(result):
        raise BenchError(f"{path}: expected the JSON of a benchmark, got another")
    return result


def mixed(works: Sequence[BenchmarkRun], n_each: int) -> BenchmarkRun:
    """Interleave clips of all works, like a folder of mixed recordings."""
    several = [sampled(work.clips, n_each) for work in works]
    turns = zip_longest(*several)
    return BenchmarkRun("mixed", [clip for turn in turns for clip in turn if clip is not None])


def sampled(clips: Sequence[Clip], most: int | None) -> list[Clip]:
    """Return at most that many clips, evenly spaced over the list."""
    if most is None or most >= len(clips):
        return list(clips)
    if most < 1:
        raise OptionError(f"clips of a data set must be 1 or more, got {most}")
    return [clips[i * len(clips) // most] for i in range(most)]
