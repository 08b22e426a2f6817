"""Settings of glibc's malloc for processes that allocate large blocks in every exchange.

By default glibc returns each freed block to the system and requests it anew, and the page faults of fresh memory cost
more than the work that is done in it.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory", "trim"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Keep up to 1 GiB of freed memory in one arena for all threads. Call before any thread starts."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 1 << 30)):
            mallopt(option, value)


def trim() -> None:
    """Return unused memory to the system."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
