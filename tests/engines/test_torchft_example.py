"""The example with a lighthouse and two replicas, one killed and started again; needs torchft."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torchft_process import run_with_torchft

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torchft" / "ddp_torchft.py"


@pytest.mark.slow
def test_killed_replica_is_healed_and_ends_with_the_same_weights():
    printed = run_with_torchft(EXAMPLE)
    assert "ends with -9" in printed
    replicas = re.findall(r"(\w+): ([\d,]+) bytes, (\d+) quorums, accuracy ([\d.]+) %, weights (\S+)", printed)
    assert [name for name, *_ in sorted(replicas)] == ["first", "second"]
    (_, first_bytes, quorums, accuracy, weights), (_, second_bytes, *_, others) = sorted(replicas)
    assert weights == others and float(accuracy) > 75 and int(quorums) >= 2
    assert int(first_bytes.replace(",", "")) > int(second_bytes.replace(",", "")) > 0


def test_example_fits_on_one_and_a_half_screens_and_says_how_to_run_it():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 65 and f"examples/torchft/{EXAMPLE.name}" in text.split('"""')[1]
