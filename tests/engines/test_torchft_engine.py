"""laconic under torchft itself: DDP, DiLoCo and LocalSGD with two replicas; needs torchft."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchft_process import run_with_torchft


@pytest.mark.slow
def test_scenarios_hold_under_torchft():
    assert len(run_with_torchft(Path(__file__).with_name("torchft_scenarios.py")).split()) == 5
