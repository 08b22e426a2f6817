from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cli_runner import Run, help_text
from laconic.records import read

SMALL = ("study", "oland2015", "--runs", "1", "--epochs", "1", "--workers", "2")


def test_table_shows_claim_how_and_verdict(run: Run) -> None:
    result = run(*SMALL)
    assert result.exit_code == 0, result.output
    for text in ("Claims", "3.55", "measured", "adaptive:5|huffman", "one run", "digits"):
        assert text in result.stdout


def test_json_records_and_figures(run: Run, work_dir: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(*SMALL, "--records", "kept", "--figures", "drawn", "--json")
    printed = json.loads(result.stdout)
    assert (printed["records"], printed["runs"], printed["packets_that_differ"]) == (3, 3, 0)
    assert printed["claims"][0]["claimed"] == 6.8 and printed["claims"][0]["runs"] == 1
    assert printed["claims"][0]["how"] == "fitted"
    assert len(read(work_dir / "kept" / "headline.jsonl")) == 3
    assert (work_dir / "drawn" / "figure5.svg").exists() and "figure5.svg written" in result.stderr
    again = run("study", "oland2015", "--part", "report", "--records", "kept", "--json")
    assert json.loads(again.stdout)["claims"] == printed["claims"]


@pytest.mark.usefixtures("_restore_num_threads")
def test_json_counts_runs_and_compared_frames(run: Run, work_dir: Path) -> None:
    torch.set_num_threads(1)
    flags = ("--models", "lenet5", "--methods", "1,5", "--seeds", "0", "--data", "digits", "--epochs", "1")
    result = run("study", "kothari2021", *flags, "--records", "kept", "--device", "cpu", "--json")
    printed = json.loads(result.stdout)
    assert (printed["records"], printed["runs"], printed["frames_that_differ"]) == (2, 2, 0)
    assert printed["frames_compared"] == 0  # on a CPU every frame is made, none is computed
    titles = [table["title"] for table in printed["tables"]]
    assert "Top-1 accuracy" in titles and "Average cost of an iteration" in titles
    again = run("study", "kothari2021", "--part", "report", "--records", "kept")
    assert again.exit_code == 0 and "LeNet-5" in again.stdout and "0.9893" in again.stdout


@pytest.mark.parametrize("name, flags", [
    ("kothari2021", ["--models", "lenet5", "--methods", "1"]), ("kothari2021", ["--part", "workers", "--methods", "1"]),
    ("kothari2021", ["--part", "sizes"]), ("homomorphic", ["--part", "speed", "--models", "mlp"]),
    ("homomorphic", ["--part", "layers", "--models", "mlp"]), ("gpt", ["--models", "1m", "--data-dir", "text"]),
    ("pipeline", ["--methods", "none", "--data-dir", "text"]), ("oland2015", ["--runs", "1"]),
    ("oland2015", ["--part", "coding"]), ("oland2015", ["--part", "buckets"]),
])  # fmt: skip
def test_call_without_time_ends_with_exit_code_75(run: Run, work_dir: Path, name: str, flags: list[str]) -> None:
    if "--data-dir" in flags:
        (work_dir / "text").mkdir()
        for number in range(25):
            (work_dir / "text" / f"{number}.txt").write_text(f"line {number}\n" * 12_000)
    data = [] if "speed" in flags or "--data-dir" in flags else ["--data", "digits"]
    result = run("study", name, *flags, *data, "--device", "cpu", "--minutes", "0", "--records", "kept")
    assert (result.exit_code, result.stdout) == (75, "")
    assert "the same command continues" in result.stderr and not list(work_dir.glob("kept/*.jsonl"))


@pytest.mark.parametrize("args, code, words", [
    (["nobody1999"], 2, "unknown study 'nobody1999'"),
    (["oland2015", "--part", "figure9"], 2, "unknown part 'figure9'"),
    (["oland2015", "--part", "report"], 2, "--records"),
    (["oland2015", "--part", "report", "--part", "map"], 2, "give it alone"),
    (["oland2015", "--part", "report", "--records", "."], 1, "no records of oland2015"),
    (["oland2015", "--lr", "0"], 2, "expected lr > 0"),
    (["oland2015", "--device", "tpu"], 2, "device must be auto, cpu or cuda"),
    (["oland2015", "--data", "mnist", "--data-dir", "."], 1, "mnist is read from"),
    (["oland2015", "--data", "faces"], 2, "unknown data set 'faces'"),
    (["kothari2021", "--part", "map"], 2, "unknown part 'map'"),
    (["kothari2021", "--models", "resnet18"], 2, "unknown model 'resnet18'"),
    (["kothari2021", "--methods", "1,7"], 2, "unknown method '7'"),
    (["kothari2021", "--seeds", "one"], 2, "--seeds must be whole numbers"),
    (["kothari2021", "--part", "times", "--links", "10gbit"], 2, "unknown link '10gbit'"),
    (["kothari2021", "--models", "vgg11", "--data-dir", "."], 1, "cifar10 is read from"),
    (["kothari2021", "--models", "vgg11", "--data", "digits"], 2, "3 x 32 x 32"),
    (["kothari2021", "--models", "lenet5", "--minutes", "1"], 2, "--minutes needs --records"),
    (["gpt", "--models", "1m", "--minutes", "1"], 2, "--minutes needs --records"),
    (["oland2015", "--lanes", "1"], 2, "--lanes is no option of the study oland2015"),
    (["jang2017", "--methods", "1"], 2, "--methods is no option of the study jang2017"),
    (["homomorphic", "--cell-seconds", "9"], 2, "--cell-seconds is no option of the study homomorphic"),
])  # fmt: skip
def test_invalid_argument_is_one_line_on_stderr(
    run: Run, work_dir: Path, args: list[str], code: int, words: str
) -> None:
    result = run("study", *args)
    assert result.exit_code == code
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1 and not result.stdout


def test_help_groups_options_by_study(run: Run) -> None:
    shown = help_text(run, "study")
    assert "Options of oland2015" in shown and "Options of homomorphic, kothari2021" in shown
    assert "ingredients, frontier" in shown
