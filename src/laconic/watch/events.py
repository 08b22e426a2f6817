"""The event log of a server: one JSON object per line in ``events.jsonl``.

The log of a long run is bounded: a file of ``MAX_BYTES`` becomes ``events.1.jsonl``, in place of an earlier one, and a
new file begins with the event ``log_began``. So the last 32 to 64 MiB of events are kept.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic.json_files import read_regular_text
from laconic.watch.folder import open_to_append

__all__ = ["EventLog", "read_events"]

log = logging.getLogger("laconic")

MAX_BYTES = 32 << 20
"""Bytes of a file of events: some hundred thousand pushes."""
_LINE_START = '{"at": '


class EventLog:
    """Appends events to a file, from any thread. If the disk is full, one warning is logged and training continues.

    Args:
        max_bytes: The size at which a new file begins.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file = open_to_append(path)
        self._nbytes = path.stat().st_size
        self._lock = threading.Lock()
        self._failed = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            try:
                if self._nbytes >= self._max_bytes:
                    self._begin_file()
                self._write(event)
            except OSError as error:
                if not self._failed:
                    log.warning("cannot write the event log any more: %s", error.strerror)
                self._failed = True

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _write(self, event: Mapping[str, Any]) -> None:
        line = json.dumps({"at": round(time.time(), 6), **event}) + "\n"
        self._nbytes += len(line)  # json.dumps writes ASCII
        self._file.write(line)
        self._file.flush()

    def _begin_file(self) -> None:
        """Keep the full file under its second name and begin an empty one."""
        dropped = _earlier(self._path).exists()
        self._path.replace(_earlier(self._path))
        self._file.close()
        self._file, self._nbytes = self._path.open("a", encoding="utf-8"), 0
        self._write({"event": "log_began", "dropped": dropped})


def _earlier(path: Path) -> Path:
    return path.with_name(f"{path.stem}.1{path.suffix}")


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events of a log, also those of its earlier file; a line that a crash or a full disk cut off is skipped.

    Events before these are gone if there is an event ``log_began`` with ``dropped``.

    A restarted server may have continued a cut-off line, so each line is read from its last event on.
    """
    files = [file for file in (_earlier(path), path) if file.exists()]
    lines = [line for file in files for line in read_regular_text(file).splitlines()]
    return [json.loads(line[max(0, line.rfind(_LINE_START)) :]) for line in lines if line.endswith("}")]
