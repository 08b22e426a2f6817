"""How much other processes use the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["OtherProcesses"]

KERNEL_THREADS = 2
"""The process whose children are threads of the kernel."""


class OtherProcesses:
    """Measures the share of all cores that processes other than the given ones use.

    Children of the given processes that have ended count as theirs. Threads of the kernel do not count: they carry the
    packets of the given processes, too. Processes that this one cannot see do not count either.

    >>> 0 <= (OtherProcesses([os.getpid()]).share() or 0.0) <= 1
    True
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = frozenset(pids)
        self._last = self._read()

    def share(self) -> float | None:
        """Return the share since the last call, or since the start; None where the system does not tell."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None:
            return None
        wall, others = (now - then for now, then in zip(self._last, before, strict=True))
        available = wall * (os.cpu_count() or 1)
        return min(1.0, max(0.0, others / available)) if available > 0 else 0.0

    def _read(self) -> tuple[float, float] | None:
        """Return seconds of the clock, and of other processes and their ended children."""
        tick, ticks, readable = os.sysconf("SC_CLK_TCK"), 0, False
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = file.read_text().rpartition(")")[2].split()
                pid, parent = int(file.parent.name), int(fields[1])
                if KERNEL_THREADS not in (pid, parent):
                    readable = True
                    ticks += 0 if pid in self._pids else sum(map(int, fields[11:15]))
            except (OSError, ValueError, IndexError):
                continue  # it has ended
        return (time.monotonic(), ticks / tick) if readable else None
