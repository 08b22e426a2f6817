"""Run a program that uses torchft."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_with_torchft(program: Path) -> str:
    """Return what a program prints, which must succeed; skip the test where there is no torchft."""
    pytest.importorskip("torchft", reason="no torchft")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
