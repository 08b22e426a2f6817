"""attach on 2 and 4 ranks: plain DDP bit for bit without compression, and the same bits on all ranks with it."""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collective import differing
from ranks import LogCapture, batches, failures, network, parameters, run_ranks, same

SPECS = (
    "bf16", "qsgd:4", "ef|topk:0.05|qsgd:4", "ef|thc:6", "shared:8", "ef|powersgd:2", "momentum:0.9|topk:0.1",
    "ef|sign", "ef|uniform:6|rans", "randk:0.5", "union",
)  # fmt: skip
FOUR_RANK_SPECS = ("qsgd:4", "ef|topk:0.05|qsgd:4", "ef|thc:6", "ef|powersgd:2")
WITH_MEMORY = ("ef|topk:0.05|qsgd:4", "ef|thc:6", "momentum:0.9|topk:0.1", "ef|powersgd:2")
SMALL_BUCKETS_MB = 0.03


def train(module, steps, *, rank, lr=0.1, accumulate=1, skip=0):
    """Return the parameters after some steps; ``skip`` leaves out the first batches."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    data = list(batches(rank, (skip + steps) * accumulate))[skip * accumulate :]
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, y = data[step * accumulate + part]
            if part < accumulate - 1:
                with module.no_sync():
                    nn.functional.cross_entropy(module(x), y).backward()
            else:
                nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return parameters(module)


def ddp(model=None, **options):
    return DistributedDataParallel(network() if model is None else model, bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def raises(error, match, act):
    with pytest.raises(error, match=match):
        act()
    return True


def residuals(attachment):
    return {key.partition("//")[2]: x for key, x in attachment.state_dict().items() if key.endswith("/residual")}


def plain_ddp(rank, world):
    """Compare four ways to the same bits: no hook, a hook without compression, drift checks, and warm-up."""
    results = {}
    for accumulate in (1, 3):
        expected = train(ddp(), 15, rank=rank, accumulate=accumulate)
        for name, spec, options in (
            ("none", "none", {}),
            ("checked", "none", {"check_every": 7}),
            ("warm-up", "ef|topk:0.1", {"warmup_steps": 15}),
        ):
            module = ddp()
            laconic.attach(module, spec, **options)
            trained = train(module, 15, rank=rank, accumulate=accumulate)
            results[f"plain {name} {accumulate}"] = same(expected, trained)
    module = ddp()
    attachment = laconic.attach(module, "qsgd:2")
    compressed = train(module, 3, rank=rank)
    attachment.detach()
    reference = ddp()
    uncompressed = train(reference, 3, rank=rank)  # DDP reorders its buckets after the first step, and so the sums
    for each in (module, reference):
        each.module.load_state_dict(network().state_dict())
    results["plain detached"] = same(train(reference, 5, rank=rank), train(module, 5, rank=rank))
    results["plain differs from compressed"] = not same(compressed, uncompressed)
    return results


def every_codec(rank, world):
    results, uncompressed = {}, train(ddp(), 5, rank=rank, lr=0.02)
    for spec in SPECS if world == 2 else FOUR_RANK_SPECS:
        module = ddp()
        attachment = laconic.attach(module, spec, check_every=2, error_every=3)
        trained = train(module, 5, rank=rank, lr=0.02)
        stats = attachment.stats()
        results[f"codec {spec}"] = {
            "same": differing(dict(module.named_parameters())) == [] and stats["drifts"] == 0,
            "finite": all(bool(torch.isfinite(x).all()) for x in trained),
            "stats": stats,
            "exact": same(trained, uncompressed),
        }
    return results


def memory(rank, world):
    results = {}
    for spec in WITH_MEMORY if world == 2 else WITH_MEMORY[:1]:
        first = ddp()
        attachment = laconic.attach(first, spec)
        weights = train(first, 6, rank=rank)
        state = attachment.state_dict()
        second = ddp()
        resumed = laconic.attach(second, spec)
        train(second, 2, rank=rank)  # DDP reorders its buckets after the first step, and so the sums
        resumed.load_state_dict(state)
        with torch.no_grad():
            for parameter, value in zip(second.parameters(), weights, strict=True):
                parameter.copy_(value)
        results[f"memory resumed {spec}"] = (
            same(train(first, 4, rank=rank, skip=6), train(second, 4, rank=rank, skip=6))
            and resumed.stats()["steps"] == 10
        )
        whole, parts = attachment.stats(), resumed.stats()
        results[f"counts resumed {spec}"] = (
            (parts["rounds"], parts["values"]) == (whole["rounds"], whole["values"])
            and abs(parts["wire_bytes"] / whole["wire_bytes"] - 1) < 0.05  # it compares states once more
        )
        slots = {key.removeprefix("there/").removeprefix("back/").partition("[")[0].partition("/")[0]
                 for key in residuals(attachment)}  # fmt: skip
        results[f"memory names {spec}"] = slots <= {"0.weight", "2.weight"} and bool(slots)
        with LogCapture() as logged:
            other = laconic.attach(ddp(), spec)
            other.load_state_dict(state | {"world": torch.tensor([rank, world + 1])})
        results[f"memory other world {spec}"] = (
            logged.has("they are reset") and other.stats()["residual_resets"] == 1 and not residuals(other)
        )
        # All ranks load rank 0's state, as Lightning does: their round numbers are equal, and training continues.
        states = [state]
        dist.broadcast_object_list(states)
        shared = ddp()
        later = laconic.attach(shared, spec)
        later.load_state_dict(states[0])
        train(shared, 2, rank=rank)
        results[f"memory other rank {spec}"] = (
            later.stats()["residual_resets"] == (rank != 0) and differing(dict(shared.named_parameters())) == []
        )
        with LogCapture() as logged:
            without_memory = laconic.attach(ddp(), "qsgd:4")
            without_memory.load_state_dict(state)
        results[f"memory other codec {spec}"] = (
            logged.has("is left out") and without_memory.stats()["residual_resets"] == 1
        )
    with LogCapture() as logged:
        for spec in ("sign", "ef|sign", "qsgd:4"):
            laconic.attach(ddp(), spec)
    results["bias"] = ["'sign' is biased and has no" in line for line in logged.lines].count(True) == 1
    raises(laconic.InputError, "'world' or 'steps'", lambda: laconic.attach(ddp(), "qsgd:4").load_state_dict({}))
    return results


def switching(rank, world):
    module = ddp()
    attachment = laconic.attach(module, "ef|topk:0.05")
    train(module, 3, rank=rank)
    before = residuals(attachment)
    attachment.set("ef|topk:0.2|qsgd:4")
    after = residuals(attachment)
    results = {"residuals kept": before.keys() == after.keys() and same(before.values(), after.values())}
    sent = attachment.stats()["bytes_sent"]
    train(module, 3, rank=rank, skip=3)
    results["counts continue"] = attachment.stats()["bytes_sent"] > sent and attachment.stats()["steps"] == 6
    with LogCapture() as logged:
        attachment.set("ef|thc:6")
    results["residuals dropped"] = logged.has("are dropped") and attachment.stats()["residual_resets"] == 1
    results["different codecs rejected"] = raises(
        laconic.ConfigError,
        r"call set with different arguments \(codec here",
        partial(attachment.set, "qsgd:4" if rank else "qsgd:2"),
    )
    results["rejection changes nothing"] = attachment.spec == "ef|thc:6" and attachment.stats()["residual_resets"] == 1
    train(module, 2, rank=rank, skip=6)
    attachment.set("none")
    reduced = attachment.stats()["bytes_reduced"]
    train(module, 1, rank=rank, skip=8)
    numel = sum(p.numel() for p in module.parameters())
    results["none is counted"] = attachment.stats()["bytes_reduced"] - reduced == 4 * numel
    attachment.detach()
    results["set after detach"] = raises(laconic.ConfigError, "detached", partial(attachment.set, "none"))
    again = laconic.attach(module, "qsgd:4")
    train(module, 2, rank=rank, skip=9)
    results["attached again"] = again.attached and not attachment.attached and again.stats()["steps"] == 2
    results["same parameters"] = differing(dict(module.named_parameters())) == []
    alive = weakref.ref(again)
    del again, attachment, module
    gc.collect()
    results["freed with its module"] = alive() is None
    module = ddp()
    late = laconic.attach(module, "none")
    train(module, 2, rank=rank)
    late.set("ef|topk:0.1")
    train(module, 2, rank=rank, skip=2)
    results["hooked later"] = late.stats()["bytes_sent"] > 0 and differing(dict(module.named_parameters())) == []
    return {f"switching {name}": value for name, value in results.items()}


class Branches(nn.Module):
    """Uses its second branch in every other step only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.step = nn.Linear(64, 100), nn.Linear(64, 100), 0

    def forward(self, x):
        self.step += 1
        y = self.first(x)
        return (y + self.second(x) if self.step % 2 else y)[:, :10]


