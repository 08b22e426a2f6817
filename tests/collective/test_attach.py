"""attach on 2 and 4 ranks: plain DDP to the bit where nothing is compressed, the same bits on all ranks everywhere."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import Heard, batches, network, parameters, run_ranks, same
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collective import Exchange, TwoShot, differing

SPECS = (
    "bf16", "qsgd:4", "ef|topk:0.05|qsgd:4", "ef|thc:6", "shared:8", "ef|powersgd:2", "momentum:0.9|topk:0.1",
    "ef|sign", "ef|uniform:6|rans", "randk:0.5", "union",
)  # fmt: skip
FEW = ("qsgd:4", "ef|topk:0.05|qsgd:4", "ef|thc:6", "ef|powersgd:2")
"""On four ranks, where there are two cores for them."""
REMEMBERING = ("ef|topk:0.05|qsgd:4", "ef|thc:6", "momentum:0.9|topk:0.1", "ef|powersgd:2")
UNBIASED = ("qsgd:3", "terngrad", "randk:0.2", "shared:4,round=stochastic", "randk:0.5|qsgd:4")
SMALL_BUCKETS_MB = 0.03
EVERY = laconic.Policy(min_numel=0, exempt_1d=False)


def train(module, steps, *, rank, lr=0.1, accumulate=1, skip=0, attachment=None):
    """Parameters after so many steps; of the same batches whatever ``skip`` leaves out at the beginning."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    given = list(batches(rank, (skip + steps) * accumulate))[skip * accumulate :]
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            x, y = given[step * accumulate + part]
            if part < accumulate - 1:
                with module.no_sync():
                    nn.functional.cross_entropy(module(x), y).backward()
            else:
                nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    return parameters(module)


def ddp(model=None, **options):
    return DistributedDataParallel(network() if model is None else model, bucket_cap_mb=SMALL_BUCKETS_MB, **options)


def refused(error, match, act):
    with pytest.raises(error, match=match):
        act()
    return True


# ----------------------------------------------------------------------------------------------------- what ranks do


def plain_ddp(rank, world):
    """Four roads to the same bits: no hook, a hook that does nothing yet, the worker's exact road, and warm-up."""
    found = {}
    for accumulate in (1, 3):
        wanted = train(ddp(), 50, rank=rank, accumulate=accumulate)
        for name, spec, options in (
            ("none", "none", {}),
            ("checked", "none", {"check_every": 7}),
            ("warm-up", "ef|topk:0.1", {"warmup_steps": 50}),
        ):
            module = ddp()
            laconic.attach(module, spec, **options)
            got = train(module, 50, rank=rank, accumulate=accumulate)
            found[f"plain {name} {accumulate}"] = same(wanted, got)
    module = ddp()
    attachment = laconic.attach(module, "qsgd:2")
    before = train(module, 3, rank=rank)
    attachment.detach()
    settled = ddp()
    train(settled, 3, rank=rank)  # buckets are others after the first step, and so is the order of sums
    for each in (module, settled):
        each.module.load_state_dict(network().state_dict())
    found["plain detached"] = same(train(settled, 5, rank=rank), train(module, 5, rank=rank))
    found["plain differs when compressed"] = not same(before, train(ddp(), 3, rank=rank))
    return found


def every_codec(rank, world):
    found = {}
    for spec in SPECS if world == 2 else FEW:
        module = ddp()
        attachment = laconic.attach(module, spec, check_every=2, error_every=3)
        train(module, 5, rank=rank, lr=0.02)
        stats = attachment.stats()
        found[f"codec {spec}"] = {
            "same": differing(dict(module.named_parameters())) == [] and stats["drifts"] == 0,
            "finite": all(bool(torch.isfinite(p).all()) for p in module.parameters()),
            "stats": stats,
            "plain": same(parameters(module), train(ddp(), 5, rank=rank, lr=0.02)),
        }
    return found


def unbiased(rank, world):
    """The same gradients in many rounds: errors of single rounds are large, that of their mean is small."""
    found = {}
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(30, 100, generator=generator)
    total = x.clone()
    dist.all_reduce(total)
    wanted = total / world
    for spec in UNBIASED:
        exchange = Exchange(spec, policy=EVERY)
        mean, errors = torch.zeros_like(x), []
        for _ in range(64):
            y = x.clone()
            exchange.mean([("w", y)])
            errors.append(float((y - wanted).square().sum() / wanted.square().sum()))
            mean += y / 64
        mean_error = float((mean - wanted).square().sum() / wanted.square().sum())
        found[f"unbiased {spec}"] = (sum(errors) / 64, mean_error)
    return found


