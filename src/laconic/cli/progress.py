"""How far a run is, in a line: from what its workers report."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from laconic.cli.output import print_stderr
from laconic.units import show_bytes

__all__ = ["Log", "status"]


def status(lines: Sequence[Mapping[str, Any]], *, raw_nbytes: float | None = None) -> str:
    """Iteration, loss, speed and what was not sent, of the newest line of each worker.

    Args:
        lines: The lines, all of one run.
        raw_nbytes: What an iteration of a worker would have sent and received as float32; for lines that do not say it
            (``bytes_raw``). None leaves out what was saved.
    """
    done = min(line["iteration"] for line in lines)
    loss = sum(line["loss"] for line in lines) / len(lines)
    sent = sum(line["bytes_sent"] + line["bytes_received"] for line in lines)
    seconds = max(line["total_s"] for line in lines)
    words = [f"iteration {done}", f"loss {loss:.3f}", f"{sent / max(seconds, 1e-9) / 1e6:.2f} MB/s"]
    raw: float | None = None
    if all("bytes_raw" in line for line in lines):
        raw = sum(line["bytes_raw"] for line in lines)
    elif raw_nbytes is not None:
        raw = raw_nbytes * sum(line["iteration"] for line in lines)
    if raw is not None:
        words.append(f"{show_bytes(max(raw - sent, 0))} saved")
    return ", ".join(words)


class Log:
    """Now and then a line on stderr where that is no terminal, which would show a bar."""

    def __init__(self, every: float = 10.0) -> None:
        self._every, self._next = every, time.monotonic() + every
        self._wanted = not sys.stderr.isatty()

    def __call__(self, line: str) -> None:
        if self._wanted and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            print_stderr(line)
