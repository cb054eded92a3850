"""Data files and tables of the installed openai-whisper, read without importing its code.

Importing openai-whisper takes seconds and pulls in numba; its vocabulary, Mel filters and model
registry are plain data that lie beside the code.
"""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@cache
def folder() -> Path:
    """Where openai-whisper is installed."""
    spec = find_spec("whisper")
    locations = spec.submodule_search_locations if spec else None
    if not locations:
        raise ModuleNotFoundError("openai-whisper is not installed: pip install openai-whisper")
    return Path(locations[0])


def path(name: str) -> Path:
    """The asset file of that name: a vocabulary or the Mel filters."""
    return folder() / "assets" / name


@cache
def table(module: str, name: str) -> Any:
    """The literal that `module` (a file of openai-whisper) assigns to `name`."""
    tree = ast.parse((folder() / module).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            return ast.literal_eval(node.value)
    raise LookupError(f"{module} of the installed openai-whisper assigns no {name}")
