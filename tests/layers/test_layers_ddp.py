"""Compressed layers under DDP on two ranks: the same bits on both, and dense weights are sent once only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collective import differing
from ranks import run_ranks

SCHEMES = ("subspace:0.1,T=3", "hashed:0.2", "monarch:0.2")


def train(rank: int, world: int) -> dict[str, bool]:
    results = {}
    for scheme in SCHEMES:
        torch.manual_seed(rank)  # different on each rank: DDP makes them equal
        model = nn.Sequential(nn.Linear(100, 120), nn.Tanh(), nn.Linear(120, 100), nn.Tanh(), nn.Linear(100, 4))
        compressed = laconic.compress(model, scheme, init="fresh", seed=5)
        compressed(torch.randn(2, 100))
        ddp = DistributedDataParallel(compressed)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in range(7):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(torch.randn(8, 100)), torch.randn(8, 4)).backward()
            optimizer.step()
        equal = differing(dict(laconic.expand(compressed).named_parameters())) == []
        # DDP broadcasts buffers before each step, so they must be few.
        results[scheme] = equal and sum(buffer.numel() for buffer in compressed.buffers()) <= 4
    return results


@pytest.mark.timeout(120)
def test_ranks_hold_the_same_weights(tmp_path: Path) -> None:
    assert run_ranks(train, 2, tmp_path) == [dict.fromkeys(SCHEMES, True)] * 2
