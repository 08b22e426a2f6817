"""Records for tests of the report, and the data that a page embeds."""

from __future__ import annotations

import json
import re
from typing import Any

from laconic.records import Record


def record(kind: str, **values: Any) -> Record:
    """Return a Record without the properties of this machine, which take time to read."""
    about: dict[str, Any] = {"machine": {"cpu": "a chip", "cores": 2}, "versions": {"laconic": "0"}}
    return Record(kind, values, commit="abc", at="2026-01-01T00:00:00+00:00", **about)


def embedded(text: str) -> dict[str, Any]:
    """Return the JSON block of a page."""
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert block
    values: dict[str, Any] = json.loads(block[1])
    return values
