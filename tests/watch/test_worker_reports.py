"""Reports of workers are validated like all data from outside."""

from __future__ import annotations

from typing import Any

import pytest

from laconic.cluster.protocol import read_worker_stats
from laconic.errors import FrameError


def test_report_keeps_known_numbers() -> None:
    assert read_worker_stats({}) == {} and read_worker_stats({"told": {}}) == {}
    report = {"iteration": 3, "loss": 0.5, "of a newer version": "x"}
    assert read_worker_stats({"told": report}) == {"iteration": 3.0, "loss": 0.5}


@pytest.mark.parametrize(
    "report",
    [None, [], "x", 1, {"loss": "low"}, {"loss": None}, {"loss": True}, {"loss": 1e301}, {"loss": float("nan")},
     {"iteration": [1]}],
)  # fmt: skip
def test_invalid_report_raises_frame_error(report: Any) -> None:
    with pytest.raises(FrameError):
        read_worker_stats({"told": report})
