from __future__ import annotations

from typing import Any

import pytest

from laconic.cluster.protocol import TOLD
from laconic.errors import FileError
from laconic.watch.board import FAULTS, KEPT, Board
from laconic.watch.status import PARTS, Status


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def board(workers: int = 2, updates: int = 10, before: Status | None = None) -> Board:
    return Board(workers, updates, 2 * updates, before, clock=Clock())


def event(kind: str, **values: Any) -> dict[str, Any]:
    return {"event": kind, **values}


def states(found: Board) -> list[str]:
    return [worker.state for worker in found.status().workers]


def test_a_round_as_workers_go_through_it() -> None:
    found = board()
    assert states(found) == ["expected", "expected"]
    for worker in (0, 1):
        found(event("welcome", worker=worker, incarnation=7, clock=0))
    assert states(found) == ["joining", "joining"]
    found(event("agreed", version=0))
    found(event("push", worker=1, incarnation=7, sequence=0))
    assert states(found) == ["computing", "waiting"]
    for worker in (0, 1):
        found(event("applied", worker=worker, sequence=0, version=1))
    assert states(found) == ["computing", "computing"]
    assert (found.status().version, found.status().iteration) == (1, 2)
    found(event("checkpoint", version=1))
    found(event("leave", worker=0, incarnation=7))
    assert states(found)[0] == "gone" and found.status().checkpoint == 1
    found(event("applied", worker=1, sequence=9, version=10))
    found(event("leave", worker=1, incarnation=7))
    assert states(found)[1] == "done" and found.status().faults == {}


def test_a_worker_that_comes_again_goes_on_counting() -> None:
    found = board()
    found(event("welcome", worker=0, incarnation=1))
    found.heard(0, 1, {"iteration": 5, "loss": 2.0, "bytes_sent": 100, "compute": 1.5, "retries": 1})
    found(event("lost", worker=0, incarnation=1))
    assert states(found)[0] == "lost"
    found(event("welcome", worker=0, incarnation=2))
    found.heard(0, 1, {"iteration": 99, "loss": 9.0, "bytes_sent": 10**9})  # the life before: too late
    found.heard(0, 2, {"iteration": 3, "loss": 1.0, "bytes_sent": 40, "compute": 0.5})
    found.heard(0, 2, {})  # most pushes tell nothing
    (worker, _) = found.status().workers
    assert (worker.iteration, worker.loss, worker.bytes_sent, worker.retries) == (3, 1.0, 140, 1)
    assert worker.seconds["compute"] == 2.0 and worker.lives == 2
    assert found.status().faults == {"lost": 1, "restarted": 1}
    assert [one["what"] for one in found.status().recent] == [
        "the connection of worker 0 broke",
        "worker 0 was started again",
    ]
    found.heard(0, 2, {"iteration": 4})  # its loss was not finite
    assert found.status().workers[0].loss is None


def test_who_goes_when_no_work_is_left_has_done_its_part() -> None:
    found = board()
    found(event("leave", worker=0, incarnation=1))
    assert states(found)[0] == "gone"
    assert found.status(phase="ended").workers[0].state == "done"


def test_staleness_is_what_pushes_missed() -> None:
    found = board()
    for worker, missed in ((0, 3), (1, 0), (0, 1)):
        found(event("applied", worker=worker, sequence=0, version=1, ticket=0, missed=missed))
    first, second = found.status().workers
    assert (first.missed, first.missed_most, first.missed_sum, first.applied) == (1, 3, 4, 2)
    assert (second.missed, second.missed_most, second.applied) == (0, 0, 1)


def test_versions_of_workers_are_not_the_servers() -> None:
    found = board()
    found(event("applied", worker=0, sequence=6, version=7, missed=0))
    for kind in ("join", "pull", "deposit", "memory_lost"):
        found(event(kind, worker=1, version=2, ticket=0, lost=False))
    assert found.status().version == 7


def test_a_server_that_resumes_goes_on_counting() -> None:
    first = board()
    first(event("welcome", worker=0, incarnation=1))
    first.heard(0, 1, {"iteration": 5, "bytes_sent": 100})
    before = Status.from_json(first.status(received=1000, sent=2000).to_json())
    again = board(before=before)
    again(event("resumed", version=4))
    assert states(again) == ["lost", "expected"]
    found = again.status(received=10, sent=20)
    assert (found.received, found.sent, found.lives, found.version) == (1010, 2020, 2, 4)
    assert found.began_at == before.began_at and found.workers[0].bytes_sent == 100
    assert found.faults == {"resumed": 1}
    assert board(workers=3, before=before).status().workers[0].lives == 0, "of another job"


def test_the_last_faults_are_kept_and_all_are_counted() -> None:
    found = board()
    for sequence in range(3 * KEPT):
        found(event("duplicate", worker=0, sequence=sequence))
    assert found.status().faults == {"duplicate": 3 * KEPT} and len(found.status().recent) == KEPT
    assert "exchange 149 again" in found.status().recent[-1]["what"]


def test_every_fault_that_a_core_tells_can_be_said() -> None:
    told = {"worker": 1, "incarnation": 2, "sequence": 3, "version": 4, "was": 5, "why": "worker 0 has come anew"}
    found = board()
    for kind in FAULTS:
        found(event(kind, **told))
    assert set(found.status().faults) == set(FAULTS)
    assert not any("{" in one["what"] for one in found.status().recent)


def test_what_workers_tell_is_what_a_board_takes() -> None:
    """The two lists are in rooms that do not know each other."""
    assert set(TOLD) == {"iteration", "loss", "bytes_sent", "bytes_received", "bytes_raw", "retries", *PARTS}


def whole() -> dict[str, Any]:
    found = board()
    found(event("welcome", worker=0, incarnation=1))
    found(event("lost", worker=0, incarnation=1))
    return found.status().to_json()


def test_a_status_comes_back_as_it_was() -> None:
    assert Status.from_json(whole()).to_json() == whole()
    assert Status.from_json(whole() | {"of a newer version": 1}).to_json() == whole()


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        {"phase": "sleeping"},
        {"received": "1"},
        {"received": True},
        {"received": 1 << 70},
        {"at": float("nan")},
        {"at": float("inf")},
        {"workers": [{}]},
        {"workers": {"0": {}}},
        {"faults": {"lost": "many"}},
        {"faults": {"lost": -1}},
        {"recent": [{"at": "now", "what": "x"}]},
        {"recent": [1]},
    ],
)
def test_what_is_no_status_is_refused(wrong: Any) -> None:
    values = wrong if not isinstance(wrong, dict) or not wrong else whole() | wrong
    with pytest.raises(FileError, match="no status of a server"):
        Status.from_json(values)


@pytest.mark.parametrize("wrong", [{"state": "asleep"}, {"seconds": {"compute": float("inf")}}, {"loss": "low"}])
def test_nor_is_what_is_no_worker(wrong: dict[str, Any]) -> None:
    values = whole()
    values["workers"][0] |= wrong
    with pytest.raises(FileError, match="no status of a server"):
        Status.from_json(values)
