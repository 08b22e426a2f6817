from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from laconic.errors import ConfigError
from laconic.records import write
from laconic.report import gather
from report_records import record


def run_folder(path: Path, **summary: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "summary.json").write_text(json.dumps({"method": "1", "iterations": 2, **summary}))
    return path


def test_runs_and_files_of_records_are_read_from_folders(tmp_path: Path) -> None:
    whole = run_folder(tmp_path / "runs" / "new")
    write([record("train.run", run="x", method="5"), record("train.track", run="x", worker=0)], whole / "records.jsonl")
    run_folder(tmp_path / "runs" / "old", accuracy=90.0)
    (tmp_path / "runs" / "going").mkdir()
    (tmp_path / "runs" / "going" / "config.json").write_text("{}")
    for name in ("events.jsonl", "reports.jsonl", "events-1.jsonl"):  # files of a run that hold no Records
        (whole / name).write_text('{"event": "push"}\n')
    write([record("bench.codec", spec="sign")], tmp_path / "codecs.jsonl")
    sources = gather([tmp_path / "runs", tmp_path / "codecs.jsonl"])
    kinds = [(record.kind, record.values.get("run")) for record in sources.records]
    assert kinds == [("bench.codec", None), ("train.run", "new"), ("train.track", "new"), ("train.run", "old")]
    assert [path.name for path in sources.runs] == ["new", "old"]
    assert sources.skipped == ["going: the run has not ended, it has no summary.json"]


def test_runs_of_one_name_get_the_names_of_their_parents(tmp_path: Path) -> None:
    for seed in ("a", "b"):
        run_folder(tmp_path / seed / "five")
    sources = gather([tmp_path])
    assert [record.values["run"] for record in sources.records] == ["a/five", "b/five"]


def test_broken_file_in_a_folder_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    write([record("bench.codec", spec="sign")], tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("not JSON\n")
    (tmp_path / "c.jsonl").write_text('{"kind": 5, "values": []}\n')
    broken = run_folder(tmp_path / "run")
    (broken / "summary.json").write_text("{")
    sources = gather([tmp_path])
    assert len(sources.records) == 1 and len(sources.skipped) == 3
    assert "b.jsonl does not hold records" in sources.skipped[0] and "run: " in sources.skipped[2]


@pytest.mark.parametrize("state", ["missing", "empty", "broken"])
def test_path_without_records_raises_config_error_in_one_line(tmp_path: Path, state: str) -> None:
    path = tmp_path / state
    if state == "empty":
        path.mkdir()
    elif state == "broken":
        path.write_text("no records\n")
    with pytest.raises(ConfigError, match=r"does not exist|no run and no Records|does not hold records") as error:
        gather([path])
    assert state in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="runs as root")
def test_unreadable_folder_raises_config_error(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    with pytest.raises(ConfigError, match="cannot read"):
        gather([closed])
