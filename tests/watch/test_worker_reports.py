"""Reports of workers are validated like all data from outside."""

from __future__ import annotations

import json
from typing import Any

import pytest

from laconic import counters
from laconic.cluster.protocol import MAX_STAT, WORKER_STATS, read_worker_stats
from laconic.errors import FrameError
from laconic.watch.status import Status
from laconic.watch.tracker import StatusTracker


def test_report_keeps_known_numbers() -> None:
    assert read_worker_stats({}) == {} and read_worker_stats({"told": {}}) == {}
    report = {"iteration": 3, "loss": 0.5, "of a newer version": "x"}
    assert read_worker_stats({"told": report}) == {"iteration": 3.0, "loss": 0.5}


@pytest.mark.parametrize("told", [None, [], "x", 1])
def test_report_that_is_no_object_raises_frame_error(told: Any) -> None:
    with pytest.raises(FrameError):
        read_worker_stats({"told": told})


@pytest.mark.parametrize(
    "report",
    [{"loss": "low"}, {"loss": None}, {"loss": True}, {"loss": 1e301}, {"loss": float("nan")}, {"loss": 10**400},
     {"iteration": [1]}, {"iteration": 1e19}, {"iteration": -1}, {"bytes_sent": 1e19}, {"compute": 1e299},
     {"retries": float("nan")}],
)  # fmt: skip
def test_unusable_number_of_a_report_is_dropped_alone_and_counted(report: dict[str, Any]) -> None:
    before = counters.counts().get("worker statistics", 0)
    assert read_worker_stats({"told": {"apply": 0.5, **report}}) == {"apply": 0.5}
    assert counters.counts()["worker statistics"] == before + 1


def test_largest_reports_of_many_lives_leave_a_readable_status() -> None:
    tracker = StatusTracker(2, 10, 10)
    told = dict.fromkeys(WORKER_STATS, float(MAX_STAT - 1))
    for life in range(3000):
        tracker.record_event({"event": "welcome", "worker": 0, "incarnation": life})
        tracker.record_report(0, life, read_worker_stats({"told": told}))
    tracker.record_report(1, -1, {"iteration": 5.0})
    status = Status.from_json(json.loads(json.dumps(tracker.status().to_json())))
    assert status.workers[1].iteration == 5 and status.workers[0].bytes_sent > 1 << 62
