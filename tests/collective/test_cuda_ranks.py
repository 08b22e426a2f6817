"""Gradients on a GPU: compressed there, and exchanged by gloo through the host or by NCCL.

NCCL needs a GPU for each rank, so a machine with one GPU can test one rank of it; with gloo several ranks share a GPU.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import counters
from ranks import batches, network, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SPECS = ["none", "qsgd:4", "ef|qsgd:4", "ef|thc:4", "shared:8", "ef|sign", "ef|topk:0.1|qsgd:4", "ef|powersgd:2"]


def train(spec, backend, rank, world, steps=300):
    group = dist.new_group(backend=backend)
    model = DistributedDataParallel(network().cuda(), process_group=group)
    attachment = laconic.attach(model, spec, policy=laconic.Policy(min_numel=0, exempt_1d=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for x, y in batches(rank, steps):
        loss = cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    stats = attachment.stats()
    attachment.detach()
    return {
        "losses": losses,
        "parameters": torch.cat([each.detach().flatten().cpu() for each in model.parameters()]),
        "rounds": stats["rounds"],
        "fallbacks": counters.counts().get("reference_kernels", 0),
    }


def learned(losses):
    return sum(losses[-10:]) < 0.9 * sum(losses[:10])


@pytest.mark.parametrize("spec", SPECS)
def test_gloo_ranks_on_one_gpu_learn_the_same_parameters(spec, tmp_path):
    first, second = run_ranks(partial(train, spec, "gloo"), 2, tmp_path)
    assert torch.equal(first["parameters"], second["parameters"])
    assert learned(first["losses"]) and learned(second["losses"])
    assert first["fallbacks"] == 0, "the torch fallback was used instead of kernels"
    assert spec == "none" or first["rounds"] > 0


@pytest.mark.parametrize("spec", SPECS)
def test_nccl_rank_learns(spec, tmp_path):
    (result,) = run_ranks(partial(train, spec, "nccl"), 1, tmp_path)
    assert learned(result["losses"]) and result["fallbacks"] == 0
