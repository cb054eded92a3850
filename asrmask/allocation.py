"""What becomes of memory that is not needed any more."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MADV_DONTNEED = 4  # of Linux's mman.h


@contextmanager
def loading() -> Iterator[None]:
    """Within it a model is loaded, for a command that then works with it until it ends.

    While it is loaded, freed memory goes back to the kernel at once: what is kept would lie around
    its weights for good. Afterwards it is kept for the next tensor, where the C library can be told
    so (glibc): otherwise every large result is fresh memory, which the kernel has to clear page by
    page, a fifth of the time of short clips. That holds for the whole process, so a command asks
    for it, and the library does not.
    """
    _keep_freed_memory(False)
    give_back()
    yield
    give_back()
    _keep_freed_memory(True)


def _keep_freed_memory(keep: bool) -> None:
    mallopt = _of_libc("mallopt")
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20 if keep else 128 << 10)
        mallopt(M_TRIM_THRESHOLD, 1 << 30 if keep else 128 << 10)


def give_back() -> None:
    """Give the kernel what start-up has left: free memory, and the code of libraries.

    Code comes back from the kernel's cache where it is run again: most of PyTorch's is run when it
    is imported, and then never.
    """
    trim()
    madvise = _of_libc("madvise")
    if madvise is not None:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, rights, *_, name = line.split(maxsplit=5)
            if rights == "r-xp" and ".so" in name:  # never written to, so nothing is lost
                first, end = (int(address, 16) for address in span.split("-"))
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_DONTNEED)


def trim() -> None:
    """Give the kernel what is free now."""
    malloc_trim = _of_libc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_libc(name: str) -> "ctypes._FuncPointer | None":
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
