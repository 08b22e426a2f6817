"""LocalSGD: a common model once in a while, by the same exchange."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import batches, network, parameters, run_ranks, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collective import differing


def steps(local, count, *, rank, skip=0):
    for x, y in list(batches(rank, skip + count, size=32))[skip:]:
        local.zero_grad()
        loss = nn.functional.cross_entropy(local.model(x), y)
        loss.backward()
        local.step()
    return float(loss.detach())


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def work(rank, world):
    found = {}
    # Plain averaging, by hand.
    model = network(seed=rank)  # other weights on each rank: the first one's count
    local = laconic.LocalSGD(model, sgd(model), every=4, codec="none", outer="mean")
    found["one start"] = same(parameters(model), parameters(network(0)))
    steps(local, 3, rank=rank)
    found["apart in between"] = differing(dict(model.named_parameters())) != []
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
    found["mean"] = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(parameters(model), means, strict=True))
    # Compressed, and with momentum.
    for codec in ("ef|topk:0.1|qsgd:4", "ef|thc:6"):
        for outer in ("mean", "nesterov", lambda anchors: torch.optim.SGD(anchors, lr=0.5)):
            model = network()
            local = laconic.LocalSGD(model, sgd(model), every=5, codec=codec, outer=outer)
            first = steps(local, 5, rank=rank)
            last = steps(local, 40, rank=rank, skip=5)
            name = f"{codec} {outer if isinstance(outer, str) else 'own'}"
            found[f"same {name}"] = differing(dict(model.named_parameters())) == []
            found[f"learns {name}"] = last < 0.95 * first
    # Resumed in the middle, between two exchanges.
    saved = local.state_dict()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    momentum = copy.deepcopy(local.optimizer.state_dict())
    steps(local, 7, rank=rank, skip=45)
    again = network(3)
    other = laconic.LocalSGD(again, sgd(again), every=5, codec=codec, outer=outer)
    again.load_state_dict(weights)
    other.optimizer.load_state_dict(momentum)
    other.load_state_dict(saved)
    steps(other, 7, rank=rank, skip=45)
    found["resumed"] = same(parameters(model), parameters(again))
    other.load_state_dict(saved | {"world": torch.tensor([rank, world + 1])})
    found["other world"] = other.residual_resets == 1 and not any(
        key.endswith("/residual") for key in other.exchange.state_dict()
    )
    # Buffers are averaged.
    normed = nn.Sequential(nn.Linear(64, 80), nn.BatchNorm1d(80), nn.Linear(80, 10))
    local = laconic.LocalSGD(normed, sgd(normed), every=2, codec="ef|topk:0.1")
    steps(local, 2, rank=rank)
    found["buffers"] = differing({k: v for k, v in normed.named_buffers() if v.is_floating_point()}) == []
    for match, act in (
        ("bare module", lambda: laconic.LocalSGD(DistributedDataParallel(network()), None)),
        ("every", lambda: laconic.LocalSGD(network(), None, every=0)),
        ("outer must be", lambda: laconic.LocalSGD(network(), None, outer="adam")),
        ("topq", lambda: laconic.LocalSGD(network(), None, codec="topq")),
        (
            r"different arguments \(codec",
            lambda: laconic.LocalSGD(network(), None, codec=f"qsgd:{2 + rank}"),
        ),
        (r"different arguments \(options here", lambda: laconic.LocalSGD(network(), None, every=2 + rank)),
        (r"different arguments \(parameters here", lambda: laconic.LocalSGD(nn.Linear(4, 2 + rank), None)),
    ):
        with pytest.raises(laconic.ConfigError, match=match):
            act()
    with pytest.raises(laconic.InputError, match="no parameter '0"):
        local.load_state_dict(saved | {"anchors": {}})
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(work, 2, tmp_path_factory.mktemp("local"))


def test_ranks_settle_on_a_common_model(ranks):
    assert len(ranks[0]) == 18
    assert [{name for name, good in rank.items() if not good} for rank in ranks] == [set(), set()]
