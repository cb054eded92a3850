"""Measure one system in a separate process: `python -m asrmask.benchmark.worker`.

The job is JSON on standard input; the result is the last line of standard output. Only the packages
of that system are imported, so that the time and memory measured are its own.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asrmask.errors import AsrmaskError, one_line
from asrmask.systems import DecodingSettings, Named, load


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Load the system, transcribe one clip, then time each group of files.

    job: start (time.monotonic() when the process was started), system, weights, model_dir,
         threads, decoding, groups: lists of paths, and alone: paths of clips that are also
         timed one by one; the first of them, or of the first group, is the text from cold
    """
    options = {name: job[name] for name in ("threads", "model_dir")}
    system = load(Named.parse(job["system"]), job["weights"], **options)
    loaded_s = time.monotonic() - job["start"]
    decoding = DecodingSettings(**job["decoding"])
    groups = [[Path(path) for path in group] for group in job["groups"]]
    alone = [Path(path) for path in job["alone"]]
    system.transcribe([*alone, *groups[0]][0], decoding)
    first_text_s = time.monotonic() - job["start"]
    system.transcribe(groups[0][-1], decoding)  # warm-up
    system.watch()
    result: dict[str, Any] = {"loaded_s": loaded_s, "first_text_s": first_text_s}
    result |= {"groups": [], "alone_s": []}
    for paths in groups:
        system.timer.reset()
        start = time.perf_counter()
        transcripts = system.transcribe_all(paths, decoding)
        entry = {"seconds": time.perf_counter() - start, "parts": dict(system.timer.seconds)}
        result["groups"].append({**entry, "texts": [one.text for one in transcripts]})
    for path in alone:
        start = time.perf_counter()
        system.transcribe(path, decoding)
        result["alone_s"].append(time.perf_counter() - start)
    return {**result, "peak_mb": peak_mb(), "own_mb": own_mb()}


def peak_mb() -> float:
    """Return the peak resident memory (RSS) of this process.

    On Linux getrusage includes the parent's peak, so /proc is tried first.
    """
    try:
        return _sum_kb(Path("/proc/self/status"), "VmHWM") / 1024
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def own_mb(rollup: Path = Path("/proc/self/smaps_rollup")) -> float | None:
    """Estimate the peak of memory that is private to this process: peak RSS minus shared pages.

    Shared pages are also in the memory of other processes; most hold library code. They are counted
    once, at the end of the run: counting takes 15 ms and would disturb the timing. None if the
    operating system does not report them: only Linux does.
    """
    try:
        return peak_mb() - _sum_kb(rollup, "Shared_") / 1024
    except OSError:
        return None


def _sum_kb(path: Path, prefix: str) -> int:
    """Sum the sizes in the lines of a /proc file that begin with the prefix."""
    lines = path.read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(prefix))


def run_job(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Measure the job on standard input; print the result, or its error, as the last line."""
    try:
        result = measure(json.load(sys.stdin))
    except (AsrmaskError, RuntimeError, ImportError) as error:
        result = {"error": one_line(error)}
    print()  # ends any partial line that a library printed
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run_job(measure)
