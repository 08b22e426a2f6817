"""The event log of a server: one JSON object a line in ``events.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_events"]

_LINE_START = '{"at": '


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events of a log file; a line that a crash or a full disk cut off is skipped.

    A restarted server may have continued a cut-off line, so each line is read from its last event on.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line[max(0, line.rfind(_LINE_START)) :]) for line in lines if line.endswith("}")]