def modules(rank, world):
    """Build DDP modules in several ways; each must stay equal on all ranks and be compressed."""
    results = {}
    images = nn.Sequential(nn.Unflatten(1, (16, 2, 2)), nn.Conv2d(16, 128, 2, padding=1), nn.ReLU(), nn.Flatten(),
                           nn.Linear(128 * 9, 10))  # fmt: skip
    builders = {
        "bucket views": lambda: ddp(gradient_as_bucket_view=True),
        "static graph": lambda: ddp(static_graph=True),
        "unused": lambda: ddp(Branches(), find_unused_parameters=True),
        "bf16": lambda: ddp(network().bfloat16()),
        "float64": lambda: ddp(network().double()),
        "channels last": lambda: ddp(images.to(memory_format=torch.channels_last)),
        "compiled inside": lambda: DistributedDataParallel(torch.compile(network(), backend="eager")),
        "compiled outside": lambda: torch.compile(DistributedDataParallel(network()), backend="eager"),
        "frozen": lambda: ddp(find_unused_parameters=True),
    }
    specs = itertools.cycle(("ef|topk:0.1|qsgd:4", "ef|thc:6", "ef|powersgd:2", "ef|topk:0.1|qsgd:4"))
    for name, build in builders.items():
        for spec in itertools.islice(specs, 2):
            module = build()
            attachment = laconic.attach(module, spec)
            dtype = next(module.parameters()).dtype
            for step, (x, y) in enumerate(batches(rank, 4)):
                if name == "frozen" and step == 2:
                    attachment.module.module[0].requires_grad_(False)
                nn.functional.cross_entropy(module(x.to(dtype)).float(), y).backward()
                with torch.no_grad():
                    for parameter in module.parameters():
                        if parameter.grad is not None:
                            parameter -= 0.1 * parameter.grad
                module.zero_grad()
            stats = attachment.stats()
            names = set(stats["exempt"]) | set(attachment.state_dict())
            results[f"module {name} {spec}"] = (
                differing(dict(attachment.module.named_parameters())) == []
                and stats["steps"] == 4
                and not any("_orig_mod" in each for each in names)
                and any("weight" in key for key in residuals(attachment))
            )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = ddp()
        attachment = laconic.attach(module, "ef|topk:0.1")
        for x, y in batches(rank, 2):
            nn.functional.cross_entropy(module(x).float(), y).backward()
    results["module autocast"] = attachment.stats()["steps"] == 2
    return results


