"""attach on modules of fully_shard: torch's HSDP bit for bit without compression, equal replicas with it."""

from __future__ import annotations

import math
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import laconic
from laconic.collective import differing
from ranks import LogCapture, failures, run_ranks, same
from sharded_models import Branches, adamw, muon, sharded_gpt, train, whole

BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
BF16_FP32 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
FP16 = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}
WITH_MEMORY = ("ef|qsgd:4", "ef|thc:4", "ef|powersgd:2")
SMALL = laconic.Policy(min_numel=512)


def two_by_two():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def attached(mesh, spec, *, native=False, options=None, **arguments):
    """Return a sharded GPT and its attachment: on the whole mesh, or on its shards with the replicas named."""
    model = sharded_gpt(mesh if native else mesh["shard"], **(options or {}))
    replicate = None if native else mesh["replicate"]
    return model, laconic.attach(model, spec, replicate=replicate, policy=SMALL, **arguments)


def local(model):
    return {name: parameter.to_local().detach() for name, parameter in model.named_parameters()}


def exact(rank, mesh):
    """Without compression: torch's own HSDP, bit for bit."""
    results = {}
    for name, options, training in (
        ("plain", {}, {}),
        ("gathered", {"reshard_after_forward": False}, {"accumulate": 2}),
        ("bf16", BF16, {}),
        ("bf16 reduced in fp32", BF16_FP32, {"accumulate": 2}),
        ("fp16", FP16, {}),
        ("shards accumulate", {}, {"accumulate": 2, "all_reduce_last": True}),
    ):
        stock = sharded_gpt(mesh, **options)
        expected = train(stock, 2, rank=rank, **training), *whole(stock)
        for native in (False, True):
            model, attachment = attached(mesh, "none", native=native, options=options, check_every=2)
            trained = train(model, 2, rank=rank, **training), *whole(model)
            key = f"exact {name} {'mesh' if native else 'replicate'}"
            results[key] = same(expected, trained)
            results[f"{key} counts"] = (attachment.stats()["steps"], attachment.stats()["drifts"]) in ((2, 0), (4, 0))
    return results


