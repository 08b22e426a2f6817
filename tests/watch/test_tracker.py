from __future__ import annotations

from typing import Any

import pytest

from laconic.cluster.protocol import WORKER_STATS
from laconic.errors import FileError
from laconic.watch.status import PARTS, Status
from laconic.watch.tracker import FAULTS, RECENT_FAULTS, StatusTracker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_tracker(workers: int = 2, updates: int = 10, previous: Status | None = None) -> StatusTracker:
    return StatusTracker(workers, updates, 2 * updates, previous, clock=Clock())


def event(kind: str, **values: Any) -> dict[str, Any]:
    return {"event": kind, **values}


def states(tracker: StatusTracker) -> list[str]:
    return [worker.state for worker in tracker.status().workers]


def test_worker_states_during_a_round() -> None:
    tracker = make_tracker()
    assert states(tracker) == ["expected", "expected"]
    for worker in (0, 1):
        tracker.record_event(event("welcome", worker=worker, incarnation=7, clock=0))
    assert states(tracker) == ["joining", "joining"]
    tracker.record_event(event("agreed", version=0))
    tracker.record_event(event("push", worker=1, incarnation=7, sequence=0))
    assert states(tracker) == ["computing", "waiting"]
    for worker in (0, 1):
        tracker.record_event(event("applied", worker=worker, sequence=0, version=1))
    assert states(tracker) == ["computing", "computing"]
    assert (tracker.status().version, tracker.status().iteration) == (1, 2)
    tracker.record_event(event("checkpoint", version=1))
    tracker.record_event(event("leave", worker=0, incarnation=7))
    assert states(tracker)[0] == "gone" and tracker.status().checkpoint == 1
    tracker.record_event(event("applied", worker=1, sequence=9, version=10))
    tracker.record_event(event("leave", worker=1, incarnation=7))
    assert states(tracker)[1] == "done" and tracker.status().faults == {}


def test_counts_continue_when_a_worker_restarts() -> None:
    tracker = make_tracker()
    tracker.record_event(event("welcome", worker=0, incarnation=1))
    tracker.record_report(0, 1, {"iteration": 5, "loss": 2.0, "bytes_sent": 100, "compute": 1.5, "retries": 1})
    tracker.record_event(event("lost", worker=0, incarnation=1))
    assert states(tracker)[0] == "lost"
    tracker.record_event(event("welcome", worker=0, incarnation=2))
    tracker.record_report(0, 1, {"iteration": 99, "loss": 9.0, "bytes_sent": 10**9})  # from its previous process
    tracker.record_report(0, 2, {"iteration": 3, "loss": 1.0, "bytes_sent": 40, "compute": 0.5})
    tracker.record_report(0, 2, {})  # most pushes carry no report
    (worker, _) = tracker.status().workers
    assert (worker.iteration, worker.loss, worker.bytes_sent, worker.retries) == (3, 1.0, 140, 1)
    assert worker.seconds["compute"] == 2.0 and worker.lives == 2
    assert tracker.status().faults == {"lost": 1, "restarted": 1}
    assert [fault["what"] for fault in tracker.status().recent] == [
        "the connection of worker 0 broke",
        "worker 0 was restarted",
    ]
    tracker.record_report(0, 2, {"iteration": 4})  # its loss was not finite
    assert tracker.status().workers[0].loss is None


def test_worker_that_left_is_done_when_the_run_ends() -> None:
    tracker = make_tracker()
    tracker.record_event(event("leave", worker=0, incarnation=1))
    assert states(tracker)[0] == "gone"
    assert tracker.status(phase="ended").workers[0].state == "done"


def test_staleness_counts_missed_updates() -> None:
    tracker = make_tracker()
    for worker, missed in ((0, 3), (1, 0), (0, 1)):
        tracker.record_event(event("applied", worker=worker, sequence=0, version=1, ticket=0, missed=missed))
    first, second = tracker.status().workers
    assert (first.missed, first.missed_most, first.missed_sum, first.applied) == (1, 3, 4, 2)
    assert (second.missed, second.missed_most, second.applied) == (0, 0, 1)


