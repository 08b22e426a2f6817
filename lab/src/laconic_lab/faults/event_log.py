"""The events of a job, of which only the newest are held in memory.

A soak of half an hour has 150,000 events: kept in a list they would grow the process that is watched for leaks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["EventLog"]

NEWEST = 1000
"""Events that are held in memory, at least; twice as many at most."""


class EventLog:
    """A log to which several threads append.

    Args:
        path: A file for the older events; it is made when there are more than fit into memory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._newest: list[dict[str, Any]] = []
        self._written = 0
        self._lock = threading.Lock()

    def append(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._newest.append(event)
            if len(self._newest) >= 2 * NEWEST:
                with self._path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(older) + "\n" for older in self._newest[:NEWEST])
                del self._newest[:NEWEST]
                self._written += NEWEST

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return the events from a number on; those that are no longer in memory are left out."""
        with self._lock:
            return self._newest[max(0, number - self._written) :]

    def __len__(self) -> int:
        return self._written + len(self._newest)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._lock:
            written, newest = self._written, list(self._newest)
        if written:
            with self._path.open(encoding="utf-8") as file:
                for _, line in zip(range(written), file, strict=False):  # others may go on writing
                    yield json.loads(line)
        yield from newest
