"""Running processes, from /proc: for tests that no process outlives its launcher."""

from __future__ import annotations

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
