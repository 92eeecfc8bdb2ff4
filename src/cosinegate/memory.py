"""Keeps freed memory in the process.

Training on a CPU frees and takes the same feature maps at every step. glibc gives blocks of that size back to the
system each time, which then hands out zeroed pages again.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
LARGEST_MAPPED = 32 * 2**20  # the most that glibc takes


def keep_freed_memory() -> None:
    """Does nothing where the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MAPPED)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, 64 * 2**20)
