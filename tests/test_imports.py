"""Imports point one way, heavy packages are imported late, and the public names are these."""

import ast
import subprocess
import sys
from pathlib import Path

import asrmask

PACKAGE = Path(asrmask.__file__).parent

# each may import those before it
ORDER = [
    "errors packed assets torchaudio_import files pages presets allocation",
    "policy",
    "media tokenizer masks writers score alignment transcription",
    "audio attention",
    "model vad corpus pauses",
    "int8 filters virtual",
    "encoding search",
    "decoding",
    "words",
    "hallucination settings",
    "walk",
    "transcriber",
    "loaded",
    "batches checkpoints",
    "jobs upstream huggingface",
    "instruments systems",
    "comparison experiments cost pictures",
    "bench",
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
    assert importing == [PACKAGE / "huggingface.py"]


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
        "decode detect_language transcribe transcribe_all stream Settings Transcription Segment",
        "Word VadOptions",
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
