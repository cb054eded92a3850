"""README and docs: Python snippets run, commands parse, links and named code exist."""

import ast
import contextlib
import io
import os
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from asrmask import cli
from asrmask.ablation import spec
from asrmask.model.policy import Policy
from asrmask.systems import Named
from asrmask.training import spec as training_spec

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "data/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
REDIRECTIONS = {">", ">>", "<", "|", "2>", "&&", ";"}
# pages that may name flags and files of older versions
OLD = {"CHANGELOG.md"}


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line that it begins at."""

    language: str
    text: str
    line: int


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2], text[: m.start()].count("\n") + 2) for m in FENCE.finditer(text)]


def prose(page):
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page):
    return re.findall(r"`([^`\n]+)`", prose(page))


def named(pages):
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


# Python

WITH_PYTHON = [page for page in PAGES if any(b.language == "python" for b in blocks(page))]


@pytest.mark.parametrize("page", named(WITH_PYTHON))
def test_python_snippets_print_what_the_page_shows(page, tmp_path, monkeypatch):
    """The snippets of a page are one program; a ```text block after one is what it prints."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    names = {}
    found = blocks(page)
    n_shown = 0
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language != "python":
            continue
        printed = io.StringIO()
        # as many lines above it as in the page, so that errors name the page's line
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if after is not None and after.language == "text":
            assert printed.getvalue() == after.text
            n_shown += 1
    assert n_shown, "no snippet shows its output"


def test_every_shown_output_belongs_to_a_snippet():
    for page in PAGES:
        languages = [block.language for block in blocks(page)]
        for before, language in zip([None, *languages], languages, strict=False):
            assert language in {"python", "text", "sh", "toml"}, f"{page}: ```{language}"
            assert language != "text" or before == "python", f"{page}: output of what?"


def test_specs_are_read(tmp_path):
    texts = [(page.stem, b.text) for page in PAGES for b in blocks(page) if b.language == "toml"]
    assert {name for name, _ in texts} == {"ablation", "train"}
    for name, text in texts:
        path = tmp_path / "spec.toml"
        path.write_text(text, encoding="utf-8")
        if name == "train":
            assert training_spec.read(path).policies == training_spec.TrainSpec().policies
        else:
            assert len(spec.read(path).cells()) > len(spec.BASIC)


# commands


def words_of(line):
    """The words of a shell line before any redirection, without its comment."""
    words = shlex.split(line, comments=True)
    ends = [i for i, word in enumerate(words) if word in REDIRECTIONS]
    return words[: ends[0]] if ends else words


def command_lines():
    """Every line of a shell block that begins with a program of ours."""
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh":
                for i, line in enumerate(block.text.splitlines()):
                    yield f"{page.name}:{block.line + i}", words_of(line)


def whole_commands():
    """The arguments of `asrmask` in shell blocks, and in tables of results."""
    for place, words in command_lines():
        if words[:1] == ["asrmask"]:
            yield place, words[1:]
    for code in inline_code(ROOT / "docs" / "results.md"):
        if code.startswith("asrmask ") and len(words_of(code)) > 2:
            yield "results.md", words_of(code)[1:]


@pytest.fixture
def parsed(monkeypatch):
    """A function: the arguments that a command would be run with."""

    def parse(arguments):
        found = []
        command = import_module(f"asrmask.cli.{arguments[0]}")
        monkeypatch.setattr(command, "run", lambda args: found.append(args) or 0)
        assert cli.main(arguments) == 0
        return found[0]

    return parse


def test_commands_parse(parsed):
    n_commands = dict.fromkeys(cli.COMMANDS, 0)
    for place, arguments in whole_commands():
        try:
            args = vars(parsed(arguments))
        except SystemExit as stopped:
            pytest.fail(f"{place}: asrmask {shlex.join(arguments)} ends with {stopped.code}")
        n_commands[arguments[0]] += 1
        for name in ("padding", "against") if arguments[0] in {"inspect", "masks"} else ["padding"]:
            if args.get(name) is not None:
                Policy.parse(args[name])
        for system in args.get("systems") or []:
            Named.parse(system)
        if args.get("preset") is not None:
            assert args["preset"] in spec.PRESETS
    assert all(n_commands.values()), f"no example of some command: {n_commands}"


