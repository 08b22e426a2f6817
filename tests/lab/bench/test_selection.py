"""``laconic bench``: which codecs and which data, and the table of entropy coders."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from laconic.cli.app import app

SMALL = ("--numel", "20000", "--repeat", "2")


def bench(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", *args], prog_name="laconic")


def test_coders_are_compared_with_stock_coders() -> None:
    result = bench("uniform:8|huffman", "--data", "weights", *SMALL)
    assert result.exit_code == 0, result.output
    for text in ("entropy %", "weights", "uniform:8|huffman", "zlib, Huffman only", "two threads"):
        assert text in result.stdout
    assert "plain torch" not in result.stdout and "zlib level 1" not in result.stdout


def test_only_selects_a_set() -> None:
    result = bench("--only", "coders", "--data", "grads", "--no-peers", "--json", *SMALL)
    printed = json.loads(result.stdout)
    assert printed["command"] == "laconic bench --only coders --numel 20000 --repeat 2 --data grads"
    assert printed["data"] == ["grads"] and {codec["data"] for codec in printed["codecs"]} == {"grads"}
    assert all(codec["over_entropy_percent"] > 0 for codec in printed["codecs"])


@pytest.mark.parametrize("args, words", [
    (["--only", "nothing"], "--only must be codecs or coders, got 'nothing'"),
    (["sign", "--only", "coders"], "exclude each other"),
    (["sign", "--data", "noise"], "data must be among gaussian, weights, grads, got noise"),
])  # fmt: skip
def test_invalid_selection_gives_one_line(args: list[str], words: str) -> None:
    result = bench(*args)
    assert result.exit_code == 2
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1 and not result.stdout
