from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from laconic.errors import FileError
from laconic.watch.folder import PROGRESS, STATUS
from laconic.watch.journal import EVERY, HEARTBEAT, Journal, load_status, spacing
from laconic.watch.status import Status, WorkerStatus


def status(at: float, version: int = 0, *, began_at: float = 0.0) -> Status:
    worker = WorkerStatus(state="computing", lives=1, iteration=version, loss=1.0 / (1 + version))
    return Status(at=at, began_at=began_at, version=version, updates=10**9, workers=[worker])


def lines(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / PROGRESS).read_text().splitlines()]


def test_a_week_leaves_some_thousand_lines(tmp_path: Path) -> None:
    """At every moment when one is due, as a server that never rests would."""
    journal, at = Journal(tmp_path), 0.0
    for version in range(100_000):
        journal._point(status(at, version), last=False)
        at += spacing(at)
        if at > 7 * 24 * 3600:
            break
    journal.close()
    assert at > 7 * 24 * 3600 and 5_000 < len(lines(tmp_path)) < 12_000
    assert (tmp_path / PROGRESS).stat().st_size < 2_000_000


def test_a_status_is_written_when_it_changed_or_to_show_a_sign_of_life(tmp_path: Path) -> None:
    journal, path = Journal(tmp_path), tmp_path / STATUS

    def written(at: float, version: int) -> bool:
        before = load_status(path)
        journal.show(status(at, version))
        return load_status(path) != before

    assert written(0.0, 0)
    assert not written(0.1, 1), "too soon"
    assert written(EVERY, 1)
    assert not written(2 * EVERY + 0.01, 1), "nothing is new"
    assert written(EVERY + HEARTBEAT, 1)
    journal.show(status(EVERY + HEARTBEAT + 0.001, 1), last=True)
    found = load_status(path)
    assert found is not None and found.at == EVERY + HEARTBEAT + 0.001
    journal.close()


def test_moments_without_news_leave_no_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for at in (0.0, 1.0, 2.0):
        journal.show(status(at, 0))
    journal.show(status(3.0, 1))
    journal.close()
    assert [line["version"] for line in lines(tmp_path)] == [0, 1]


def test_a_line_that_was_cut_off_stays_alone(tmp_path: Path) -> None:
    (tmp_path / PROGRESS).write_text('{"at": 1, "vers')
    journal = Journal(tmp_path)
    journal.show(status(1.0, 5))
    journal.close()
    torn, whole = (tmp_path / PROGRESS).read_text().splitlines()
    assert torn == '{"at": 1, "vers' and json.loads(whole)["version"] == 5


def test_training_goes_on_where_nothing_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "gone")
    with caplog.at_level(logging.WARNING, "laconic"):
        for at in (0.0, 1.0, 2.0):
            journal.show(status(at, int(at)))
    assert [record.message for record in caplog.records] == [
        "cannot write how the run is any more: No such file or directory"
    ]


def test_what_others_wrote_there_is_told_in_a_line(tmp_path: Path) -> None:
    assert load_status(tmp_path / STATUS) is None
    for text in ("", "{", "[1]", "[" * 100_000, json.dumps({"at": 1})):
        (tmp_path / STATUS).write_text(text)
        with pytest.raises(FileError, match="status"):
            load_status(tmp_path / STATUS)
