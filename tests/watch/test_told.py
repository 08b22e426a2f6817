"""What workers tell of themselves on the way: checked as all that comes from outside, and of no consequence."""

from __future__ import annotations

from typing import Any

import pytest

from laconic.cluster.server import _told
from laconic.errors import FrameError


def test_numbers_by_name() -> None:
    assert _told({}) == {} and _told({"told": {}}) == {}
    told = {"iteration": 3, "loss": 0.5, "of a newer version": "x"}
    assert _told({"told": told}) == {"iteration": 3.0, "loss": 0.5}


@pytest.mark.parametrize(
    "told",
    [None, [], "x", 1, {"loss": "low"}, {"loss": None}, {"loss": True}, {"loss": 1e301}, {"loss": float("nan")},
     {"iteration": [1]}],
)  # fmt: skip
def test_anything_else_is_refused(told: Any) -> None:
    with pytest.raises(FrameError):
        _told({"told": told})
