"""Two-shot means that stay on the device: the bits, residuals and counts of the rounds that go through the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from triton_support import DEVICE, MARKS, no_compile_fallback  # noqa: F401

import laws
import ranks
from laconic import kernels
from laconic.collective.reductions.two_shot import TwoShot

pytestmark = [*MARKS, pytest.mark.usefixtures("no_compile_fallback")]

SHAPES = {"a": (2, 700), "b": (300,), "c": (1100,)}
"""With three ranks, ``b`` has no shard for the last of them."""


def slots(rank: int, step: int) -> list[tuple[str, torch.Tensor]]:
    named = [
        (name, laws.normal(*shape, seed=100 * step + 10 * rank + i)) for i, (name, shape) in enumerate(SHAPES.items())
    ]
    if step == 1 and rank == 1:
        named[0][1].view(-1)[-1] = float("inf")  # in the last rank's shard
    if step == 2:
        named[2][1].zero_()
    return named


def means(two_shot: TwoShot, rank: int, device: str) -> list[torch.Tensor]:
    found = []
    for step in range(4):
        tensors = [(name, x.to(device)) for name, x in slots(rank, step)]
        two_shot.reduce_all(tensors)
        found += [x.cpu() for _, x in tensors]
    two_shot.settle()
    return found


def compare(spec: str, rank: int) -> dict[str, Any]:
    by_frames = TwoShot(spec)
    expected = means(by_frames, rank, "cpu")
    with kernels.use_backend("triton"):
        on_device = TwoShot(spec, on_device=True)
        assert on_device.stays_on(torch.device(DEVICE))
        found = means(on_device, rank, DEVICE)
    state, expected_state = on_device.state_dict(), by_frames.state_dict()
    return {
        "means": all(laws.same_bits(x, y) for x, y in zip(found, expected, strict=True)),
        "nan": int(torch.isnan(found[3]).sum()),
        "state": sorted(state) == sorted(expected_state)
        and all(laws.same_bits(state[key].cpu(), expected_state[key]) for key in state),
        "counts": [
            (each.stats.skipped_nonfinite, each.stats.rounds, each.stats.values, each.residual_resets)
            for each in (on_device, by_frames)
        ],
        "bytes": (on_device.stats.bytes_sent, by_frames.stats.bytes_sent),
    }


def qsgd(rank: int, world: int) -> dict[str, Any]:
    return compare("qsgd:4,bucket=128", rank)


def qsgd_with_feedback(rank: int, world: int) -> dict[str, Any]:
    return compare("ef:0.9|qsgd:8,bucket=256", rank)


def sign_with_feedback(rank: int, world: int) -> dict[str, Any]:
    return compare("ef|sign:256", rank)


def bins_with_feedback(rank: int, world: int) -> dict[str, Any]:
    return compare("ef:0.95|bins:2,bucket=128", rank)


SLOW = [
    (3, qsgd_with_feedback), (2, sign_with_feedback), (1, qsgd_with_feedback), (3, qsgd), (2, bins_with_feedback),
]  # fmt: skip


@pytest.mark.parametrize(
    "world, function", [(2, qsgd_with_feedback), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_means_and_residuals_equal_those_by_frames(world: int, function: ranks.RankFunction, tmp_path: Path) -> None:
    for result in ranks.run_ranks(function, world, tmp_path):
        assert result["means"] and result["state"]
        assert result["counts"][0] == result["counts"][1]
        assert (result["nan"] > 0) == (world > 1)
        sent, sent_in_frames = result["bytes"]
        assert sent <= 1.5 * sent_in_frames  # messages of means are padded to the longest, which tiny shards make long
