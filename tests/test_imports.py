"""Imports point one way, heavy packages are imported late, and the public names are these."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import asrmask

PACKAGE = Path(asrmask.__file__).parent

# each may import those before it
ORDER = [
    "errors lazy malloc",
    "extras files assets console spec_files",
    "audio tokenizer reporting kernels",
    "model evaluation",
    "decoding",
    "transcription",
    "checkpoints",
    "systems live",
    "inspection",
    "ablation comparison training",
    "benchmark",
    "cli",
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names.split()}


def rooms(path):
    """The modules of asrmask that a file imports, by the room they are in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "asrmask":
            yield from (alias.name for alias in node.names if alias.name in RANK)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("asrmask."):
            yield node.module.split(".")[1]


def test_imports_point_one_way():
    for path in PACKAGE.rglob("*.py"):
        if path.parent == PACKAGE and path.stem in {"__init__", "__main__"}:
            continue
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        wrong = [other for other in rooms(path) if other != room and RANK[other] >= RANK[room]]
        assert not wrong, f"{path.name} (in {room}) imports {wrong}"


def test_only_upstream_imports_openai_whisper():
    for path in PACKAGE.rglob("*.py"):
        names = [
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in [getattr(node, "module", None), *(a.name for a in node.names)]
        ]
        uses = any(name == "whisper" or (name or "").startswith("whisper.") for name in names)
        assert not uses or path.stem == "upstream", path


def test_only_its_adapter_imports_transformers():
    importing = [
        path
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None), *(a.name for a in node.names)]
        if (name or "").split(".")[0] == "transformers"
    ]
    assert importing == [PACKAGE / "systems" / "huggingface.py"]


def test_help_and_the_package_import_nothing_heavy():
    code = (
        "import sys, asrmask, asrmask.cli\n"
        "try: asrmask.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'av', 'whisper', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_public_names():
    expected = {
        "load_model available_models load_audio pad_or_trim log_mel_spectrogram DecodingOptions",
        "decode detect_language transcribe transcribe_all stream Settings Preset Transcription",
        "listen LiveTranscriber",
        "Segment Word VadOptions",
        "DecodingResult Features Spectrogram Recording Whisper ModelDimensions Policy",
        "AsrmaskError AudioError CheckpointError OptionError AudioWarning",
    }
    assert set(asrmask.__all__) == set(" ".join(expected).split())
    for name in asrmask.__all__:
        assert getattr(asrmask, name).__name__ == name
    # a module of the same name would hide the function once it is imported
    assert not {path.stem for path in PACKAGE.iterdir()} & set(asrmask.__all__)


def test_every_part_is_packed():
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    folders = {path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")}
    for folder in folders:
        assert f'"{".".join(folder.parts)}",' in text, folder


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository, in a folder named asrmask."""
    root, folder = PACKAGE.parent, tmp_path_factory.mktemp("above") / "asrmask"
    shutil.copytree(PACKAGE, folder / "asrmask", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "data", folder / "data", ignore=shutil.ignore_patterns("results"))
    (folder / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/build.py", "README.md", "LICENSE"):
        shutil.copy(root / name, folder / name)
    return folder


def built(clone, kind, target):
    """A wheel of the clone, unpacked, as pip would."""
    target.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_an_editable_install_is_found_from_the_folder_above_the_clone(clone, tmp_path):
    site = built(clone, "editable", tmp_path / "site")
    code = (
        f"import site; site.addsitedir({str(site)!r})\n"
        "import runpy, sys, asrmask\n"
        "print(asrmask.__file__)\n"
        "sys.argv = ['asrmask', '--version']\n"
        "runpy.run_module('asrmask', run_name='__main__')"
    )
    # -S and no PYTHONPATH: without the packages of this environment
    line = [sys.executable, "-S", "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        line, cwd=clone.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        str(clone / "asrmask" / "__init__.py"),
        f"asrmask {asrmask.__version__}",
    ]


def test_a_wheel_holds_the_package_and_the_sample_speech(clone, tmp_path):
    site = built(clone, "wheel", tmp_path / "site")
    folders = {path.name for path in site.iterdir() if path.is_dir()}
    assert folders == {"asrmask", f"asrmask-{asrmask.__version__}.dist-info"}
    packed = {path.name: path.read_bytes() for path in (site / "asrmask" / "speech").iterdir()}
    samples = [path for path in (clone / "data").iterdir() if path.is_file()]
    assert packed == {path.name: path.read_bytes() for path in samples}
    assert sum(name.endswith(".flac") for name in packed) == 5


def test_scripts_import_names_that_exist():
    """Scripts are not run by the suite: at least what they import must be there."""
    scripts = PACKAGE.parent / "scripts"
    files = [path for path in scripts.rglob("*") if path.is_file() and path.suffix in {"", ".py"}]
    names = {
        (node.module, alias.name)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "asrmask"
        for alias in node.names
    }
    assert len(names) > 20
    for module, name in sorted(names):
        found = import_module(module)
        assert hasattr(found, name) or import_module(f"{module}.{name}"), (module, name)