def conserved(rank, world):
    """With error feedback nothing is lost: what went out and what is kept make up what came in."""
    found = {}
    for spec in ("ef|topk:0.05", "ef|qsgd:4", "ef|topk:0.05|qsgd:4"):
        exchange = Exchange(spec, policy=EVERY)
        came, went = torch.zeros(4000), torch.zeros(4000)
        for step in range(12):
            x = torch.randn(4000, generator=torch.Generator().manual_seed(100 * step + rank))
            came += x / world
            exchange.mean([("a", a := x[:2500]), ("b", b := x[2500:])])
            went += torch.cat([a, b])
        kept = torch.zeros(4000)
        for key, residual in exchange.state_dict().items():
            if key.endswith("/residual"):
                way, _, rest = key.partition("//")[2].partition("/")
                slot, _, span = rest.removesuffix("]/residual").partition("[")
                begin, end = (int(word) + (2500 if slot == "b" else 0) for word in span.split(":"))
                kept[begin:end] += residual / (world if way == "there" else 1)
        both = torch.stack([came, kept])
        dist.all_reduce(both)
        # An owner's residual is of the mean, once; senders' count by their share of it.
        found[f"conserved {spec}"] = float((went + both[1] - both[0]).abs().max())
    return found


def as_on_nccl(rank, world):
    """Sends and receives told together, as NCCL must have them: the same bits."""
    found = {}
    for spec in ("ef|topk:0.05|qsgd:4", "qsgd:4"):
        ways = [TwoShot(spec), TwoShot(spec)]
        ways[1].transport.grouped = True
        for step in range(5):
            x = torch.randn(9000, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + step)
            both = [x.clone(), x.clone()]
            for way, y in zip(ways, both, strict=True):
                way.reduce_all([("w", y)])
            found[f"grouped {spec} {step}"] = same(both[:1], both[1:])
    return found


def memory(rank, world):
    found = {}
    for spec in REMEMBERING if world == 2 else REMEMBERING[:1]:
        first = ddp()
        attachment = laconic.attach(first, spec)
        middle = train(first, 6, rank=rank)
        state = attachment.state_dict()
        again = ddp()
        resumed = laconic.attach(again, spec)
        train(again, 2, rank=rank)  # buckets are others after the first step, and so is the order of sums
        resumed.load_state_dict(state)
        with torch.no_grad():
            for p, value in zip(again.parameters(), middle, strict=True):
                p.copy_(value)
        found[f"resumed {spec}"] = same(train(first, 4, rank=rank, skip=6), train(again, 4, rank=rank, skip=6))
        found[f"resumed {spec} steps"] = resumed.stats()["steps"] == 10
        slots = {key.partition("//")[2].removeprefix("there/").removeprefix("back/").partition("[")[0].partition("/")[0]
                 for key in state if key.endswith("/residual")}  # fmt: skip
        found[f"names {spec}"] = slots <= {"0.weight", "2.weight"} and bool(slots)
        with Heard() as heard:
            other = laconic.attach(ddp(), spec)
            other.load_state_dict(state | {"world": torch.tensor([rank, world + 1])})
        found[f"other world {spec}"] = heard.has("they are reset") and other.stats()["residual_resets"] == 1
        found[f"other world is empty {spec}"] = not any(k.endswith("/residual") for k in other.state_dict())
        # Rank 0's on all ranks, as Lightning has it: all count the same rounds, and go on.
        everybody = [state]
        dist.broadcast_object_list(everybody)
        shared = ddp()
        later = laconic.attach(shared, spec)
        later.load_state_dict(everybody[0])
        train(shared, 2, rank=rank)
        found[f"other rank {spec}"] = (
            later.stats()["residual_resets"] == (rank != 0) and differing(dict(shared.named_parameters())) == []
        )
        with Heard() as heard:
            left_out = laconic.attach(ddp(), "qsgd:4")
            left_out.load_state_dict(state)
        found[f"other codec {spec}"] = heard.has("is left out") and left_out.stats()["residual_resets"] == 1
    refused(laconic.InputError, "'world' or 'steps'", lambda: laconic.attach(ddp(), "qsgd:4").load_state_dict({}))
    return found


