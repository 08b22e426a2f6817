"""Fill generated blocks of Markdown pages: the text between ``<!-- name:begin -->`` and ``<!-- name:end -->``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from laconic.errors import FileError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def fill(page: str, name: str, text: str) -> str:
    """Return the page with the text of one block replaced; ``FileError`` where the block's markers are missing."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, marker, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not marker or not ended:
        raise FileError(f"the page has no block {name!r}: add the lines {begin} and {end}, in this order")
    return f"{before}{begin}\n{text}\n{end}{after}"


def update(wanted: Mapping[Path, str], *, check: bool, command: str) -> int:
    """Write the files whose text is not as wanted, or with ``check`` only name them; return the exit code."""
    stale = {
        path: text
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }  # fmt: skip
    for path, text in stale.items():
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        if check:
            print(f"{name} is stale: run {command}", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"{name}: rewritten")
    return int(check and bool(stale))
