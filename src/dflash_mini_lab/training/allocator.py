"""Freed memory that stays with the process. A training step and a batch of answers allocate what the one before has freed, and
glibc hands large blocks back to the system each time: fetching them again is a quarter of a batch's time (docs/lab-log.md)."""
from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Of <malloc.h>."""
LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """For the rest of the process; whether the C library could be told (glibc alone can)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl and macOS have no mallopt; Windows has no library without a name
        return False
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, LARGEST_INT), mallopt(M_TOP_PAD, 64 << 20)])
