"""Read data of the installed openai-whisper without importing it.

Importing openai-whisper takes seconds and loads numba. Its vocabulary, Mel filters and model
registry are plain data in the package's folder.
"""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asrmask.errors import MissingPackageError


@cache
def folder() -> Path:
    """Return the folder of the installed openai-whisper."""
    spec = find_spec("whisper")
    locations = spec.submodule_search_locations if spec else None
    if not locations:
        raise MissingPackageError("asrmask", "openai-whisper", "openai-whisper")
    return Path(locations[0])


def path(name: str) -> Path:
    """Return the path of an asset file: a vocabulary or the Mel filters."""
    return folder() / "assets" / name


@cache
def table(module: str, name: str) -> Any:
    """Return the literal that `module`, a file of openai-whisper, assigns to `name`."""
    for node in ast.parse((folder() / module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return ast.literal_eval(node.value)
    raise LookupError(f"{module} of the installed openai-whisper assigns no {name}")
