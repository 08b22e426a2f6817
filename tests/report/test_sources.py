from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from reported import record

from laconic.errors import ConfigError
from laconic.records import write
from laconic.report import gather


def run_folder(path: Path, **summary: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "summary.json").write_text(json.dumps({"method": "1", "iterations": 2, **summary}))
    return path


def test_runs_files_and_folders_of_both(tmp_path: Path) -> None:
    whole = run_folder(tmp_path / "runs" / "new")
    write([record("train.run", run="x", method="5"), record("train.track", run="x", worker=0)], whole / "records.jsonl")
    run_folder(tmp_path / "runs" / "old", accuracy=90.0)
    (tmp_path / "runs" / "going").mkdir()
    (tmp_path / "runs" / "going" / "config.json").write_text("{}")
    for name in ("events.jsonl", "reports.jsonl", "events-1.jsonl"):  # of a run, and no Records
        (whole / name).write_text('{"event": "push"}\n')
    write([record("bench.codec", spec="sign")], tmp_path / "codecs.jsonl")
    found = gather([tmp_path / "runs", tmp_path / "codecs.jsonl"])
    told = [(one.kind, one.values.get("run")) for one in found.records]
    assert told == [("bench.codec", None), ("train.run", "new"), ("train.track", "new"), ("train.run", "old")]
    assert [path.name for path in found.runs] == ["new", "old"]
    assert found.skipped == ["going: the run has not ended, it has no summary.json"]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for seed in ("a", "b"):
        run_folder(tmp_path / seed / "five")
    found = gather([tmp_path])
    assert [one.values["run"] for one in found.records] == ["a/five", "b/five"]


def test_a_broken_file_in_a_folder_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    write([record("bench.codec", spec="sign")], tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("not JSON\n")
    (tmp_path / "c.jsonl").write_text('{"kind": 5, "values": []}\n')
    broken = run_folder(tmp_path / "run")
    (broken / "summary.json").write_text("{")
    found = gather([tmp_path])
    assert len(found.records) == 1 and len(found.skipped) == 3
    assert "b.jsonl does not hold records" in found.skipped[0] and "run: " in found.skipped[2]


@pytest.mark.parametrize("what", ["missing", "empty", "broken"])
def test_nothing_to_read_is_one_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    elif what == "broken":
        path.write_text("no records\n")
    with pytest.raises(ConfigError, match=r"does not exist|no run and no Records|does not hold records") as error:
        gather([path])
    assert what in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="runs as root")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    with pytest.raises(ConfigError, match="cannot read"):
        gather([closed])