def exact_options(rank, mesh):
    """Compare Muon, a divisor of the user's, warm-up, and torch's way after detach with torch's own HSDP."""
    results = {}
    stock, (model, attachment) = sharded_gpt(mesh), attached(mesh, "ef|qsgd:4", native=True, warmup_steps=2)
    for each in (stock, model):
        for part in each.modules():
            if hasattr(part, "set_gradient_divide_factor"):
                part.set_gradient_divide_factor(3.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it adds
    train(stock, 2, rank=rank, optimizers=muon(stock))
    train(model, 2, rank=rank, optimizers=muon(model))
    results["exact muon, divisor, warm-up"] = same(whole(stock), whole(model))
    attachment.detach()
    results["exact after detach"] = not attachment.attached
    train(stock, 1, rank=rank)
    train(model, 1, rank=rank)
    results["exact after detach"] = same(whole(stock), whole(model)) and attachment.stats()["steps"] == 2
    return results


def branches(rank, mesh):
    """Unused, frozen and tied parameters, and fewer rows than shards; gradients are final where hooks see them."""
    results, ends, seen = {}, {}, []
    for spec in ("stock", "none", "ef|qsgd:8"):
        model = Branches()
        fully_shard(model, mesh=mesh if spec == "stock" else mesh["shard"])
        if spec != "stock":
            attachment = laconic.attach(model, spec, replicate=mesh["replicate"], policy=SMALL)
        if spec == "ef|qsgd:8":
            weight = model.first.weight
            weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
        [optimizer], generator = adamw(model), torch.Generator().manual_seed(rank)
        for step in range(4):
            model.uses_optional = step % 2 == 0
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            final = model.first.weight.grad.to_local().clone()
            optimizer.zero_grad()
        ends[spec] = whole(model)
    results["branches none"] = same(ends["stock"], ends["none"])
    results["branches equal"] = differing(local(model), mesh["replicate"].get_group()) == []
    results["branches close"] = all(
        torch.allclose(a, b, atol=0.05) for a, b in zip(ends["stock"], ends["ef|qsgd:8"], strict=True)
    )
    results["branches hooks"] = len(seen) == 4 and torch.equal(seen[-1], final)
    exempt = attachment.stats()["exempt"]
    results["branches names"] = set(exempt) == {"second.bias", "optional.bias", "last.weight", "last.bias"}
    return results


def compressed(rank, mesh):
    """Equal replicas, fewer bytes; the codec changes in between; values that are not finite spread."""
    results, across = {}, mesh["replicate"].get_group()
    for spec in ("qsgd:8", *WITH_MEMORY):
        model, attachment = attached(mesh, spec, native=spec == "ef|thc:4", error_every=2)
        train(model, 2, rank=rank, accumulate=2)
        stats = attachment.stats()
        results[f"compressed {spec} equal"] = differing(local(model), across) == [] and stats["drifts"] == 0
        plain = 4 * sum(x.numel() for x in local(model).values()) * 2
        results[f"compressed {spec} bytes"] = stats["wire_bytes"] < (0.7 if spec == "qsgd:8" else 0.5) * plain
        results[f"compressed {spec} errors"] = set(stats["errors"]) <= set(local(model)) and stats["errors"] != {}
    ends = []
    for delays in (False, True):  # ranks that are late begin fewer exchanges ahead, with the same bits
        model, attachment = attached(mesh, "ef|qsgd:4")
        for block in model.blocks if delays else ():
            block.register_full_backward_hook(lambda *_: time.sleep(0.02 * (rank % 3)))
        train(model, 3, rank=rank)
        ends.append(whole(model))
    results["compressed late ranks"] = same(*ends)
    attachment.set("qsgd:8")
    train(model, 1, rank=rank)
    results["compressed set"] = attachment.spec == "qsgd:8" and attachment.stats()["residual_resets"] == 1
    if rank == 0:
        with torch.no_grad():
            next(model.parameters()).to_local().fill_(float("nan"))
    train(model, 1, rank=rank)
    results["compressed nonfinite"] = any(not bool(x.isfinite().all()) for x in local(model).values())
    different = sharded_gpt(mesh["shard"])
    with torch.no_grad():
        next(different.parameters()).to_local().add_(rank // 2)
    with LogCapture() as log:
        checked = laconic.attach(different, "qsgd:8", replicate=across)
        train(different, 1, rank=rank)
    results["compressed start"] = checked.stats()["drifts"] == 1 and log.has("have drifted apart")
    return results


def saved(rank, mesh):
    """A checkpoint resumes with the same bits on the same mesh, and with the same sums on another one."""
    results = {}
    folder = [None]
    for spec in WITH_MEMORY:
        model, attachment = attached(mesh, spec)
        optimizers = adamw(model)
        train(model, 2, rank=rank, optimizers=optimizers)
        folder[0] = f"{dist.distributed_c10d._get_default_store().get('folder').decode()}/{spec[3:7]}"
        states = get_state_dict(model, optimizers)
        before = attachment.state_dict()
        dcp.save({"model": states[0], "optimizer": states[1], "laconic": before}, checkpoint_id=folder[0])
        train(model, 2, rank=rank, optimizers=optimizers, seed=1)
        again, resumed = attached(mesh, spec)
        optimizers = adamw(again)
        states = get_state_dict(again, optimizers)
        state = {"model": states[0], "optimizer": states[1], "laconic": resumed.state_dict()}
        dcp.load(state, checkpoint_id=folder[0])
        set_state_dict(again, optimizers, model_state_dict=states[0], optim_state_dict=states[1])
        resumed.load_state_dict(state["laconic"])
        train(again, 2, rank=rank, optimizers=optimizers, seed=1)
        results[f"saved {spec}"] = same(whole(model), whole(again)) and resumed.stats()["steps"] == 4
        results[f"saved {spec} kept"] = resumed.stats()["residual_resets"] == 0
        if spec != "ef|powersgd:2":
            results |= moved(mesh, spec, before, folder[0])
    return results


def moved(mesh, spec, before, folder):
    """Load a checkpoint of 2 x 2 on 4 x 1 ranks: two replicas have residuals, of whole parameters now."""
    other = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    _, attachment = attached(other, spec)
    state = {"laconic": attachment.state_dict()}
    dcp.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    attachment.load_state_dict(state["laconic"])
    after, results = attachment.state_dict(), {}
    for name in (key.partition("/")[2].partition("/")[2] for key in before if key.startswith("unsent/")):
        old = before[f"unsent/{mesh.get_local_rank('replicate')}/{name}"].to_local()
        # Of its own part the rank that owns the mean keeps the residual of the mean.
        mine = _pending(old.flatten(), 2, mesh.get_local_rank("replicate"), spec, 4)
        rows = [torch.zeros_like(mine) for _ in range(4)]
        dist.all_gather(rows, mine)
        expected = torch.cat([rows[0] + rows[2], rows[1] + rows[3]])  # shards 0 and 1 of both replicas
        new = after[f"unsent/{other.get_local_rank('replicate')}/{name}"].to_local().flatten()
        total = _pending(new, 4, other.get_local_rank("replicate"), spec, 4)
        dist.all_reduce(total)
        results[f"moved {spec} {name}"] = torch.allclose(total, expected, atol=1e-6)
    return results


def _pending(flat, replicas, replica, spec, unit):
    """Return what a rank has yet to send, in units of senders: residuals of means count for all of them."""
    flat = flat.clone()
    if spec == "ef|qsgd:4":
        step = 256 * math.ceil(math.ceil(flat.numel() / replicas) / 256)
        flat[replica * step : (replica + 1) * step] *= unit
    return flat


def refused(rank, mesh):
    results = {}

    def refuses(name, match, *arguments, **options):
        with pytest.raises(laconic.ConfigError, match=match):
            laconic.attach(*arguments, **options)
        results[f"refused {name}"] = True

    model = sharded_gpt(mesh["shard"])
    refuses("momentum", "leave momentum out", model, "momentum:0.9|topk:0.1", replicate=mesh["replicate"])
    refuses("wrong dimension", "one rank of each replica", model, "qsgd:4", replicate=mesh["shard"])
    refuses("two dimensions", "a mesh of one dimension", model, "qsgd:4", replicate=mesh)
    attachment = laconic.attach(model, "qsgd:4", replicate=mesh["replicate"])
    refuses("twice", "attached already", model, "qsgd:4", replicate=mesh["replicate"])
    with pytest.raises(laconic.ConfigError, match="leave momentum out"):
        attachment.set("momentum:0.9|topk:0.1")
    native = sharded_gpt(mesh)
    refuses("other replicas", "leave replicate out", native, "qsgd:4", replicate=mesh["shard"])
    native.set_all_reduce_hook(print)
    refuses("foreign hook", "already has an all-reduce hook", native, "qsgd:4")
    refuses("ddp argument", "replicate is for modules of FSDP2", nn.Linear(2, 2), "qsgd:4", replicate=mesh)
    complex_model = nn.Module()
    complex_model.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.complex64))
    fully_shard(complex_model, mesh=mesh["shard"])
    refuses("complex", "'weight' is complex", complex_model, "qsgd:4", replicate=mesh["replicate"])
    first = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    refuses("FSDP1", "shard with FSDP2", first, "qsgd:4")
    refuses("several groups", "names several meshes", two_groups(mesh), "qsgd:4")
    with LogCapture() as log:
        laconic.attach(sharded_gpt(mesh["shard"], width=8), "qsgd:4", replicate=mesh["replicate"])
    results["refused nothing compressed"] = log.has("compresses nothing")
    return results


