"""The event log of a server: one JSON object per line in ``events.jsonl``."""

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

_LINE_START = '{"at": '


class EventLog:
    """Appends events to a file, from any thread. If the disk is full, one warning is logged and training continues."""

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)
        self._lock = threading.Lock()
        self._failed = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        line = json.dumps({"at": round(time.time(), 6), **event})
        with self._lock:
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except OSError as error:
                if not self._failed:
                    log.warning("cannot write the event log any more: %s", error.strerror)
                self._failed = True


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events of a log file; a line that a crash or a full disk cut off is skipped.

    A restarted server may have continued a cut-off line, so each line is read from its last event on.
    """
    lines = read_regular_text(path).splitlines() if path.exists() else []
    return [json.loads(line[max(0, line.rfind(_LINE_START)) :]) for line in lines if line.endswith("}")]
