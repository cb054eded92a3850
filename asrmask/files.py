"""Files that are written whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path, *, binary: bool = False) -> Iterator[Any]:
    """A file to write that takes the place of `path` when the block ends without an error."""
    # named before it is there, so that an interruption at any point takes it away
    temporary = path.parent / f".asrmask-{secrets.token_hex(6)}"
    try:
        with temporary.open("xb" if binary else "x", encoding=None if binary else "utf-8") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
