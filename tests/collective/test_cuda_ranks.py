"""Gradients that are born on a GPU: compressed there, exchanged by gloo through the host, or by NCCL.

NCCL wants a GPU for each rank, so one rank is all that a machine with one GPU can show of it; several ranks share the
GPU through gloo.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import batches, network, run_ranks
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import counters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SPECS = ["none", "qsgd:4", "ef|qsgd:4", "ef|thc:4", "shared:8", "ef|sign", "ef|topk:0.1|qsgd:4", "ef|powersgd:2"]


def train(spec, backend, rank, world, steps=300):
    group = dist.new_group(backend=backend)
    model = DistributedDataParallel(network().cuda(), process_group=group)
    attached = laconic.attach(model, spec, policy=laconic.Policy(min_numel=0, exempt_1d=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for x, y in batches(rank, steps):
        loss = cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    stats = attached.stats()
    attached.detach()
    return {
        "losses": losses,
        "parameters": torch.cat([each.detach().flatten().cpu() for each in model.parameters()]),
        "rounds": stats["rounds"],
        "slow": counters.counts().get("reference_kernels", 0),
    }


def learned(losses):
    return sum(losses[-10:]) < 0.9 * sum(losses[:10])


@pytest.mark.parametrize("spec", SPECS)
def test_ranks_that_share_a_gpu_learn_together(spec, tmp_path):
    one, other = run_ranks(partial(train, spec, "gloo"), 2, tmp_path)
    assert torch.equal(one["parameters"], other["parameters"])
    assert learned(one["losses"]) and learned(other["losses"])
    assert one["slow"] == 0, "plain torch stood in for kernels"
    assert spec == "none" or one["rounds"] > 0


@pytest.mark.parametrize("spec", SPECS)
def test_a_rank_of_nccl_learns(spec, tmp_path):
    (alone,) = run_ranks(partial(train, spec, "nccl"), 1, tmp_path)
    assert learned(alone["losses"]) and alone["slow"] == 0
