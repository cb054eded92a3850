"""One system in a process of its own: `python -m asrmask.bench.worker`, a job in, a result out.

A job is JSON on standard input, the result the last line of standard output. The system's own
packages are all that is imported, so that time and memory are the system's.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from asrmask.errors import AsrmaskError, one_line
from asrmask.systems import Decoding, Named, System, load

N_ALONE = 5  # clips that are also timed one by one


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Load the system, hear one clip, then time each group of files.

    job: begun (the clock when the process was started), system, weights, model_dir, threads,
         decoding, and groups: lists of paths
    """
    system = load(
        Named.parse(job["system"]),
        job["weights"],
        threads=job["threads"],
        model_dir=job["model_dir"],
    )
    loaded_s = time.monotonic() - job["begun"]
    decoding = Decoding(**job["decoding"])
    groups = [[Path(path) for path in group] for group in job["groups"]]
    system.transcribe(groups[0][0], decoding)
    first_text_s = time.monotonic() - job["begun"]
    system.transcribe(groups[0][-1], decoding)  # warm
    system.watch()
    timed = [_timed(system, group, decoding) for group in groups]
    return {
        "loaded_s": loaded_s,
        "first_text_s": first_text_s,
        "groups": timed,
        "alone_s": [_alone(system, path, decoding) for path in groups[0][:N_ALONE]],
        "peak_mb": peak_mb(),
    }


def _timed(system: System, paths: list[Path], decoding: Decoding) -> dict[str, Any]:
    system.timer.reset()
    begun = time.perf_counter()
    heard = system.transcribe_all(paths, decoding)
    taken = time.perf_counter() - begun
    return {
        "seconds": taken,
        "parts": dict(system.timer.seconds),
        "texts": [one.text for one in heard],
    }


def _alone(system: System, path: Path, decoding: Decoding) -> float:
    begun = time.perf_counter()
    system.transcribe(path, decoding)
    return time.perf_counter() - begun


def peak_mb() -> float:
    """The most memory that this process has had.

    Linux hands a parent's peak down in getrusage, so it is asked elsewhere first.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        (found,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
        return int(found) / 1024
    except (OSError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def main() -> int:
    try:
        result = work(json.load(sys.stdin))
    except (AsrmaskError, RuntimeError, ImportError) as error:
        result = {"error": one_line(error)}
    print()  # whatever a library has left on the line
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
