"""How a process of a cluster keeps its memory: large blocks come and go with every exchange.

By default glibc gives each of them back to the system when it is freed and asks for it anew, and touching fresh memory
costs more than what is then done with it.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed", "trim"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


def keep_freed() -> None:
    """Keep what is freed for the next exchange, up to a GiB, for all threads together. Early, before there are any."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 1 << 30)):
            mallopt(option, value)


def trim() -> None:
    """Give back what nobody uses."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
