"""How much others computed on this machine while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Others"]


class Others:
    """The share of all cores that went to processes not named, since the last look; None where the kernel hides it.

    Interrupts are nobody's, so a busy network counts for a little.

    >>> 0 <= (Others([os.getpid()]).share() or 0.0) <= 1
    True
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._last = self._look()

    def share(self) -> float | None:
        before, self._last = self._last, self._look()
        if before is None or self._last is None:
            return None
        wall, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        room = wall * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (busy - own) / room)) if room > 0 else 0.0

    def _look(self) -> tuple[float, float, float] | None:
        """Seconds by the clock, of all processors at work, and of one's own processes."""
        tick = os.sysconf("SC_CLK_TCK")
        try:
            user, nice, system, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
        except (OSError, ValueError):
            return None
        own = 0
        for pid in self._pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                own += int(fields[11]) + int(fields[12])
            except (OSError, ValueError, IndexError):
                continue  # it has ended
        return time.monotonic(), (user + nice + system) / tick, own / tick
