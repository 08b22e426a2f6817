"""Who is still running, by /proc: for tests that nothing outlives its launcher."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def running(folder: Path) -> list[list[str]]:
    """Command lines of living processes that name this folder, or one in it."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_text().split("\0")
                dead = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue  # it has ended in the meantime
            if not dead and any(word.startswith(str(folder)) for word in words):
                found.append(words)
    return found


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