def test_version_of_a_worker_event_is_not_the_servers_version() -> None:
    tracker = make_tracker()
    tracker.record_event(event("applied", worker=0, sequence=6, version=7, missed=0))
    for kind in ("join", "pull", "deposit", "memory_lost"):
        tracker.record_event(event(kind, worker=1, version=2, ticket=0, lost=False))
    assert tracker.status().version == 7


def test_counts_continue_when_the_server_resumes() -> None:
    first = make_tracker()
    first.record_event(event("welcome", worker=0, incarnation=1))
    first.record_report(0, 1, {"iteration": 5, "bytes_sent": 100})
    before = Status.from_json(first.status(received=1000, sent=2000).to_json())
    again = make_tracker(previous=before)
    again.record_event(event("resumed", version=4))
    assert states(again) == ["lost", "expected"]
    status = again.status(received=10, sent=20)
    assert (status.received, status.sent, status.lives, status.version) == (1010, 2020, 2, 4)
    assert status.began_at == before.began_at and status.workers[0].bytes_sent == 100
    assert status.faults == {"resumed": 1}
    assert make_tracker(workers=3, previous=before).status().workers[0].lives == 0, "another job"


def test_recent_faults_are_limited_and_all_are_counted() -> None:
    tracker = make_tracker()
    for sequence in range(3 * RECENT_FAULTS):
        tracker.record_event(event("duplicate", worker=0, sequence=sequence))
    assert tracker.status().faults == {"duplicate": 3 * RECENT_FAULTS} and len(tracker.status().recent) == RECENT_FAULTS
    assert "exchange 149 again" in tracker.status().recent[-1]["what"]


def test_every_fault_has_a_complete_text() -> None:
    values = {"worker": 1, "incarnation": 2, "sequence": 3, "version": 4, "was": 5, "why": "worker 0 was restarted"}
    tracker = make_tracker()
    for kind in FAULTS:
        tracker.record_event(event(kind, **values))
    assert set(tracker.status().faults) == set(FAULTS)
    assert not any("{" in fault["what"] for fault in tracker.status().recent)


def test_reported_names_are_those_of_the_protocol() -> None:
    """Packages watch and cluster do not import each other."""
    assert set(WORKER_STATS) == {"iteration", "loss", "bytes_sent", "bytes_received", "bytes_raw", "retries", *PARTS}


def valid_status() -> dict[str, Any]:
    tracker = make_tracker()
    tracker.record_event(event("welcome", worker=0, incarnation=1))
    tracker.record_event(event("lost", worker=0, incarnation=1))
    return tracker.status().to_json()


def test_status_json_round_trip_ignores_unknown_fields() -> None:
    assert Status.from_json(valid_status()).to_json() == valid_status()
    assert Status.from_json(valid_status() | {"of a newer version": 1}).to_json() == valid_status()


@pytest.mark.parametrize("wrong", [
    None, [], {}, {"phase": "sleeping"}, {"received": "1"}, {"received": True}, {"received": 1 << 70},
    {"at": float("nan")}, {"at": float("inf")}, {"workers": [{}]}, {"workers": {"0": {}}}, {"faults": {"lost": "many"}},
    {"faults": {"lost": -1}}, {"recent": [{"at": "now", "what": "x"}]}, {"recent": [1]},
])  # fmt: skip
def test_invalid_status_raises_file_error(wrong: Any) -> None:
    values = wrong if not isinstance(wrong, dict) or not wrong else valid_status() | wrong
    with pytest.raises(FileError, match="not a server's status"):
        Status.from_json(values)


@pytest.mark.parametrize("wrong", [{"state": "asleep"}, {"seconds": {"compute": float("inf")}}, {"loss": "low"}])
def test_invalid_worker_status_raises_file_error(wrong: dict[str, Any]) -> None:
    values = valid_status()
    values["workers"][0] |= wrong
    with pytest.raises(FileError, match="not a server's status"):
        Status.from_json(values)
