"""How much other processes use the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["OtherProcesses"]


class OtherProcesses:
    """Measures the share of all cores that processes other than the given ones use.

    Children of the given processes that have ended count as theirs. Interrupts belong to no process, so a busy network
    counts a little.

    >>> 0 <= (OtherProcesses([os.getpid()]).share() or 0.0) <= 1
    True
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._last = self._read()

    def share(self) -> float | None:
        """Return the share since the last call, or since the start; None where the system does not tell."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None:
            return None
        wall, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        available = wall * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (busy - own) / available)) if available > 0 else 0.0

    def _read(self) -> tuple[float, float, float] | None:
        """Return seconds of the clock, of all cores at work, and of the given processes."""
        tick = os.sysconf("SC_CLK_TCK")
        try:
            user, nice, system, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
        except (OSError, ValueError):
            return None
        own = 0
        for pid in self._pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                own += sum(map(int, fields[11:15]))
            except (OSError, ValueError):
                continue  # it has ended
        return time.monotonic(), (user + nice + system) / tick, own / tick
