"""Rows that a page offers as CSV, written by its own script."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest

node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed: JavaScript is not run")


def written(columns: list[str], cells: list[list[Any]]) -> str:
    """Return the CSV of a table."""
    script = (resources.files("laconic.report") / "assets" / "drawing.js").read_text(encoding="utf-8")
    table = json.dumps({"columns": columns, "cells": [{"numbers": column} for column in cells]})
    call = f"process.stdout.write(new laconic.Table({table}).csv());"
    source = f"{script}\n{call}".encode()
    return subprocess.run(["node", "-"], input=source, capture_output=True, timeout=60, check=True).stdout.decode()


@node
def test_text_that_a_spreadsheet_would_execute_is_neutralised() -> None:
    texts = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", '=HYPERLINK("x")', "a=1", "ef|topk:0.01", ""]
    text = written(["=name", "x"], [texts, [-1.5, -2, 3, None, 5, 6, 7, 8, 9, 10]])
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows[0] == ["'=name", "x"]
    assert [row[0] for row in rows[1:]] == [*(f"'{text}" for text in texts[:7]), *texts[7:]]
    assert [row[1] for row in rows[1:4]] == ["-1.5", "-2", "3"], "numbers stay numbers"
