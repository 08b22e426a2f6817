from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from laconic.errors import FileError
from laconic.watch.folder import PROGRESS, STATUS
from laconic.watch.status import Status, WorkerStatus
from laconic.watch.status_files import HEARTBEAT, STATUS_INTERVAL, StatusWriter, load_status, point_interval


def status(at: float, version: int = 0, *, began_at: float = 0.0) -> Status:
    worker = WorkerStatus(state="computing", lives=1, iteration=version, loss=1.0 / (1 + version))
    return Status(at=at, began_at=began_at, version=version, updates=10**9, workers=[worker])


def lines(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / PROGRESS).read_text().splitlines()]


def test_progress_of_a_week_stays_small(tmp_path: Path) -> None:
    """A server writes a point whenever one is due."""
    writer, at = StatusWriter(tmp_path), 0.0
    for version in range(100_000):
        writer._write_point(status(at, version), last=False)
        at += point_interval(at)
        if at > 7 * 24 * 3600:
            break
    writer.close()
    assert at > 7 * 24 * 3600 and 5_000 < len(lines(tmp_path)) < 12_000
    assert (tmp_path / PROGRESS).stat().st_size < 2_000_000


def test_status_is_written_if_it_changed_or_a_heartbeat_is_due(tmp_path: Path) -> None:
    writer, path = StatusWriter(tmp_path), tmp_path / STATUS

    def written(at: float, version: int) -> bool:
        before = load_status(path)
        writer.write(status(at, version))
        return load_status(path) != before

    assert written(0.0, 0)
    assert not written(0.1, 1), "too soon"
    assert written(STATUS_INTERVAL, 1)
    assert not written(2 * STATUS_INTERVAL + 0.01, 1), "unchanged"
    assert written(STATUS_INTERVAL + HEARTBEAT, 1)
    writer.write(status(STATUS_INTERVAL + HEARTBEAT + 0.001, 1), last=True)
    last = load_status(path)
    assert last is not None and last.at == STATUS_INTERVAL + HEARTBEAT + 0.001
    writer.close()


def test_unchanged_point_is_not_written(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path)
    for at in (0.0, 1.0, 2.0):
        writer.write(status(at, 0))
    writer.write(status(3.0, 1))
    writer.close()
    assert [line["version"] for line in lines(tmp_path)] == [0, 1]


def test_cut_off_line_is_ended_before_the_next_point(tmp_path: Path) -> None:
    (tmp_path / PROGRESS).write_text('{"at": 1, "vers')
    writer = StatusWriter(tmp_path)
    writer.write(status(1.0, 5))
    writer.close()
    damaged, complete = (tmp_path / PROGRESS).read_text().splitlines()
    assert damaged == '{"at": 1, "vers' and json.loads(complete)["version"] == 5


def test_missing_folder_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = StatusWriter(tmp_path / "gone")
    with caplog.at_level(logging.WARNING, "laconic"):
        for at in (0.0, 1.0, 2.0):
            writer.write(status(at, int(at)))
    assert [record.message for record in caplog.records] == [
        "cannot write the run's status any more: No such file or directory"
    ]


def test_invalid_status_file_raises_file_error(tmp_path: Path) -> None:
    assert load_status(tmp_path / STATUS) is None
    for text in ("", "{", "[1]", "[" * 100_000, json.dumps({"at": 1})):
        (tmp_path / STATUS).write_text(text)
        with pytest.raises(FileError, match="status"):
            load_status(tmp_path / STATUS)
