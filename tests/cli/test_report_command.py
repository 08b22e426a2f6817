from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from cli_runner import Run, file_names
from laconic.cli import report
from laconic.records import Record, write

RUN: dict[str, Any] = {
    "method": "1", "model": "mlp", "data": "digits", "workers": 2, "servers": 1, "iterations": 20, "accuracy": 90.0,
    "wire_bytes_per_iteration": 1000.0, "compute_s": 1.0, "communication_s": 1.0, "total_s": 2.0,
}  # fmt: skip


def run_folder(path: Path, **more: Any) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "summary.json").write_text(json.dumps(RUN | more))


@pytest.mark.parametrize("example", report.EXAMPLES)
def test_example_of_the_help_runs(run: Run, work_dir: Path, example: str) -> None:
    for name in ("demo/1", "one", "two"):
        run_folder(Path("runs") / name)
    results = Path(__file__).parents[2] / "results"
    Path("results").symlink_to(results)
    done = run(*shlex.split(example)[1:])
    assert done.exit_code == 0, done.output
    words = shlex.split(example)
    page = Path(words[words.index("-o") + 1] if "-o" in words else "report.html")
    text = page.read_text()
    assert text.startswith("<!doctype html>") and ("an hour for each worker" in text) == ("--price-hour" in words)
    if "--json" in words:
        printed = json.loads(done.stdout)
        assert printed["path"] == str(page) and printed["bytes"] == page.stat().st_size and printed["claims"] > 10
        assert "predicted-measured" in printed["plots"] and printed["runs"] == 0 and printed["skipped"]
    else:
        assert f"wrote {page}: " in done.stdout and "open it in a browser" in done.stdout


def test_records_that_are_not_shown_are_named_on_stderr(run: Run, work_dir: Path) -> None:
    run_folder(Path("runs/a"))
    (Path("runs") / "b").mkdir()
    (Path("runs") / "b" / "config.json").write_text("{}")
    about: dict[str, Any] = {"machine": {}, "versions": {}, "commit": None}
    write([Record("a.new.kind", {}, **about)], Path("runs/c.jsonl"))
    done = run("report", "runs", "--price-hour", "2")
    assert done.exit_code == 0 and "not shown: b: the run has not ended" in done.stderr
    assert "not shown: 1 Record of kind a.new.kind" in done.stderr and "1 run, " in done.stdout
    assert "laconic report runs -o report.html --price-hour 2" in Path("report.html").read_text()


@pytest.mark.parametrize("args, words", [
    (["empty"], "no run and no Records in empty"), (["missing"], "missing does not exist"),
    (["file"], "does not hold records"), (["runs", "-o", "empty"], "empty is a folder"),
    (["runs", "-o", "file/report.html"], "cannot write the page to file/report.html"),
    (["runs", "--price-hour", "-1"], "--price-hour must be finite and at least 0, got -1"),
    (["runs", "--price-gb", "nan"], "--price-gb must be finite"), ([], "RUN"),
])  # fmt: skip
def test_invalid_input_prints_one_line_and_exits_with_2(run: Run, work_dir: Path, args: list[str], words: str) -> None:
    Path("empty").mkdir()
    Path("file").write_text("text\n")
    run_folder(Path("runs/a"))
    done = run("report", *args)
    assert done.exit_code == 2 and words in done.stderr and not done.stdout
    assert len(done.stderr.strip().splitlines()) == 1 and file_names() == ["empty", "file", "runs"]
