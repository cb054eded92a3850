"""Measure one system in a separate process: `python -m asrmask.benchmark.worker`.

The job is JSON on standard input; the result is the last line of standard output. Only the packages
of that system are imported, so that the time and memory measured are its own.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from asrmask.errors import AsrmaskError, one_line
from asrmask.systems import DecodingSettings, Named, System, load

N_ALONE = 5  # clips that are also timed individually


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Load the system, transcribe one clip, then time each group of files.

    job: begun (time.monotonic() when the process was started), system, weights, model_dir,
         threads, decoding, and groups: lists of paths
    """
    system = load(
        Named.parse(job["system"]),
        job["weights"],
        threads=job["threads"],
        model_dir=job["model_dir"],
    )
    loaded_s = time.monotonic() - job["begun"]
    decoding = DecodingSettings(**job["decoding"])
    groups = [[Path(path) for path in group] for group in job["groups"]]
    system.transcribe(groups[0][0], decoding)
    first_text_s = time.monotonic() - job["begun"]
    system.transcribe(groups[0][-1], decoding)  # warm-up
    system.watch()
    timed = [_timed(system, group, decoding) for group in groups]
    return {
        "loaded_s": loaded_s,
        "first_text_s": first_text_s,
        "groups": timed,
        "alone_s": [_alone(system, path, decoding) for path in groups[0][:N_ALONE]],
        "peak_mb": peak_mb(),
        "own_mb": own_mb(),
    }


def _timed(system: System, paths: list[Path], decoding: DecodingSettings) -> dict[str, Any]:
    system.timer.reset()
    begun = time.perf_counter()
    heard = system.transcribe_all(paths, decoding)
    taken = time.perf_counter() - begun
    return {
        "seconds": taken,
        "parts": dict(system.timer.seconds),
        "texts": [one.text for one in heard],
    }


def _alone(system: System, path: Path, decoding: DecodingSettings) -> float:
    begun = time.perf_counter()
    system.transcribe(path, decoding)
    return time.perf_counter() - begun


def peak_mb() -> float:
    """Return the peak resident memory (RSS) of this process.

    On Linux getrusage includes the parent's peak, so /proc is tried first.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        (found,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
        return int(found) / 1024
    except (OSError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def own_mb(rollup: Path = Path("/proc/self/smaps_rollup")) -> float | None:
    """Estimate the peak of memory that is private to this process: peak RSS minus shared pages.

    Shared pages are also in the memory of other processes; most hold library code. They are counted
    once, at the end of the run: counting takes 15 ms and would disturb the timing. None if the
    operating system does not report them: only Linux does.
    """
    try:
        lines = rollup.read_text().splitlines()
    except OSError:
        return None
    shared_kb = sum(int(line.split()[1]) for line in lines if line.startswith("Shared_"))
    return peak_mb() - shared_kb / 1024


def main() -> int:
    try:
        result = work(json.load(sys.stdin))
    except (AsrmaskError, RuntimeError, ImportError) as error:
        result = {"error": one_line(error)}
    print()  # ends any partial line that a library printed
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
