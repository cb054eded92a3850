"""Write files atomically."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(path: Path, *, binary: bool = False) -> Iterator[Any]:
    """Open a temporary file that replaces `path` when the block ends without an error.

    Text is UTF-8; undecoded bytes of file names (surrogates) are escaped.
    """
    text: dict[str, Any] = {} if binary else {"encoding": "utf-8", "errors": "backslashreplace"}
    # named before it is created, so that it is removed after an interruption at any point
    temporary = path.parent / f".asrmask-{secrets.token_hex(6)}"
    try:
        with open(temporary, "xb" if binary else "x", **text) as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
