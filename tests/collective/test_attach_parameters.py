"""attach with unusual parameters, gradients and groups: complex, sparse, scaled, all too small to be compressed."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collective import differing
from laconic.collective.trainers import TrainerAttachment
from ranks import LogCapture, batches, facts, network, parameters, same


class ComplexLinear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 80, dtype=torch.complex64))
        self.head = nn.Linear(80, 10)

    def forward(self, x):
        return self.head((x.to(torch.complex64) @ self.weight).abs())


def embedding(sparse):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(100, 64, sparse=sparse), nn.Linear(64, 64), nn.Linear(64, 10))


def step(module, x, y, lr=0.1):
    nn.functional.cross_entropy(module(x), y).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= lr * parameter.grad
    module.zero_grad()


def complex_parameters(rank, world):
    results = {}
    for spec in ("bf16", "ef|topk:0.1", "ef|thc:6", "ef|powersgd:2"):
        module = DistributedDataParallel(ComplexLinear())
        attachment = laconic.attach(module, spec, check_every=1, error_every=1)
        before = module.module.weight.detach().clone()
        for x, y in batches(rank, 3):
            step(module, x, y)
        moved = torch.view_as_real(module.module.weight.detach() - before).abs().amax((0, 1))
        results[f"complex same {spec}"] = differing(dict(module.named_parameters())) == []
        results[f"complex both parts move {spec}"] = bool((moved > 0).all())
        results[f"complex compressed {spec}"] = attachment.stats()["errors"]["weight"] > 0
    plain, attached = (DistributedDataParallel(ComplexLinear()) for _ in range(2))
    laconic.attach(attached, "union")
    for module in (plain, attached):
        for x, y in batches(rank, 3):
            step(module, x, y)
    pairs = zip(parameters(plain), parameters(attached), strict=True)
    results["complex lossless is plain DDP"] = all(torch.allclose(x, y, atol=1e-6) for x, y in pairs)
    return results


def sparse_gradients(rank, world):
    results, trained = {}, {}
    inputs = torch.Generator().manual_seed(rank)
    data = [(torch.randint(100, (16,), generator=inputs), torch.arange(16) % 10) for _ in range(3)]
    for name, spec, options in (
        ("plain", None, {}),
        ("none", "none", {"check_every": 1}),
        ("topk", "ef|topk:0.1", {"check_every": 2}),
        ("thc", "ef|thc:6", {}),
    ):
        module = DistributedDataParallel(embedding(sparse=True))
        attachment = laconic.attach(module, spec, **options) if spec else None
        for x, y in data:
            step(module, x, y)
        trained[name] = parameters(module)
        results[f"sparse same {name}"] = differing(dict(module.named_parameters())) == []
        if attachment is not None:
            stats = attachment.stats()
            results[f"sparse drifts {name}"] = stats["drifts"] == 0 and stats["steps"] == 3
            exempt = "none: has sparse gradients" if spec != "none" else None
            results[f"sparse exempt {name}"] = stats["exempt"].get("0.weight") == exempt
    results["sparse none is plain"] = same(trained["plain"], trained["none"])
    results["sparse first step is plain"] = not same(trained["plain"], trained["topk"])
    return results


def scaled(rank, world):
    """With a scale of powers of two a scaler must not change a bit, although its scale changes in each step."""

    def train(scales, spec, resume_at=None, **options):
        module = DistributedDataParallel(network())
        attachment = laconic.attach(module, spec, **options)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for index, (x, y) in enumerate(batches(rank, 6)):
            if index == resume_at:
                state, weights = attachment.state_dict(), parameters(module)
                module = DistributedDataParallel(network())
                attachment = laconic.attach(module, spec, **options)
                attachment.load_state_dict(state)
                optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
                with torch.no_grad():
                    torch._foreach_copy_(list(module.parameters()), weights)
            scales.scale(nn.functional.cross_entropy(module(x), y)).backward()
            scales.step(optimizer)
            scales.update()
            optimizer.zero_grad()
        return parameters(module), attachment.stats()

    def growing():
        return torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)

    results = {}
    for spec in ("ef|topk:0.1", "momentum:0.9|topk:0.1"):
        expected, _ = train(torch.amp.GradScaler("cpu", enabled=False), spec)
        scaler = growing()
        followed, stats = train(scaler, spec, scaler=scaler)
        ignored, unscaled = train(growing(), spec)
        scaler = growing()
        resumed, _ = train(scaler, spec, resume_at=3, scaler=scaler)
        results[f"scaled followed {spec}"] = same(expected, followed) and stats["residual_rescales"] == 5
        results[f"scaled ignored {spec}"] = not same(expected, ignored) and unscaled["residual_rescales"] == 0
        results[f"scaled resumed {spec}"] = same(expected, resumed)
    return results


def uncompressed(rank, world):
    results = {}
    for name, model, expected in (("small", nn.Linear(20, 30), True), ("large", network(), False)):
        with LogCapture() as logged:
            attachment = laconic.attach(DistributedDataParallel(model), "ef|thc:6")
        results[f"uncompressed {name}"] = logged.has("compresses nothing: all 2 trained") == expected
    with LogCapture() as logged:
        laconic.attach(DistributedDataParallel(nn.Linear(20, 30)), "qsgd:4", policy=laconic.Policy(min_numel=100))
    results["uncompressed lowered limit"] = not logged.lines
    attachment.detach()
    dist.barrier()
    return results


def groups(rank, world):
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # this rank now knows one group more
    module = DistributedDataParallel(network())
    laconic.attach(module, "qsgd:4")
    step(module, *next(iter(batches(rank, 1))))
    results = {"groups differ in number": differing(dict(module.named_parameters())) == []}
    alone = DistributedDataParallel(network(), process_group=dist.new_group([0, 1]))
    if rank == 0:
        with pytest.raises(laconic.LaconicError, match="waited for all ranks to call attach"):
            laconic.attach(alone, "qsgd:4", timeout_s=0.5)
    dist.barrier()
    attached = TrainerAttachment("qsgd:4", {})
    for _ in range(2):  # as by two calls of fit
        module = DistributedDataParallel(network())
        attached.begin(module)
        attached.begin(module)
        step(module, *next(iter(batches(rank, 1))))
        attached.stepped()
        del module
        gc.collect()
    return results


def battery(rank, world):
    results = complex_parameters(rank, world) | sparse_gradients(rank, world) | scaled(rank, world)
    results |= uncompressed(rank, world) | groups(rank, world)
    module = DistributedDataParallel(network())
    attachment = laconic.attach(module, "qsgd:4")
    step(module, *next(iter(batches(rank, 1))))
    store = dist.group.WORLD.get_group_store()
    dist.destroy_process_group()
    results["stats after the group"] = attachment.stats()["steps"] == 1
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    return results


test_fact_holds_on_all_ranks = facts([battery], 2, {
    "complex gradients are exchanged whole": "complex",
    "sparse gradients travel uncompressed": "sparse",
    "residuals follow the gradient scale": "scaled",
    "a codec that compresses nothing is logged": "uncompressed",
    "ranks in different numbers of groups attach": "groups",
    "stats are readable after destroy_process_group": "stats",
})  # fmt: skip
