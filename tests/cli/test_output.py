"""Tables and texts on terminals that have only ASCII, and progress on narrow ones."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout

import pytest
from rich.console import Console
from rich.progress import Progress

from laconic.cli.output import encode_everything, print_json, print_table, print_text, progress_bar
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
    assert len({len(line) for line in table}) == 1 and "1 +- 2 ..." in table[3]
    assert set(table[2]) == {" ", "-"} and "|" not in "".join(table)  # "|" joins the stages of a codec
    assert text == "e, 5 us and ?"


def test_json_escapes_what_the_terminal_does_not_have(ascii_stdout: io.TextIOWrapper) -> None:
    with redirect_stdout(ascii_stdout):
        print_json({"name": "…"})
    assert r'"name": "\u2026"' in written(ascii_stdout)


def test_progress_is_one_line_of_80_columns_and_says_only_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("starting") as (bar, task):
        started = drawn(bar)
        bar.update(task, description=f"method laconic: {'iteration 2000, loss 1.862, ' * 4}", total=100)
        for done in (1, 2, 3):
            bar.update(task, completed=done)
        (line,) = drawn(bar)
    assert [line.rstrip() for line in started] == ["starting"]
    assert len(line) <= 80 and line.startswith("method laconic: ") and re.search(r"3 %, \d+:\d\d:\d\d left$", line)


def drawn(bar: Progress) -> list[str]:
    console = Console(width=bar.console.width, file=io.StringIO())
    with console.capture() as caught:
        console.print(bar.get_renderable())
    return caught.get().splitlines()


def test_long_name_is_broken_between_its_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "local 32,fragments=2,overlap=12 ef|sign"
    print_table(Table(("codec", "bytes", "quality"), [(name, "8.74 kB", "no evidence with more workers " * 2)]))
    lines = [line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert "local 32,fragments=2," in lines and "overlap=12 ef|sign" in lines
    print_table(Table(("codec", "bytes"), [(name, "8.74 kB")]))
    assert name in capsys.readouterr().out
