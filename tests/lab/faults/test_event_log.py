"""The events of a long job are not held in memory."""

from __future__ import annotations

from pathlib import Path

from laconic_lab.faults.event_log import NEWEST, EventLog


def test_few_events_need_no_file(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(2 * NEWEST - 1):
        log.append({"event": "push", "number": number})
    assert not (tmp_path / "events.jsonl").exists()
    assert [event["number"] for event in log] == list(range(2 * NEWEST - 1))


def test_older_events_are_in_a_file_and_read_in_their_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(5 * NEWEST + 7):
        log.append({"event": "push", "number": number})
    assert len(log) == 5 * NEWEST + 7
    assert len(log._newest) < 2 * NEWEST
    assert [event["number"] for event in log] == list(range(5 * NEWEST + 7))
    assert [event["number"] for event in log.since(5 * NEWEST)] == list(range(5 * NEWEST, 5 * NEWEST + 7))
    assert log.since(len(log)) == []
    assert len(log.since(0)) == len(log._newest)


def test_events_that_are_appended_while_the_log_is_read_are_left_out(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(3 * NEWEST):
        log.append({"number": number})
    seen = []
    for event in log:
        seen.append(event["number"])
        log.append({"number": -1})
    assert seen == list(range(3 * NEWEST))
