"""The repository's own environment: .venv, made or brought up to date when a script needs it."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
OLDEST, NEWEST = (3, 10), (3, 12)


def ready(*extras: str) -> Path:
    """The interpreter of .venv, with asrmask and those extras installed."""
    stamp = VENV / "installed"
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    state = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    here = stamp.read_text().split() if stamp.is_file() and PYTHON.is_file() else []
    have = set(here[1:]) if here[:1] == [state] else set()
    if here[:1] == [state] and set(extras) <= have:
        return PYTHON
    wanted = sorted(have | set(extras))
    if not PYTHON.is_file():
        say(f"making {VENV}")
        run([base_python(), "-m", "venv", str(VENV)])
    say("installing asrmask and what it needs: a few minutes the first time")
    stamp.unlink(missing_ok=True)
    target = f"{ROOT}[{','.join(wanted)}]" if wanted else str(ROOT)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "-c", str(ROOT / "constraints.txt"), "-e", target])
    stamp.write_text("\n".join([state, *wanted]) + "\n")
    return PYTHON


def base_python() -> str:
    """An interpreter of a supported version: this one, or another on the path."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return sys.executable
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        if found := shutil.which(f"python3.{minor}"):
            return found
    got = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"asrmask: error: expected Python 3.10, 3.11 or 3.12, got {got} and no other on PATH")


def enter(*extras: str) -> None:
    """Go on in .venv's interpreter, with those extras, if this is another one."""
    python = ready(*extras)
    if Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(python, [str(python), *sys.argv])


def run(command: list[str]) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(f"asrmask: error: {' '.join(command)} failed with exit code {done.returncode}")


def say(text: str) -> None:
    print(f"asrmask: {text}", file=sys.stderr, flush=True)
