"""Runs that are killed at every page and every call of a checkpoint resume and end with the same weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laconic_lab.faults.checkpoint_kills import kill_checkpoints
from laconic_lab.faults.disk import PAGE


def check_kills(folder: Path, sizes: list[int], page: int = PAGE) -> None:
    for size, counts in zip(sizes, kill_checkpoints(folder, sizes, page=page), strict=True):
        assert counts["killed"]["old"] > 2 * size * 4 // page + 10
        assert counts["cut"]["old"] > 20 and counts["killed"]["new"] > 7
        # A rename is permanent once its folder is synced, two calls later.
        assert counts["cut"]["new"] >= counts["killed"]["new"] - 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills need fork")
def test_run_killed_at_any_page_of_a_checkpoint_ends_with_the_same_weights(memory_folder: Path) -> None:
    check_kills(memory_folder, [25_000])  # 200 kB with the momentum


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills need fork")
def test_run_killed_at_any_page_resumes_for_many_checkpoint_sizes(memory_folder: Path) -> None:
    check_kills(memory_folder, [1, 500, 1024, 4096, 40_000, 100_000, 150_000])
    check_kills(memory_folder / "finer", [8_000], page=256)
