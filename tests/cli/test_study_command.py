from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Run

from laconic.records import read

SMALL = ("study", "oland2015", "--runs", "1", "--epochs", "1", "--workers", "2")


def test_table_says_claimed_measured_and_verdict(run: Run) -> None:
    result = run(*SMALL)
    assert result.exit_code == 0, result.output
    for text in ("What the paper claims", "3.55 bits", "adaptive:5|huffman", "one run", "digits"):
        assert text in result.stdout


def test_json_records_and_figures(run: Run, here: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(*SMALL, "--records", "kept", "--figures", "drawn", "--json")
    found = json.loads(result.stdout)
    assert (found["records"], found["runs"], found["packets_that_differ"]) == (3, 3, 0)
    assert found["claims"][0]["claimed"] == 6.8 and found["claims"][0]["runs"] == 1
    assert len(read(here / "kept" / "headline.jsonl")) == 3
    assert (here / "drawn" / "figure5.svg").exists() and "figure5.svg written" in result.stderr
    again = run("study", "oland2015", "--part", "report", "--records", "kept", "--json")
    assert json.loads(again.stdout)["claims"] == found["claims"]


@pytest.mark.parametrize(
    "args, code, words",
    [
        (["nobody1999"], 2, "unknown study 'nobody1999'"),
        (["oland2015", "--part", "figure9"], 2, "unknown part 'figure9'"),
        (["oland2015", "--part", "report"], 2, "--records"),
        (["oland2015", "--part", "report", "--part", "map"], 2, "give it alone"),
        (["oland2015", "--part", "report", "--records", "."], 1, "no records of the study"),
        (["oland2015", "--lr", "0"], 2, "expected lr > 0"),
        (["oland2015", "--device", "tpu"], 2, "device must be auto, cpu or cuda"),
        (["oland2015", "--data", "mnist", "--data-dir", "."], 1, "mnist is read from"),
        (["oland2015", "--data", "faces"], 2, "unknown data set 'faces'"),
    ],
)
def test_bad_arguments_are_told_in_one_line(run: Run, here: Path, args: list[str], code: int, words: str) -> None:
    result = run("study", *args)
    assert result.exit_code == code
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1 and not result.stdout
