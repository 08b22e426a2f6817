"""Running processes, from /proc: for tests that no process outlives its launcher."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def running(folder: Path) -> list[list[str]]:
    """Return the command lines of running processes that name this folder or a path in it."""
    commands = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_text().split("\0")
                dead = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue  # it has ended in the meantime
            if not dead and any(word.startswith(str(folder)) for word in words):
                commands.append(words)
    return commands


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    """Poll a condition; return whether it became true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
