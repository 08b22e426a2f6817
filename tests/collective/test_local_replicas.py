"""LocalSGD between replicas of several ranks, and with ranks that join and leave."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collective import differing
from ranks import batches, failures, network, parameters, run_ranks, same


def train(local, count, *, rank, skip=0):
    for x, y in list(batches(rank, skip + count, size=16))[skip:]:
        local.zero_grad()
        nn.functional.cross_entropy(local.model(x), y).backward()
        local.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(model):
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}


def _exchanged_by_one_rank(local, inside):
    """Whether each slot is exchanged by one rank of the replica, and the others get the mean inside it."""
    residuals = torch.tensor([len(local.stats()["residual_norms"])])
    dist.all_reduce(residuals, group=inside)
    compressed = 0 if local.options.codec == "none" else 2
    return int(residuals) == compressed and local.stats()["bytes_inside"] > 0


def nonfinite(rank, world):
    """A value that is not finite in the part of one rank raises on all ranks of all replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "inner"))
    ddp = DistributedDataParallel(network(), process_group=mesh["inner"].get_group())
    local = laconic.LocalSGD(ddp, None, every=1, codec="ef|qsgd:4", group=mesh["replica"].get_group())
    with torch.no_grad():
        ddp.module[0].weight[0, 0] = float("nan")
    with pytest.raises(laconic.NonFiniteError):
        local.after_step()
    with torch.no_grad():
        ddp.module[0].weight[0, 0] = 1.0
    local.after_step()
    return {"goes on": differing(dict(ddp.named_parameters())) == []}


