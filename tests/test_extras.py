"""What the core installs is enough to transcribe; tools name the package that they miss."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import asrmask

PACKAGE = Path(asrmask.__file__).parent
TOOLS = {"jinja2", "jiwer", "librosa", "matplotlib", "pyarrow", "scipy", "tomli"}
ROOMS = {"ablation", "benchmark", "comparison", "inspection", "training"}  # that may import them


def run_without(hidden, *arguments, cwd=None):
    """The command in a process in which some packages cannot be imported."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(hidden)}))\n"
        f"from asrmask.cli import main; sys.exit(main({[str(a) for a in arguments]}))"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_transcribing_needs_no_tool(sample, samples, tmp_path):
    done = run_without(
        TOOLS - {"jinja2"},  # PyTorch needs it
        *("transcribe", sample, "--output_format", "all", "--output_dir", tmp_path),
        *("--word_timestamps", "True", "--vad_filter", "True", "--beam_size", "None"),
    )
    assert done.returncode == 0, done.stderr
    words = (tmp_path / sample.with_suffix(".txt").name).read_text().lower().split()
    assert set(samples[sample].lower().split()) & set(words)


@pytest.mark.parametrize(
    ("command", "package"),
    [
        (["ablate"], "matplotlib"),
        (["bench"], "jiwer"),
        (["compare", "speech.wav"], "jiwer"),
        (["inspect", "speech.wav"], "pyarrow"),
        (["masks", "speech.wav"], "matplotlib"),
        (["report", "ablation"], "matplotlib"),
        (["train", "speech"], "jiwer"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_tool_names_the_package_that_it_misses(command, package, tmp_path):
    done = run_without({package}, *command, cwd=tmp_path)
    told = f"asrmask {command[0]} needs {package}: pip install 'asrmask[tools]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_only_tools_import_the_packages_of_tools():
    """At the top of a file; elsewhere such an import is inside a function."""
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in ROOMS:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module]
            assert not {name.split(".")[0] for name in names} & TOOLS, path


def test_the_tests_know_the_packages_of_tools():
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    listed = text.partition("\ntools = [\n")[2].partition("\n]")[0]
    assert {line.split(">=")[0].strip(' "') for line in listed.splitlines()} == TOOLS