def switching(rank, world):
    module = ddp()
    attachment = laconic.attach(module, "ef|topk:0.05")
    train(module, 3, rank=rank)
    residuals = {k.partition("//")[2]: x for k, x in attachment.state_dict().items() if k.endswith("residual")}
    attachment.set("ef|topk:0.2|qsgd:4")
    after = {k.partition("//")[2]: x for k, x in attachment.state_dict().items() if k.endswith("residual")}
    found = {"carried over": residuals.keys() == after.keys() and same(residuals.values(), after.values())}
    sent = attachment.stats()["bytes_sent"]
    train(module, 3, rank=rank, skip=3)
    found["goes on counting"] = attachment.stats()["bytes_sent"] > sent and attachment.stats()["steps"] == 6
    with Heard() as heard:
        attachment.set("ef|thc:6")
    found["dropped"] = heard.has("are dropped") and attachment.stats()["residual_resets"] == 1
    found["other codecs"] = attachment.spec == "ef|thc:6" and refused(
        laconic.ConfigError,
        r"call set with different arguments \(codec here",
        partial(attachment.set, "qsgd:4" if rank else "qsgd:2"),
    )
    found["refused changes nothing"] = attachment.spec == "ef|thc:6" and attachment.stats()["residual_resets"] == 1
    train(module, 2, rank=rank, skip=6)
    attachment.set("none")
    reduced = attachment.stats()["bytes_reduced"]
    train(module, 1, rank=rank, skip=8)
    numel = sum(p.numel() for p in module.parameters())
    found["none counts"] = attachment.stats()["bytes_reduced"] - reduced == 4 * numel
    attachment.detach()
    found["set after detach"] = refused(laconic.ConfigError, "detached", partial(attachment.set, "none"))
    again = laconic.attach(module, "qsgd:4")
    train(module, 2, rank=rank, skip=9)
    found["attached again"] = again.attached and not attachment.attached and again.stats()["steps"] == 2
    found["same"] = differing(dict(module.named_parameters())) == []
    alive = weakref.ref(again)
    del again, attachment, module
    gc.collect()
    found["goes with its module"] = alive() is None
    unhooked = ddp()
    late = laconic.attach(unhooked, "none")
    train(unhooked, 2, rank=rank)
    late.set("ef|topk:0.1")
    train(unhooked, 2, rank=rank, skip=2)
    found["hooked later"] = late.stats()["bytes_sent"] > 0 and differing(dict(unhooked.named_parameters())) == []
    return {f"switching {name}": value for name, value in found.items()}