def replicas(rank, world):
    """Two replicas of two ranks each: DDP or FSDP2 inside, compressed between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "inner"))
    across, inside = mesh["replica"].get_group(), mesh["inner"].get_group()
    results = {}
    ends = {}
    for codec in ("none", "ef|topk:0.1|sign"):
        options = {"every": 3, "codec": codec, "outer": "muloco", "group": across, "fragments": 2, "overlap": 1}
        ddp = DistributedDataParallel(network(rank), process_group=inside)
        local = laconic.LocalSGD(ddp, adamw(ddp), **options)
        train(local, 5, rank=rank)
        results[f"{codec} ddp inside"] = differing(dict(ddp.named_parameters()), inside) == []
        results[f"{codec} ddp between"] = differing(dict(ddp.named_parameters()), across) != []
        local.finish()
        results[f"{codec} ddp finished"] = differing(dict(ddp.named_parameters())) == []
        results[f"{codec} ddp shares"] = _exchanged_by_one_rank(local, inside)
        ends["ddp", codec] = parameters(ddp)
        sharded = network(0)  # fully_shard does not make ranks equal
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh["inner"])
        local = laconic.LocalSGD(sharded, adamw(sharded), **options)
        train(local, 5, rank=rank)
        with torch.no_grad():
            sharded(torch.zeros(1, 64))  # leaves gathered parameters behind, which an exchange must not miss
        local.finish()
        results[f"{codec} fsdp finished"] = differing({k: v.detach() for k, v in whole(sharded).items()}) == []
        ends["fsdp", codec] = [p.detach().clone() for p in whole(sharded).values()]
        results[f"{codec} fsdp moved"] = not same(ends["fsdp", codec], parameters(network(0)))
    pairs = zip(ends["ddp", "none"], ends["fsdp", "none"], strict=True)
    results["fsdp trains as ddp"] = all(torch.allclose(a, b, atol=1e-3) for a, b in pairs)
    with pytest.raises(laconic.ConfigError, match="takes the bare module, or a replica of other ranks"):
        laconic.LocalSGD(ddp, None)
    with pytest.raises(laconic.ConfigError, match=r"the mesh over which parameter '0.weight' is sharded"):
        laconic.LocalSGD(sharded, None)
    with pytest.raises(laconic.ConfigError, match="clip='median'"):
        laconic.LocalSGD(sharded, None, group=across, clip="median")
    return results | nonfinite(rank, world)


def members(rank, world):
    """Two ranks train, a third joins, then the first leaves."""
    results = {}
    for codec, options in (
        ("ef|topk:0.1|sign", {"continue_from": "local"}), ("ef|thc:6", {}), ("ef|powersgd:2", {"overlap": 1}),
    ):  # fmt: skip
        pair, last = dist.new_group([0, 1]), dist.new_group([1, 2])
        alone = dist.new_group([rank], use_local_synchronization=True)
        model = network(rank)
        local = laconic.LocalSGD(
            model, adamw(model), every=3, codec=codec, outer="muloco", group=pair if rank < 2 else alone, **options
        )  # fmt: skip
        if rank < 2:
            train(local, 5, rank=rank)
        progress = parameters(model)
        norms = local.stats()["residual_norms"] if rank < 2 and not options.get("overlap") else {}
        local.regroup(None)
        after = local.stats()
        results[f"{codec} joined"] = after["ranks"] == 3 and after["steps"] == 5 and after["regroups"] == 1
        results[f"{codec} progress kept"] = rank == 2 or options.get("overlap") or same(parameters(model), progress)
        results[f"{codec} residuals kept"] = set(norms) <= set(after["residual_norms"]) and not after["residual_resets"]
        train(local, 4, rank=rank, skip=5)
        local.synchronize()
        results[f"{codec} three agree"] = differing(dict(model.named_parameters())) == []
        if rank:
            local.regroup(last)
            train(local, 3, rank=rank, skip=9)
            local.finish()
            results[f"{codec} two agree"] = differing(dict(model.named_parameters()), last) == []
            results[f"{codec} in step"] = local.stats()["steps"] == 12 and local.stats()["ranks"] == 2
        else:
            results |= {f"{codec} two agree": True, f"{codec} in step": True}
    return results


def lost(rank, world, *, overlap):
    """A rank stops answering. The others raise within the timeout, and go on without it."""
    dist.barrier()  # the rank that slept in the case before comes late
    pair = dist.new_group([0, 1])
    model = network()
    local = laconic.LocalSGD(
        model, adamw(model), every=2, codec="ef|topk:0.1|sign", overlap=overlap, timeout_s=3.0
    )  # fmt: skip
    train(local, 2 + overlap, rank=rank)
    results = {}
    if rank == 2:
        time.sleep(8.0)
        return {"raised": True, "agree": True, "counted": True}
    began = time.monotonic()
    with pytest.raises(laconic.LaconicError, match="lost another rank"):
        train(local, 4, rank=rank, skip=3)
    results["raised"] = time.monotonic() - began < 10.0
    local.regroup(pair)
    train(local, 6, rank=rank, skip=4)
    local.finish()
    results["agree"] = differing(dict(model.named_parameters()), pair) == []
    results["counted"] = local.stats()["residual_resets"] == 1 and local.stats()["ranks"] == 2
    return results


def lost_rank(rank, world):
    return {f"{k} {overlap}": v for overlap in (0, 1) for k, v in lost(rank, world, overlap=overlap).items()}


def conserved(rank, world):
    """What ranks have yet to send does not change when their number does: the next means deliver it."""
    policy = laconic.Policy(min_numel=0, exempt_1d=False)
    pair = dist.new_group([0, 1])
    generator = torch.Generator().manual_seed(rank)
    values = [torch.randn(5000, generator=generator) for _ in range(3)]
    sent = torch.zeros(5000)
    after = laconic.collective.Exchange("ef|topk:0.05", policy=policy)
    total = torch.zeros(5000)
    if rank < 2:
        before = laconic.collective.Exchange("ef|topk:0.05", pair, policy=policy)
        for x in values:
            y = x.clone()
            before.mean([("w", y)])
            sent += 2 * y  # the sum over both ranks
            total += x
        after.carry_residuals(before, [("w", total)])
    delivered = torch.zeros(5000)
    for _ in range(200):
        y = torch.zeros(5000)
        after.mean([("w", y)])
        delivered += 3 * y
    dist.all_reduce(total)
    dist.broadcast(sent, 0)
    # As an owner a rank kept the residual of a mean over two; it is now one of a mean over three.
    error = (sent + delivered - total).norm() / total.norm()
    return {"sum": float(error) < 0.6, "some": float((sent - total).norm() / total.norm()) > float(error)}


@pytest.mark.slow
def test_replicas_of_ddp_and_fsdp_exchange_compressed(tmp_path):
    assert not failures(run_ranks(replicas, 4, tmp_path), "")


@pytest.mark.slow
def test_ranks_join_and_leave(tmp_path):
    assert not failures(run_ranks(members, 3, tmp_path / "members"), "")


@pytest.mark.slow
def test_ranks_go_on_without_a_rank_that_is_lost(tmp_path):
    assert not failures(run_ranks(lost_rank, 3, tmp_path), "")


@pytest.mark.slow
def test_residuals_are_delivered_after_the_number_of_ranks_has_changed(tmp_path):
    assert not failures(run_ranks(conserved, 3, tmp_path), "")
