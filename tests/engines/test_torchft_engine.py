"""laconic under torchft itself: DDP, DiLoCo and LocalSGD with two replicas; needs torchft."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("torchft_scenarios.py")


@pytest.mark.slow
def test_scenarios_hold_under_torchft():
    pytest.importorskip("torchft", reason="no torchft")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == 5
