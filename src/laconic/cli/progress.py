"""Progress lines of training runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from laconic.cli.output import print_stderr
from laconic.units import show_bytes

__all__ = ["ProgressLog", "TimeLeft", "progress_line"]


def progress_line(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return iteration, loss, speed and saved bytes from the newest report of each worker of one run."""
    from laconic.train.reports import summarize

    progress = summarize(reports)
    return (
        f"iteration {progress.iteration}, loss {progress.loss:.3f}, {progress.bytes_per_s / 1e6:.2f} MB/s, "
        f"{show_bytes(progress.bytes_saved)} saved"
    )


class TimeLeft:
    """Estimates the time left from the iterations since its first call, which a resumed run does not begin at 0."""

    def __init__(self, total: int) -> None:
        self._total, self._first = total, (0.0, -1)

    def __call__(self, done: int) -> str:
        """Return ``, 0:01:20 left``, or nothing while too little is known."""
        now, (began, before) = time.monotonic(), self._first
        if before < 0:
            self._first = (now, done)
        if before < 0 or done == before:
            return ""
        return f", {timedelta(seconds=round((self._total - done) * (now - began) / (done - before)))} left"


class ProgressLog:
    """Prints a line on stderr every few seconds if stderr is not a terminal, which would show a progress bar."""

    def __init__(self, every: float = 10.0) -> None:
        self._every, self._next = every, time.monotonic() + every
        self._enabled = not sys.stderr.isatty()

    def __call__(self, line: str) -> None:
        if self._enabled and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            print_stderr(line)
