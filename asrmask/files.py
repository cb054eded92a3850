"""Files that are written whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path, *, binary: bool = False) -> Iterator[Any]:
    """A file to write that takes the place of `path` when the block ends without an error."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".asrmask-")
    try:
        with os.fdopen(handle, "wb" if binary else "w", encoding=None if binary else "utf-8") as f:
            yield f
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
