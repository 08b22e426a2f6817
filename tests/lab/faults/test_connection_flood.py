"""Foreign connections, and calls that a member leaves open, do not slow the job; the server releases resources."""

from __future__ import annotations

import pytest

from laconic_lab.faults import IDLE_KINDS, run_flood, run_idle

SLOWER = 1.10
"""Allowed ratio of step times with and without the flood."""


@pytest.mark.slow
def test_flood_of_480_connections_does_not_slow_steps() -> None:
    result = run_flood(480, 200, phases=8, seed=0)
    assert result.broken is None
    assert result.connections == 480 and result.descriptors[1] > result.descriptors[0]
    # Other load makes single phases look slow: at least two of eight must be within the limit.
    assert result.ratios[1] <= SLOWER, result


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tls", [False, True], ids=["plaintext", "tls"])
def test_flood_of_ten_thousand_connections_does_not_slow_steps(tls: bool) -> None:
    result = run_flood(10_000, 200, phases=20, tls=tls, seed=1)
    print(result)
    assert result.broken is None
    assert result.connections == 10_000 and result.dropped > 200
    assert result.slower <= SLOWER, result


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", list(IDLE_KINDS))
def test_calls_that_a_member_leaves_open_do_not_slow_steps(kind: str) -> None:
    result = run_idle(kind)
    print(result)
    assert result.broken is None
    assert result.ratios[1] <= SLOWER, result  # as above