def drifting(rank, world):
    module = ddp()
    attachment = laconic.attach(module, "ef|topk:0.1", check_every=2)
    train(module, 4, rank=rank)
    before = attachment.stats()["drifts"]
    with torch.no_grad():
        if rank == world - 1:
            next(module.parameters())[3, 3] += 1e-6
    with LogCapture() as logged:
        train(module, 2, rank=rank, skip=4)
    return {"drift": before == 0 and attachment.stats()["drifts"] == 1 and logged.has("0.weight are not the same")}


def rejected(rank, world):
    results, module = {}, ddp()

    def rejects(name, match, *args, error=laconic.ConfigError, **options):
        results[f"rejected {name}"] = raises(error, match, lambda: laconic.attach(*args, **options))

    rejects("no ddp", "expected a DistributedDataParallel module, got Sequential", network(), "qsgd:4")
    rejects("no module", "got str", "model", "qsgd:4")
    rejects("unknown codec", "qsdg", module, "qsdg:4")
    rejects("unknown codec in policy", "topq", module, "none", policy={"*": "topq"})
    rejects("too few bits", "can add 1 workers", module, "shared:1")
    for name, value in (("nonfinite", "?"), ("warmup_steps", -1), ("check_every", 0.5), ("timeout_s", 0)):
        rejects(name, name, module, "qsgd:4", **{name: value})
    for name, options in (
        ("codec", {"spec": "qsgd:4" if rank else "qsgd:2"}),
        ("policy", {"policy": {"*": "bf16"} if rank else None}),
        ("options", {"warmup_steps": rank}),
    ):
        rejects(
            f"different {name}",
            rf"call attach with different arguments \({name} here",
            module,
            **({"spec": "qsgd:4"} | options),
        )
    results["rejected without a trace"] = module._comm_hooks == []
    laconic.attach(module, "qsgd:4")
    rejects("twice", "attached already", module, "qsgd:4")
    unhooked = ddp()
    laconic.attach(unhooked, "none")
    rejects("twice without a hook", "already", unhooked, "none")
    hooked = ddp()
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    rejects("foreign hook", "fp16_compress_hook", hooked, "qsgd:4")
    built_in = ddp()
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    rejects("built-in hook", "takes no hook", built_in, "qsgd:4")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(network(), mesh=init_device_mesh("cpu", (world,)))
    rejects("fsdp", "a residual of the whole gradient", sharded, "ef|qsgd:4")
    return results


