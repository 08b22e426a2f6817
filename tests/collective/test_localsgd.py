"""LocalSGD on 2 ranks: a common model after every exchange, resumed runs, rejected arguments."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collective import differing
from ranks import batches, facts, network, parameters, same


def steps(local, count, *, rank, skip=0):
    """Train some steps and return the last loss; ``skip`` leaves out the first batches."""
    for x, y in list(batches(rank, skip + count, size=32))[skip:]:
        local.zero_grad()
        loss = nn.functional.cross_entropy(local.model(x), y)
        loss.backward()
        local.step()
    return float(loss.detach())


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def averaging(rank, world):
    """Compare uncompressed averaging with averaging by hand."""
    model = network(seed=rank)  # different weights on each rank: those of rank 0 are used
    local = laconic.LocalSGD(model, sgd(model), every=4, codec="none", outer="mean")
    results = {"same start": same(parameters(model), parameters(network(0)))}
    steps(local, 3, rank=rank)
    results["different between exchanges"] = differing(dict(model.named_parameters())) != []
    alone = network(0)
    optimizer = sgd(alone)
    for x, y in batches(rank, 4, size=32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(x), y).backward()
        optimizer.step()
    means = parameters(alone)
    for mean in means:
        dist.all_reduce(mean)
        mean /= world
    steps(local, 1, rank=rank, skip=3)
    results["mean"] = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(parameters(model), means, strict=True))
    # Float buffers are averaged.
    normed = nn.Sequential(nn.Linear(64, 80), nn.BatchNorm1d(80), nn.Linear(80, 10))
    local = laconic.LocalSGD(normed, sgd(normed), every=2, codec="ef|topk:0.1")
    steps(local, 2, rank=rank)
    results["buffers"] = differing({k: v for k, v in normed.named_buffers() if v.is_floating_point()}) == []
    return {f"averaging {name}": value for name, value in results.items()}


def compressed(rank, world):
    """Train compressed with each outer optimizer, then resume the last run between two exchanges."""
    results = {}
    for codec in ("ef|topk:0.1|qsgd:4", "ef|thc:6"):
        for outer in ("mean", "mean:1.5", "nesterov", lambda anchors: torch.optim.SGD(anchors, lr=0.5)):
            model = network()
            local = laconic.LocalSGD(model, sgd(model), every=5, codec=codec, outer=outer)
            first = steps(local, 5, rank=rank)
            last = steps(local, 40, rank=rank, skip=5)
            name = f"{codec} {outer if isinstance(outer, str) else 'function'}"
            results[f"same {name}"] = differing(dict(model.named_parameters())) == []
            results[f"learns {name}"] = last < 0.95 * first
    saved = local.state_dict()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    momentum = copy.deepcopy(local.optimizer.state_dict())
    steps(local, 7, rank=rank, skip=45)
    resumed_model = network(3)
    resumed = laconic.LocalSGD(resumed_model, sgd(resumed_model), every=5, codec=codec, outer=outer)
    resumed_model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(momentum)
    resumed.load_state_dict(saved)
    steps(resumed, 7, rank=rank, skip=45)
    results["resumed"] = same(parameters(model), parameters(resumed_model))
    resumed.load_state_dict(saved | {"world": torch.tensor([rank, world + 1])})
    results["resumed in another world"] = resumed.residual_resets == 1 and not any(
        key.endswith("/residual") for key in resumed.exchange.state_dict()
    )
    with pytest.raises(laconic.InputError, match="no parameter '0"):
        resumed.load_state_dict(saved | {"anchors": {}})
    return {f"compressed {name}": value for name, value in results.items()}


def rejected(rank, world):
    for match, act in (
        ("bare module", lambda: laconic.LocalSGD(DistributedDataParallel(network()), None)),
        ("every", lambda: laconic.LocalSGD(network(), None, every=0)),
        ("outer must be", lambda: laconic.LocalSGD(network(), None, outer="adam")),
        ("outer must be", lambda: laconic.LocalSGD(network(), None, outer="mean:0")),
        ("outer must be", lambda: laconic.LocalSGD(network(), None, outer="mean:fast")),
        ("topq", lambda: laconic.LocalSGD(network(), None, codec="topq")),
        (r"different arguments \(codec", lambda: laconic.LocalSGD(network(), None, codec=f"qsgd:{2 + rank}")),
        (r"different arguments \(options", lambda: laconic.LocalSGD(network(), None, every=2 + rank)),
        (r"different arguments \(parameters", lambda: laconic.LocalSGD(nn.Linear(4, 2 + rank), None)),
    ):
        with pytest.raises(laconic.ConfigError, match=match):
            act()
    return {"rejected": True}


test_fact_holds_on_all_ranks = facts([averaging, compressed, rejected], 2, {
    "uncompressed exchange averages parameters and buffers": "averaging",
    "compressed exchange trains a common model and resumes": "compressed",
    "wrong or different arguments raise ConfigError": "rejected",
})  # fmt: skip
