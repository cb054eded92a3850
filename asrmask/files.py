"""Files that are written whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def _text(path: Path) -> IO[str]:
    """A new text file: UTF-8, and file names that are not are spelled out."""
    return path.open("x", encoding="utf-8", errors="backslashreplace")


@contextmanager
def replacing(path: Path, *, binary: bool = False) -> Iterator[Any]:
    """A file to write that takes the place of `path` when the block ends without an error."""
    # named before it is there, so that an interruption at any point takes it away
    temporary = path.parent / f".asrmask-{secrets.token_hex(6)}"
    try:
        with temporary.open("xb") if binary else _text(temporary) as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