def flags_of(name):
    """Every flag of a command, with _ between words."""
    parser = cli.Parser(prog=name)
    import_module(f"asrmask.cli.{name}").add_arguments(parser)
    return set(parser._option_string_actions)


def test_flags_in_prose_exist():
    known = {flag for name in cli.COMMANDS for flag in flags_of(name)}
    n_checked = 0
    for page in PAGES:
        if page.name in OLD:
            continue
        for code in inline_code(page):
            if code.startswith("asrmask ") and "[" not in code:
                name = code.split()[1]
                assert name in cli.COMMANDS, f"{page.name}: {code}"
                allowed = flags_of(name)
            elif code.startswith("--"):
                allowed = known
            else:
                continue
            for word in code.split():
                if word.startswith("--"):
                    assert cli.underscored(word).partition("=")[0] in allowed, (
                        f"{page.name}: {code}"
                    )
                    n_checked += 1
    assert n_checked > 20


def test_scripts_in_docs_exist():
    from_blocks = [words[0] for _, words in command_lines() if words]
    from_prose = [code.split()[0] for page in PAGES for code in inline_code(page)]
    used = {word for word in [*from_blocks, *from_prose] if re.match(r"(scripts|\.ci)/\w", word)}
    assert {"scripts/quickstart", "scripts/test", ".ci/run"} <= used
    old = {"scripts/parity"}  # the changelog says what took its place
    missing = [name for name in used - old if not os.access(ROOT / name, os.X_OK)]
    assert not missing


# links and code


def slug(heading):
    """The anchor of a heading, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.strip().replace(" ", "-")


def test_links_and_images_lead_somewhere():
    n_links = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            found = page.parent / path if path else page
            assert found.exists(), f"{page.name}: {target}"
            assert found.resolve().is_relative_to(ROOT), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", prose(found), re.M)
                assert anchor in map(slug, headings), f"{page.name}: {target}"
            n_links += 1
    assert n_links > 30


def test_every_image_is_shown():
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", prose(page))
    }
    images = set((ROOT / "docs" / "images").iterdir())
    assert images
    assert images <= shown
    assert all(path.stat().st_size < 150_000 for path in shown)


def names_in(path):
    """What a module defines: functions, classes, constants, and methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
                found |= {f"{node.name}.{name}" for name in methods}
    return found


def test_files_named_in_docs_exist():
    paths = {
        code
        for page in PAGES
        if page.name not in OLD
        for code in inline_code(page)
        if re.fullmatch(r"(asrmask|tests|scripts|docs|data|\.github)/[\w./-]+", code)
    }
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_functions_named_in_docs_exist():
    """`model/attention.py:attend` is a name of that module."""
    references = {
        (match[1], match[2])
        for page in PAGES
        for code in inline_code(page)
        if (match := re.fullmatch(r"([\w/]+\.py):([\w.]+)", code))
    }
    assert len(references) > 30
    wrong = [
        f"{path}:{name}"
        for path, name in sorted(references)
        if not (ROOT / "asrmask" / path).is_file() or name not in names_in(ROOT / "asrmask" / path)
    ]
    assert not wrong, wrong


def test_rooms_are_all_in_the_design():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    folders = [path.parent.name for path in (ROOT / "asrmask").glob("*/__init__.py")]
    assert len(folders) > 10
    assert not [name for name in folders if f"`{name}/`" not in text]


# what pages promise


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


def test_pages_stand_alone():
    for page in PAGES:
        assert "shared/" not in page.read_text(encoding="utf-8"), page.name


def test_python_versions_agree():
    """README, the workflow and the package name the same versions."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    versions = re.findall(r'"(3\.\d+)"', workflow)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"Python (3\.\d+) to (3\.\d+)", readme) == [(versions[0], versions[-1])]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={versions[0]}' in project
    listed = re.findall(r"Python :: (3\.\d+)", project)
    assert listed in ([], versions)
