"""Write files atomically."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def _text(path: Path) -> IO[str]:
    """Create a text file in UTF-8. Undecoded bytes in file names (surrogates) are escaped."""
    return path.open("x", encoding="utf-8", errors="backslashreplace")


@contextmanager
def atomic_write(path: Path, *, binary: bool = False) -> Iterator[Any]:
    """Open a temporary file that replaces `path` when the block ends without an error."""
    # named before it is created, so that it is removed after an interruption at any point
    temporary = path.parent / f".asrmask-{secrets.token_hex(6)}"
    try:
        with temporary.open("xb") if binary else _text(temporary) as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
