"""The event log of a server: bounded, and readable after it has begun a new file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from laconic.errors import ConfigError
from laconic.report.sources import gather
from laconic.watch.events import EventLog, read_events

MAX_BYTES = 2_000


def test_long_event_log_keeps_the_last_two_files(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with closing(EventLog(path, max_bytes=MAX_BYTES)) as log:
        for number in range(40):
            log({"event": "push", "number": number})
        numbers = [event["number"] for event in read_events(path) if event["event"] == "push"]
        assert len(list(tmp_path.iterdir())) == 2 and numbers == list(range(40))
        for number in range(40, 300):
            log({"event": "push", "number": number})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * MAX_BYTES + 200
    events = read_events(path)
    began = [event["dropped"] for event in events if event["event"] == "log_began"]
    numbers = [event["number"] for event in events if event["event"] == "push"]
    assert began == [True, True] and numbers == list(range(numbers[0], 300)) and len(numbers) > 30


def test_restarted_server_continues_a_full_log_in_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for event in ({"event": "push", "why": "x" * 50}, {"event": "resumed"}):
        with closing(EventLog(path, max_bytes=50)) as log:
            log(event)
    assert [event["event"] for event in read_events(path)] == ["push", "log_began", "resumed"]
    with pytest.raises(ConfigError) as error:  # which would name files that hold no Records
        gather([tmp_path])
    assert "events" not in str(error.value).replace(str(tmp_path), "")
