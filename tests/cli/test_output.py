"""Tables and texts on terminals that have only ASCII."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from laconic.cli.output import encode_everything, print_json, print_table, print_text
from laconic.tables import Table


@pytest.fixture
def ascii_stdout() -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    encode_everything(stream)
    return stream


def written(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("ascii")


def test_cells_are_spelled_before_columns_get_their_width(ascii_stdout: io.TextIOWrapper) -> None:
    with redirect_stdout(ascii_stdout):
        print_table(Table(("codec", "error"), [("a", "1 ± 2 …"), ("b", "3")]))
        print_text("é, 5 µs and 中")
    *table, text = written(ascii_stdout).splitlines()
    assert len({len(line.rstrip()) for line in table}) == 1 and "1 +- 2 ..." in table[3]
    assert text == "e, 5 us and ?"


def test_json_escapes_what_the_terminal_does_not_have(ascii_stdout: io.TextIOWrapper) -> None:
    with redirect_stdout(ascii_stdout):
        print_json({"name": "…"})
    assert r'"name": "\u2026"' in written(ascii_stdout)