def two_groups(mesh):
    """Return a module whose two parameters are sharded over different meshes, which gives it two parameter groups."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult

    model = nn.Module()
    model.near, model.far = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    far = ShardPlacementResult(Shard(0), HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0))
    fully_shard(model, mesh=mesh["shard"], shard_placement_fn=lambda p: far if p is model.far else None)
    return model


def without_replicas(rank, world):
    """A model sharded over all ranks: its collectives by codecs without memory."""
    mesh = init_device_mesh("cpu", (world,))
    results = {}
    for name, options in (("plain", {}), ("gathered", {"reshard_after_forward": False}), ("bf16", BF16)):
        stock, model = sharded_gpt(mesh, **options), sharded_gpt(mesh, **options)
        attachment = laconic.attach(model, "none", gather="none", policy=SMALL)
        expected = train(stock, 2, rank=rank, accumulate=2), *whole(stock)
        results[f"fsdp none {name}"] = same(expected, (train(model, 2, rank=rank, accumulate=2), *whole(model)))
        results[f"fsdp none {name} counts"] = attachment.stats()["steps"] == 2
        if name == "gathered":
            continue
        attachment.detach()
        stock, model = sharded_gpt(mesh, **options), sharded_gpt(mesh, **options)
        ways = [("thc:8", "qsgd:8")] if name == "bf16" else [("qsgd:8", None), ("thc:8", "qsgd:8"), ("bf16", "bf16")]
        for spec, gather in ways:
            attachment = laconic.attach(model, spec, gather=gather, policy=SMALL, error_every=1)
            before = attachment.stats()["wire_bytes"]
            loss, expected = train(model, 2, rank=rank), train(stock, 2, rank=rank)
            stats, key = attachment.stats(), f"fsdp {spec} {gather} {name}"
            results[f"{key} loss"] = abs(float(loss) / float(expected) - 1) < 0.02
            plain = 2 * 4 * sum(x.numel() for x in whole(model)) * (1 if gather is None else 3)
            results[f"{key} bytes"] = stats["wire_bytes"] - before < (0.55 if spec == "bf16" else 0.4) * plain
            results[f"{key} errors"] = stats["errors"] != {} and all(0 <= x < 1 for x in stats["errors"].values())
            results[f"{key} exempt"] = any(name.endswith("bias") for name in stats["exempt"])
            attachment.set("qsgd:4")
            state = attachment.state_dict()
            attachment.load_state_dict(state)
            results[f"{key} steps"] = int(state["steps"]) == 2 and attachment.spec == "qsgd:4"
            attachment.detach()
        train(model, 1, rank=rank)
        results[f"fsdp detached {name}"] = attachment.stats()["steps"] == 2
    for spec, options, match in (
        ("ef|qsgd:4", {}, "a residual of the whole gradient"),
        ("powersgd:2", {}, "whole matrices"),
        ("qsgd:4", {"gather": "ef|qsgd:8"}, "a residual of the whole gradient"),
        ("qsgd:4", {"check_every": 1}, "compares replicas"),
        ("qsgd:4", {"gather_delta": True}, "needs the codec of the differences"),
    ):
        with pytest.raises(laconic.ConfigError, match=match):
            laconic.attach(model, spec, **options)
        results[f"fsdp refuses {spec} {options}"] = True
    return results | unused(rank, mesh) | differences(rank, mesh)


def gathered_error(model):
    """Return how far the parameters that forward uses are from those that the optimizer steps."""
    exact, parts = whole(model), [part for part in model.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.unshard()
    used = [parameter.detach().clone() for parameter in model.parameters()]
    for part in parts:
        part.reshard()
    distance = sum(float((a - b).square().sum()) for a, b in zip(used, exact, strict=True))
    return (distance / sum(float(x.square().sum()) for x in exact)) ** 0.5, used


def differences(rank, mesh):
    """Differences of 4 bits follow the weights, in one gather a step; weights of 4 bits do not, in two."""
    results, errors, sent = {}, {}, {}
    for name, options in (("plain", {}), ("bf16", BF16), ("kept", {"reshard_after_forward": False})):
        for delta in (False, True):
            model = sharded_gpt(mesh, **options)
            attachment = laconic.attach(model, "none", gather="qsgd:4", gather_delta=delta, policy=SMALL)
            optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4)]
            train(model, 1, rank=rank, accumulate=2, optimizers=optimizers)
            before = attachment.stats()["bytes_sent"]
            train(model, 3, rank=rank, seed=1, optimizers=optimizers)
            sent[name, delta] = attachment.stats()["bytes_sent"] - before
            errors[name, delta], used = gathered_error(model)
            results[f"fsdp differences {name} {delta} same"] = not differing({str(i): x for i, x in enumerate(used)})
        results[f"fsdp differences {name} near"] = errors[name, True] < errors[name, False] / 50
    # torch keeps the root's parameters until backward, and gathers the others twice.
    results["fsdp differences bytes"] = sent["plain", True] < 0.65 * sent["plain", False]
    results["fsdp differences bytes kept"] = abs(sent["kept", True] / sent["kept", False] - 1) < 0.01
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(3.0)
    attachment.gather_exactly()
    results["fsdp differences afresh"] = gathered_error(model)[0] == 0.0
    with torch.no_grad(), LogCapture() as log:
        first = next(model.parameters()).to_local()
        first.view(-1)[0] = float("nan")
        gathered_error(model)
        first.view(-1)[0] = 1.0
    results["fsdp differences finite again"] = gathered_error(model)[0] == 0.0 and log.has("are not finite")
    return results


def unused(rank, mesh):
    results, ends = {}, {}
    for spec in ("stock", "none", "qsgd:8"):
        model = fully_shard(Branches(), mesh=mesh)
        if spec != "stock":
            laconic.attach(model, spec, policy=SMALL)
        [optimizer], generator = adamw(model), torch.Generator().manual_seed(rank)
        for step in range(2):
            model.uses_optional = step % 2 == 0
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends[spec] = whole(model)
    results["fsdp branches"] = same(ends["stock"], ends["none"])
    close = zip(ends["stock"], ends["qsgd:8"], strict=True)
    results["fsdp branches compressed"] = all(torch.allclose(a, b, atol=0.05) for a, b in close)
    return results


def test_fsdp_without_replicas(tmp_path):
    assert failures(run_ranks(without_replicas, 2, tmp_path), "fsdp") == {}


def bits_of_stock(rank, world):
    """Without compression: torch's bits on meshes of one and of two dimensions, by AdamW and by Muon."""
    results = {}
    for name, optimizers in (("adamw", adamw), ("muon", muon)):
        for shape in ((world,), (2, world // 2)):
            names = ("replicate", "shard")[-len(shape) :]
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            stock = sharded_gpt(mesh)
            if len(shape) == 1:
                model = sharded_gpt(mesh)
                laconic.attach(model, "none", gather="none", policy=SMALL)
            else:
                model, _ = attached(mesh, "none", native=name == "muon")
            losses = [train(each, 3, rank=rank, optimizers=optimizers(each)) for each in (stock, model)]
            results[f"bits {name} {shape}"] = same((losses[0], *whole(stock)), (losses[1], *whole(model)))
    return results


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_none_has_the_bits_of_torch_on_every_mesh(world, tmp_path):
    ranks = run_ranks(bits_of_stock, world, tmp_path)
    assert len(ranks[0]) == 4 and failures(ranks, "bits") == {}


def all_of_hsdp(rank, world):
    mesh = two_by_two()
    parts = (exact, exact_options, branches, compressed, refused)
    return {key: value for part in parts for key, value in part(rank, mesh).items()}


@pytest.fixture(scope="module")
def hsdp(tmp_path_factory):
    return cache(lambda: run_ranks(all_of_hsdp, 4, tmp_path_factory.mktemp("hsdp")))


@pytest.mark.parametrize("part", ["exact", "branches", "compressed", "refused"])
def test_hsdp(hsdp, part):
    assert failures(hsdp(), part) == {}


def checkpoints(rank, world):
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        import tempfile

        store.set("folder", tempfile.mkdtemp())
    return saved(rank, two_by_two())


@pytest.mark.slow
def test_hsdp_checkpoint_resumes_with_the_same_bits_and_moves_to_another_mesh(tmp_path):
    ranks = run_ranks(checkpoints, 4, tmp_path)
    assert failures(ranks, "saved") == {} and failures(ranks, "moved") == {}