class Branches(nn.Module):
    """Uses its second branch in some steps alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.step = nn.Linear(64, 100), nn.Linear(64, 100), 0

    def forward(self, x):
        self.step += 1
        y = self.first(x)
        return (y + self.second(x) if self.step % 2 else y)[:, :10]


def modules(rank, world):
    """Ways of building a DDP module; each ends with the same bits on all ranks, and has been compressed."""
    found = {}
    pictures = nn.Sequential(nn.Unflatten(1, (16, 2, 2)), nn.Conv2d(16, 128, 2, padding=1), nn.ReLU(), nn.Flatten(),
                             nn.Linear(128 * 9, 10))  # fmt: skip
    kinds = {
        "bucket views": lambda: ddp(gradient_as_bucket_view=True),
        "static graph": lambda: ddp(static_graph=True),
        "unused": lambda: ddp(Branches(), find_unused_parameters=True),
        "bf16": lambda: ddp(network().bfloat16()),
        "float64": lambda: ddp(network().double()),
        "channels last": lambda: ddp(pictures.to(memory_format=torch.channels_last)),
        "compiled inside": lambda: DistributedDataParallel(torch.compile(network(), backend="eager")),
        "compiled outside": lambda: torch.compile(DistributedDataParallel(network()), backend="eager"),
        "frozen": lambda: ddp(find_unused_parameters=True),
    }
    for name, build in kinds.items():
        for spec in ("ef|topk:0.1|qsgd:4", "ef|thc:6", "ef|powersgd:2"):
            module = build()
            attachment = laconic.attach(module, spec)
            dtype = next(module.parameters()).dtype
            for step, (x, y) in enumerate(batches(rank, 4)):
                if name == "frozen" and step == 2:
                    attachment.module.module[0].requires_grad_(False)
                nn.functional.cross_entropy(module(x.to(dtype)).float(), y).backward()
                with torch.no_grad():
                    for p in module.parameters():
                        if p.grad is not None:
                            p -= 0.1 * p.grad
                module.zero_grad()
            stats = attachment.stats()
            named = set(stats["exempt"]) | set(attachment.state_dict())
            found[f"module {name} {spec}"] = (
                differing(dict(attachment.module.named_parameters())) == []
                and stats["steps"] == 4
                and not any("_orig_mod" in n for n in named)
                and any("weight" in k and k.endswith("/residual") for k in attachment.state_dict())
            )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = ddp()
        attachment = laconic.attach(module, "ef|topk:0.1")
        for x, y in batches(rank, 2):
            nn.functional.cross_entropy(module(x).float(), y).backward()
    found["module autocast"] = attachment.stats()["steps"] == 2
    return found


def not_finite(rank, world):
    found = {}
    for spec in ("ef|topk:0.1", "shared:8", "qsgd:4"):
        for how in ("spread", "skip", "raise"):
            exchange = Exchange(spec, policy=EVERY, nonfinite=how)
            x, other = torch.ones(6000), torch.ones(6000)
            if rank == 1:
                x[17] = float("inf")
            with Heard() as heard:
                if how == "raise":
                    refused(laconic.NonFiniteError, "not finite", lambda e=exchange, x=x: e.mean([("w", x)]))
                else:
                    exchange.mean([("w", x), ("v", other)])
            found[f"not finite {spec} {how}"] = (
                x[17].isnan().item() if how == "spread" else how == "raise" or bool(torch.isfinite(x).all())
            ) and (how == "raise" or (bool(torch.isfinite(other).all()) and bool(other.any())))
            said = heard.has("not finite") and exchange.stats.skipped_nonfinite == 1
            # Where a contribution is left out and the others' are not, it is the rank whose it is that says so.
            found[f"not finite {spec} {how} said"] = said == (how != "skip" or rank == 1 or spec == "shared:8")
            if how == "spread":
                y = torch.ones(6000)
                exchange.mean([("w", y)])
                found[f"not finite {spec} goes on"] = bool(torch.isfinite(y).all()) and bool(y.any())
    return found


def drifting(rank, world):
    module = ddp()
    attachment = laconic.attach(module, "ef|topk:0.1", check_every=2)
    train(module, 4, rank=rank)
    calm = attachment.stats()["drifts"]
    with torch.no_grad():
        if rank == world - 1:
            next(module.parameters())[3, 3] += 1e-6
    with Heard() as heard:
        train(module, 2, rank=rank, skip=4)
    return {"drift": calm == 0 and attachment.stats()["drifts"] == 1 and heard.has("0.weight are not the same")}


def wrong_use(rank, world):
    found, module = {}, ddp()
    found["no ddp"] = refused(laconic.ConfigError, "expected a DistributedDataParallel module, got Sequential",
                              lambda: laconic.attach(network(), "qsgd:4"))  # fmt: skip
    found["no module"] = refused(laconic.ConfigError, "got str", lambda: laconic.attach("model", "qsgd:4"))
    found["unknown"] = refused(laconic.ConfigError, "qsdg", lambda: laconic.attach(module, "qsdg:4"))
    found["policy"] = refused(laconic.ConfigError, "topq", lambda: laconic.attach(module, "none", policy={"*": "topq"}))
    found["narrow"] = refused(laconic.ConfigError, "can add 1 workers", lambda: laconic.attach(module, "shared:1"))
    for name, value in (("nonfinite", "?"), ("warmup_steps", -1), ("check_every", 0.5), ("timeout_s", 0)):
        wrong = {name: value}
        found[name] = refused(laconic.ConfigError, name, lambda wrong=wrong: laconic.attach(module, "qsgd:4", **wrong))
    for name, options in (
        ("codec", {"spec": "qsgd:4" if rank else "qsgd:2"}),
        ("policy", {"policy": {"*": "bf16"} if rank else None}),
        ("options", {"warmup_steps": rank}),
    ):
        unlike = {"spec": "qsgd:4"} | options
        found[f"other {name}"] = refused(laconic.ConfigError, rf"call attach with different arguments \({name} here",
                                         lambda unlike=unlike: laconic.attach(module, **unlike))  # fmt: skip
    found["nothing was registered"] = module._comm_hooks == []
    laconic.attach(module, "qsgd:4")
    found["twice"] = refused(laconic.ConfigError, "attached already", lambda: laconic.attach(module, "qsgd:4"))
    quiet = ddp()
    laconic.attach(quiet, "none")
    found["twice, without a hook"] = refused(laconic.ConfigError, "already", lambda: laconic.attach(quiet, "none"))
    hooked = ddp()
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    found["hooked"] = refused(laconic.ConfigError, "fp16_compress_hook", lambda: laconic.attach(hooked, "qsgd:4"))
    built_in = ddp()
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    found["built in"] = refused(laconic.ConfigError, "takes no hook", lambda: laconic.attach(built_in, "qsgd:4"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(network(), mesh=init_device_mesh("cpu", (world,)))
    found["fsdp"] = refused(laconic.ConfigError, "FSDP", lambda: laconic.attach(sharded, "qsgd:4"))
    return {f"refused {name}": value for name, value in found.items()}


def many_steps(rank, world):
    """Default buckets would be one; small ones are many, and a hook that waits in callbacks hangs here."""
    module = ddp()
    laconic.attach(module, "ef|topk:0.05|qsgd:4")
    began = time.monotonic()
    train(module, 200, rank=rank, lr=0.01)
    return {"200 steps": time.monotonic() - began < 60}


def battery(rank, world):
    parts = [plain_ddp, every_codec, conserved, as_on_nccl, memory, not_finite]
    if world == 2:
        parts += [unbiased, switching, modules, drifting, wrong_use, many_steps]
    found = {}
    for part in parts:
        found |= part(rank, world)
    return found


# -------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module", params=[pytest.param(2, id="two"), pytest.param(4, id="four", marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    return run_ranks(battery, request.param, tmp_path_factory.mktemp(f"attach{request.param}"))


def failed(found):
    return {name: each for name, each in found.items() if not all(each)}


def named(ranks, prefix):
    return {name: [rank[name] for rank in ranks] for name in ranks[0] if name.startswith(prefix)}


def test_none_is_plain_ddp_to_the_bit(ranks):
    found = named(ranks, "plain")
    assert len(found) == 8 and not failed(found)


@pytest.mark.parametrize("spec", SPECS)
def test_all_ranks_hold_the_same_parameters(spec, ranks):
    for rank in ranks:
        if f"codec {spec}" not in rank:
            assert len(ranks) > 2 and spec not in FEW
            continue
        found = rank[f"codec {spec}"]
        assert found["same"] and found["finite"] and (not found["plain"] or spec == "union")
        stats = found["stats"]
        assert stats["steps"] == 5 and stats["encode_s"] > 0 and stats["wire_s"] > 0 and stats["exposed_s"] > 0
        assert stats["wire_bytes"] / 5 < (1.6 if len(ranks) > 2 else 1.1) * 4 * 17_354
        assert set(stats["exempt"]) == {"0.bias", "2.bias", "4.weight", "4.bias"}
        assert stats["errors"]["4.bias"] == 0 and (stats["errors"]["0.weight"] > 0 or spec == "union")


@pytest.mark.parametrize("spec", UNBIASED)
def test_the_mean_over_rounds_converges_to_the_plain_mean(spec, ranks):
    if len(ranks) > 2:
        assert not named(ranks, "unbiased")
        return
    single, of_mean = ranks[0][f"unbiased {spec}"]
    assert of_mean < 2.5 * single / 64


def test_error_feedback_loses_nothing(ranks):
    found = named(ranks, "conserved")
    assert len(found) == 3 and all(max(each) < 1e-4 for each in found.values()), found


def test_messages_in_the_order_of_nccl(ranks):
    found = named(ranks, "grouped")
    assert len(found) == 10 and not failed(found)


def test_memory_is_saved_and_resumed(ranks):
    found = named(ranks, "resumed") | named(ranks, "names") | named(ranks, "other")
    assert len(found) == 7 * (len(REMEMBERING) if len(ranks) == 2 else 1) and all(
        all(each) for each in found.values()
    ), found


def test_values_that_are_not_finite(ranks):
    found = named(ranks, "not finite")
    assert len(found) == 21 and not failed(found)


@pytest.mark.parametrize("prefix", ["switching", "module", "drift", "refused", "200 steps"])
def test_on_two_ranks(prefix, ranks):
    found = named(ranks, prefix)
    if len(ranks) > 2:
        assert not found
        return
    assert found and not failed(found)


def test_without_a_group_it_says_so():
    with pytest.raises(laconic.ConfigError, match="got Sequential"):
        laconic.attach(network(), "qsgd:4")
    with pytest.raises(laconic.ConfigError, match="init_process_group"):
        laconic.LocalSGD(network(), None)
