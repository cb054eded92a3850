"""Memory settings of the command: Python's garbage, and how the C library treats freed memory."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

# once in a process: garbage that exists then is never collected
_freeze = cache(gc.freeze)


@contextmanager
def keep_all_objects() -> Iterator[None]:
    """Collect no garbage in the block, nor what exists at its end: imports and models stay anyway.

    Looking for garbage among them takes a fifth of a short command's time, half of it when the
    process ends. This holds for the whole process, so commands call it and the library does not.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _freeze()
        if was_enabled:
            gc.enable()


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next tensor, where it can be told so (glibc).

    Otherwise every large tensor is new memory, which the kernel clears page by page. This holds for
    the whole process, so commands call it and the library does not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
