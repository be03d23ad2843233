"""Memory that stays with a process once it has it."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's malloc.h


def keep_freed() -> None:
    """Tells the C library to return no freed memory to the system.

    Else every large result is made of pages that the system must first fill with zeros, which takes several times as long as to
    write them, and whether it is depends on what was freed before. XLA's CPU backend asks for the memory of a step in every step
    anew. No-op without glibc.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for option, value in ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_THRESHOLD, 2**30), (_ARENA_MAX, 1)):
            mallopt(option, value)
