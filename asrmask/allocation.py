"""What becomes of memory that a tensor has let go."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_freed_memory(keep: bool = True) -> None:
    """Keep it in this process for the next tensor, where the C library can be told so (glibc).

    Otherwise every large result is fresh memory, which the kernel has to clear page by page: a
    fifth of the time of short clips. But while a model is loaded, what is kept would lie around its
    weights for good. It holds for the whole process, so a command asks for it, and the library does
    not.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20 if keep else 128 << 10)
        mallopt(M_TRIM_THRESHOLD, 1 << 30 if keep else 128 << 10)


def give_back() -> None:
    """Give the kernel what is free now, once: after weights were converted."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
