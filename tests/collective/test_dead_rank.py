"""A rank that dies, or falls silent, in the middle of a step: one clear error on the others, soon."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch
from ranks import batches, network, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic

TIMEOUT_S = 2.0


def work(rank, world, *, folder, spec, how):
    module = DistributedDataParallel(network(), bucket_cap_mb=0.03)
    attachment = laconic.attach(module, spec, timeout_s=TIMEOUT_S)
    found = {}
    for step, (x, y) in enumerate(batches(rank, 5)):
        if rank == world - 1 and step == 2:
            if how == "silent":
                time.sleep(2.5 * TIMEOUT_S)
            os._exit(0)
        began = time.monotonic()
        try:
            nn.functional.cross_entropy(module(x), y).backward()
        except Exception as error:
            found = {"step": step, "after": time.monotonic() - began, "said": str(error), "kind": type(error).__name__}
            break
    torch.save(found, f"{folder}/{rank}.found")
    assert attachment.attached
    os._exit(0)  # its groups are broken: there is nothing to take down in order


@pytest.mark.parametrize("spec, how", [("ef|topk:0.1|qsgd:4", "dead"), ("ef|thc:6", "silent")])
def test_the_others_hear_of_it(spec, how, tmp_path):
    with pytest.raises(FileNotFoundError):  # ranks end without their results
        run_ranks(partial(work, folder=str(tmp_path), spec=spec, how=how), 2, tmp_path / "ranks")
    found = torch.load(tmp_path / "0.found")
    assert found["step"] == 2 and found["after"] < 2 * TIMEOUT_S
    assert "lost another rank" in found["said"] and "Restart from the last checkpoint" in found["said"]
