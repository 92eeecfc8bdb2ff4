"""How much memory there is, and freed memory kept in the process.

Training on a CPU frees and allocates the same feature maps at every step. By default glibc returns blocks of that size
to the system each time, which hands out zeroed pages again.
"""

import ctypes
import os
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container
LARGEST_MAPPED = 32 * 2**20  # the most that glibc takes


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def keep_freed_memory() -> None:
    """Sets glibc's thresholds; does nothing with another C library."""
    if (libc := _glibc()) is not None:
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MAPPED)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, 64 * 2**20)


def give_back_freed_memory() -> None:
    """Returns free memory to the system, called now and then: fragments would grow over the epochs."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def total_memory() -> int:
    """Returns the bytes that this machine has, or that its container may take."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return machine
