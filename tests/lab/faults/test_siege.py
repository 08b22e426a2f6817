"""Strangers by the thousand: workers go on as before, nothing changes, and what was taken comes back."""

from __future__ import annotations

import pytest

from laconic_lab.faults import flood

SLOWER = 1.10
"""How many times as long a step may take in a storm."""


@pytest.mark.slow
def test_a_crowd_at_the_door_is_hardly_noticed() -> None:
    found = flood(480, 200, phases=8, seed=0)
    assert found.broken is None
    assert found.connections == 480 and found.descriptors[1] > found.descriptors[0]
    # On a machine that does other things, too: of eight storms at most six may seem slower by chance.
    assert found.ratios[1] <= SLOWER, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tls", [False, True], ids=["plaintext", "tls"])
def test_ten_thousand_strangers_are_hardly_noticed(tls: bool) -> None:
    found = flood(10_000, 200, phases=20, tls=tls, seed=1)
    print(found)
    assert found.broken is None
    assert found.connections == 10_000 and found.dropped > 200
    assert found.slower <= SLOWER, found
