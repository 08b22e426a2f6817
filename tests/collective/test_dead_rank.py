"""A rank dies or stops answering during a step: the other ranks raise one clear error within the timeout."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from ranks import batches, network, run_ranks

TIMEOUT_S = 2.0


def train_until_a_rank_is_lost(rank, world, *, folder, spec, fault):
    module = DistributedDataParallel(network(), bucket_cap_mb=0.03)
    attachment = laconic.attach(module, spec, timeout_s=TIMEOUT_S)
    result = {}
    for step, (x, y) in enumerate(batches(rank, 5)):
        if rank == world - 1 and step == 2:
            if fault == "silent":
                time.sleep(2.5 * TIMEOUT_S)
            os._exit(0)
        began = time.monotonic()
        try:
            nn.functional.cross_entropy(module(x), y).backward()
        except Exception as error:
            result = {"step": step, "seconds": time.monotonic() - began, "message": str(error)}
            break
    torch.save(result, f"{folder}/{rank}.result")
    assert attachment.attached
    os._exit(0)  # the process groups are broken and cannot be destroyed in order


@pytest.mark.parametrize("spec, fault", [("ef|topk:0.1|qsgd:4", "dead"), ("ef|thc:6", "silent")])
def test_lost_rank_raises_an_error_on_the_others(spec, fault, tmp_path):
    function = partial(train_until_a_rank_is_lost, folder=str(tmp_path), spec=spec, fault=fault)
    with pytest.raises(FileNotFoundError):  # ranks exit without the result that run_ranks expects
        run_ranks(function, 2, tmp_path / "ranks")
    result = torch.load(tmp_path / "0.result")
    assert result["step"] == 2 and result["seconds"] < 2 * TIMEOUT_S
    assert "lost another rank" in result["message"] and "Restart from the last checkpoint" in result["message"]