def many_steps(rank, world):
    """Train with many small DDP buckets, where a hook that waits in callbacks would hang."""
    module = ddp()
    attachment = laconic.attach(module, "ef|topk:0.05|qsgd:4")
    train(module, 60, rank=rank, lr=0.01)
    return {"many steps": attachment.stats()["steps"] == 60}


def battery(rank, world):
    functions = [plain_ddp, every_codec, memory]
    if world == 2:
        functions += [switching, modules, drifting, rejected, many_steps]
    results = {}
    for function in functions:
        results |= function(rank, world)
    return results


TWO_AND_FOUR_RANKS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Runs the battery once for each number of ranks."""
    return cache(lambda world: run_ranks(battery, world, tmp_path_factory.mktemp(f"attach{world}")))


@pytest.mark.parametrize("world", TWO_AND_FOUR_RANKS)
def test_none_and_warm_up_are_plain_ddp_bit_for_bit(world, results):
    assert not failures(results(world), "plain")


@pytest.mark.parametrize(
    "world, spec",
    [(2, spec) for spec in SPECS] + [pytest.param(4, spec, marks=pytest.mark.slow) for spec in FOUR_RANK_SPECS],
)
def test_all_ranks_hold_the_same_parameters(world, spec, results):
    for rank in results(world):
        result = rank[f"codec {spec}"]
        assert result["same"] and result["finite"] and (not result["exact"] or spec == "union")
        stats = result["stats"]
        assert stats["steps"] == 5 and stats["encode_s"] > 0 and stats["wire_s"] > 0 and stats["exposed_s"] > 0
        assert stats["wire_bytes"] / 5 < (1.1 if world == 2 else 1.6) * 4 * 17_354
        assert set(stats["exempt"]) == {"0.bias", "2.bias", "4.weight", "4.bias"}
        assert stats["errors"]["4.bias"] == 0 and (stats["errors"]["0.weight"] > 0 or spec == "union")


@pytest.mark.parametrize("world", TWO_AND_FOUR_RANKS)
def test_memory_is_saved_and_resumed(world, results):
    assert not failures(results(world), "memory")


def test_set_changes_the_codec_and_keeps_what_it_can(results):
    assert not failures(results(2), "switching")


def test_every_kind_of_ddp_module_is_compressed(results):
    assert not failures(results(2), "module")


def test_drifting_replicas_are_logged_and_counted(results):
    assert not failures(results(2), "drift")


def test_wrong_arguments_raise_config_error_on_all_ranks(results):
    assert not failures(results(2), "rejected")


def test_many_small_buckets_do_not_hang(results):
    assert not failures(results(2), "many steps")


def test_missing_process_group_raises_config_error():
    with pytest.raises(laconic.ConfigError, match="got Sequential"):
        laconic.attach(network(), "qsgd:4")
    with pytest.raises(laconic.ConfigError, match="init_process_group"):
        laconic.LocalSGD(network(), None)
