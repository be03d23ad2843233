"""Settings of the C library's memory allocator."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def keep_freed() -> None:
    """Configure the C library to keep freed memory; no-op without glibc.

    Otherwise XLA's CPU backend, which allocates the memory of a step in every step, would write to new pages that the system must
    first fill with zeros.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for option, value in ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_THRESHOLD, 2**30), (_ARENA_MAX, 1)):
            mallopt(option, value)
