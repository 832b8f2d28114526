"""Keeps large freed blocks in the process, for passes on the CPU.

glibc gives every block of some 100 KB and more back to the system when it is freed, and each pass takes its activations
anew, page by page: at 1,500 rows of a small model that was a tenth to a fifth of the pass. Memory stays at its peak
instead, which the largest pass sets anyway.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """Ask the allocator to keep freed memory, process-wide; says whether it could."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(mallopt(option, LARGE) for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))
