"""How the C library treats freed memory."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next tensor, where it can be told so (glibc).

    Otherwise every large tensor is new memory, which the kernel clears page by page. This holds for
    the whole process, so commands call it and the library does not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
