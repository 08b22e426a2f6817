"""LocalSGD on 2 ranks: optimizers, fragments, overlap, weights, clip, senders, resumed runs, mixed precision."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.collective import Exchange, differing
from ranks import LogCapture, batches, failures, network, parameters, run_ranks, same


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(local, count, *, rank, skip=0, tokens=None):
    """Train some steps; ``skip`` leaves out the first batches."""
    for x, y in list(batches(rank, skip + count, size=16))[skip:]:
        local.zero_grad()
        nn.functional.cross_entropy(local.model(x), y).backward()
        local.step(tokens=tokens)


def bare(model, optimizers, count, *, rank):
    for x, y in batches(rank, count, size=16):
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    return parameters(model)


def mean_over_ranks(xs, world):
    sums = [x.detach().clone() for x in xs]
    for x in sums:
        dist.all_reduce(x)
    return [x / world for x in sums]


def close(xs, ys, atol=1e-6):
    return all(torch.allclose(x, y, atol=atol) for x, y in zip(xs, ys, strict=True))


def one_rank(rank, world):
    """A group of one rank trains as the bare optimizers do, bit for bit."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    results = {}
    for codec, options in (("none", {"outer": "mean"}), ("ef|topk:0.1|sign", {"fragments": 2, "overlap": 1})):
        for every in (1, 4):
            options = options if every == 4 else {"outer": "mean"}
            model, reference = network(1), network(1)
            local = laconic.LocalSGD(model, laconic.muon(model), every=every, codec=codec, group=alone, **options)
            train(local, 6, rank=rank)
            results[f"{codec} {every}"] = same(
                parameters(model), bare(reference, laconic.muon(reference), 6, rank=rank)
            )
            local.finish()
            results[f"{codec} {every} finished"] = same(parameters(model), parameters(reference))
            results[f"{codec} {every} sends nothing"] = local.stats()["bytes_sent"] == 0
    return results


def by_hand(rank, world):
    """Two fragments, one step of overlap, merged half and half: as computed with plain all-reduces."""
    model, reference = network(), network()
    local = laconic.LocalSGD(
        model, adamw(model), every=4, codec="none", outer="muloco", fragments=2, overlap=1, timeout_s=30.0
    )  # fmt: skip
    optimizer = adamw(reference)
    anchors, momenta = parameters(reference), [torch.zeros_like(p) for p in reference.parameters()]
    names = [name for name, _ in reference.named_parameters()]
    parts = [[names.index(name) for name in fragment.names] for fragment in local._fragments]
    pending = None
    results = {"fragments": sorted(i for part in parts for i in part) == list(range(len(names)))}
    for step, (x, y) in enumerate(batches(rank, 9, size=16), 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            if pending is not None:
                for i, change in zip(*pending, strict=True):
                    momenta[i] = 0.6 * momenta[i] + 0.7 * change
                    anchors[i] = anchors[i] - 0.6 * momenta[i] - 0.7 * change
                    p = list(reference.parameters())[i]
                    p.copy_(0.5 * p + 0.5 * anchors[i])
                pending = None
            if step % 2 == 0:
                part = parts[(step // 2 - 1) % 2]
                changes = [anchors[i] - list(reference.parameters())[i] for i in part]
                pending = part, mean_over_ranks(changes, world)
    train(local, 9, rank=rank)
    results["streaming"] = close(parameters(model), parameters(reference), 1e-5)
    local.finish()
    results["finished"] = differing(dict(model.named_parameters())) == []
    stats = local.stats()
    results["stats"] = (
        stats["exchanges"] == 6 and stats["steps"] == 9 and stats["outer"] == "muloco" and stats["waited_s"] > 0
    )
    return results


def progress(rank, world):
    """With merge="progress" the global model gets what a rank did during the exchange, and nothing is lost."""
    model, reference = network(), network()
    local = laconic.LocalSGD(model, adamw(model), every=4, codec="none", outer="mean", overlap=2, merge="progress")
    optimizer = adamw(reference)
    start = parameters(reference)
    for step, (x, y) in enumerate(batches(rank, 6, size=16), 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        optimizer.step()
        if step == 4:
            sent = parameters(reference)
    means = mean_over_ranks(sent, world)
    train(local, 6, rank=rank)
    expected = [mean + end - at for mean, end, at in zip(means, parameters(reference), sent, strict=True)]
    results = {"applied": close(parameters(model), expected, 1e-5)}
    local.synchronize()
    ends = mean_over_ranks(expected, world)
    results["nothing lost"] = close(parameters(model), ends, 1e-5) and not close(start, ends, 1e-3)
    return results


def timing(rank, world):
    """A late rank changes how long the others wait and nothing else."""
    ends, waited = [], []
    for delay in (0.0, 0.15):
        model = network()
        local = laconic.LocalSGD(model, adamw(model), every=3, codec="ef|topk:0.1|sign", overlap=1)
        mean = local.exchange.mean

        def late(tensors, mean=mean, delay=delay):
            time.sleep(delay if rank else 0.0)
            mean(tensors)

        local.exchange.mean = late
        train(local, 7, rank=rank)
        waited.append(local.stats()["waited_s"])
        local.finish()
        ends.append(parameters(model))
    return {"bits": same(*ends), "waited": waited[1] > waited[0] and waited[1] > 0.1}


def resumed(rank, world):
    """Save in the middle of an interval, with a fragment in flight and several optimizers, and continue."""
    results = {}
    cases = {
        "streaming": {"codec": "ef|topk:0.1|sign", "fragments": 2, "overlap": 2},
        "progress": {"codec": "ef|sign", "overlap": 4, "merge": "progress", "outer": "muloco"},
        "local": {"codec": "ef|topk:0.1|sign", "continue_from": "local", "outer": "muloco", "clip": "median"},
    }
    for name, options in cases.items():
        model = nn.Sequential(network(), nn.BatchNorm1d(10))
        local = laconic.LocalSGD(model, laconic.muon(model), every=4, weight_by="tokens", **options)
        train(local, 7, rank=rank, tokens=10 + rank)
        saved, weights = local.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        inner = copy.deepcopy([optimizer.state_dict() for optimizer in local.optimizers])
        results[f"{name} in flight"] = (saved["in_flight"] is not None) == (name != "local")
        train(local, 6, rank=rank, skip=7, tokens=10 + rank)
        again = nn.Sequential(network(3), nn.BatchNorm1d(10))
        local2 = laconic.LocalSGD(again, laconic.muon(again), every=4, weight_by="tokens", **options)
        again.load_state_dict(weights)
        for optimizer, each in zip(local2.optimizers, inner, strict=True):
            optimizer.load_state_dict(each)
        local2.load_state_dict(saved)
        train(local2, 6, rank=rank, skip=7, tokens=10 + rank)
        results[f"{name} same bits"] = same(parameters(model), parameters(again))
        for each in (local, local2):
            each.finish()
        state, state2 = model.state_dict(), again.state_dict()
        results[f"{name} same end"] = all(torch.equal(state[k], state2[k]) for k in state)
        results[f"{name} ranks agree"] = differing(dict(again.named_parameters())) == []
    with pytest.raises(laconic.InputError, match="fragments=2"):
        local.load_state_dict(saved | {"fragments": [{"names": ["0"]}, {"names": []}]})
    # A state of an earlier version: the state of one torch optimizer, no fragments.
    model = network()
    local = laconic.LocalSGD(model, adamw(model), every=4, codec="none", outer="nesterov")
    train(local, 5, rank=rank)
    saved = local.state_dict()
    old = {k: saved[k] for k in ("steps", "world", "exchange", "anchors")}
    old["outer"] = copy.deepcopy(local._fragments[0].outer.optimizer.state_dict())
    local.load_state_dict(old)
    again = local.state_dict()["outer"]["state"]
    results["earlier version"] = all(
        torch.equal(again[k]["momentum_buffer"], x["momentum_buffer"]) for k, x in saved["outer"]["state"].items()
    )
    return results


def weighted(rank, world):
    """Tokens weight the mean; a change above the median norm is scaled down to it."""
    model, alone = network(), network()
    start = parameters(alone)
    local = laconic.LocalSGD(model, adamw(model), every=2, outer="mean", weight_by="tokens")
    train(local, 2, rank=rank, tokens=3 if rank else 1)
    ends = bare(alone, [adamw(alone)], 2, rank=rank)
    weight = 1.5 if rank else 0.5
    means = mean_over_ranks([weight * (a - b) for a, b in zip(start, ends, strict=True)], world)
    expected = [a - m for a, m in zip(start, means, strict=True)]
    results = {"tokens": close(parameters(model), expected), "weight": local.stats()["weight"] == weight}
    with pytest.raises(laconic.ConfigError, match="tokens must be given"):
        local.step()
    model, alone = network(), network()
    rate = 10.0 if rank else 0.1
    local = laconic.LocalSGD(
        model, torch.optim.SGD(model.parameters(), lr=rate), every=1, outer="mean", clip="median"
    )  # fmt: skip
    train(local, 1, rank=rank)
    ends = bare(alone, [torch.optim.SGD(alone.parameters(), lr=rate)], 1, rank=rank)
    changes = [a - b for a, b in zip(start, ends, strict=True)]
    norms = torch.zeros(2)
    norms[rank] = torch.cat([c.view(-1) for c in changes]).norm()
    dist.all_reduce(norms)
    factor = min(1.0, float(norms.mean() / norms[rank]))
    means = mean_over_ranks([factor * c for c in changes], world)
    results["clip"] = close(parameters(model), [a - m for a, m in zip(start, means, strict=True)], 1e-5)
    results["clipped"] = local.stats()["clipped"] == rank
    return results


def senders(rank, world):
    """Values that one rank sent are divided by one, values that both sent by two."""
    policy = laconic.Policy(min_numel=0, exempt_1d=False)
    x = torch.zeros(2048)
    x[[0, 301, 1030, 1501] if rank else [0, 300, 1030, 1500]] = torch.tensor(
        [4.0, 7.0, 2.0, 9.0] if rank else [8.0, 5.0, 4.0, 1.0]
    )
    results = {}
    for average, ranks in (("all", 2.0), ("senders", 1.0)):
        exchange = Exchange("ef|topk:0.001953125", policy=policy, average=average)
        y = x.clone()
        exchange.mean([("w", y)])
        # Of the three values in each shard its owner sends the two largest of the mean.
        expected = torch.zeros(2048)
        expected[[0, 1030]] = torch.tensor([6.0, 3.0])
        expected[[301, 1501]] = torch.tensor([7.0, 9.0]) / ranks
        results[average] = torch.equal(y, expected)
    return results


def continued(rank, world):
    """Ranks continue from the global model minus their own residual, and end with the same bits."""
    results = {}
    for codec in ("ef|topk:0.1|sign", "ef|thc:6", "ef|randk:0.25"):
        model = network()
        local = laconic.LocalSGD(model, adamw(model), every=3, codec=codec, continue_from="local")
        train(local, 3, rank=rank)
        fragment = local._fragments[0]
        residuals = [local.exchange.residual(n, a) for n, a in zip(fragment.names, fragment.anchors, strict=True)]
        expected = [a if r is None else a - r for a, r in zip(fragment.anchors, residuals, strict=True)]
        results[f"{codec} displaced"] = same(parameters(model), expected)
        results[f"{codec} differ"] = differing(dict(model.named_parameters())) != []
        with local.global_model() as inner:
            results[f"{codec} global"] = same(parameters(inner), fragment.anchors)
        results[f"{codec} restored"] = same(parameters(model), expected)
        # The next change is the progress since, without the residual: the codec adds that itself.
        train(local, 2, rank=rank, skip=3)
        progress = [e - p for e, p in zip(expected, parameters(model), strict=True)]
        seen, mean = {}, local.exchange.mean

        def keep(tensors, mean=mean, seen=seen):
            seen.update({name: x.clone() for name, x in tensors})
            mean(tensors)

        local.exchange.mean = keep
        local.synchronize()
        results[f"{codec} progress"] = close(list(seen.values()), progress, 1e-5)
        results[f"{codec} finished"] = differing(dict(model.named_parameters())) == []
        norms = local.stats()["residual_norms"]
        results[f"{codec} norms"] = set(norms) == {"0.weight", "2.weight"} and all(v > 0 for v in norms.values())
    return results


def precision(rank, world):
    """GradScaler skips a step on one rank alone; ranks exchange after the same steps all the same."""
    model, reference = network(), network()
    local = laconic.LocalSGD(model, adamw(model), every=3, outer="mean")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for i, (x, y) in enumerate(batches(rank, 3, size=16)):
        local.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if rank and i == 1 else 1.0)).backward()
        scaler.step(local)
        scaler.update()
    optimizer = adamw(reference)
    for i, (x, y) in enumerate(batches(rank, 3, size=16)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        if not (rank and i == 1):
            optimizer.step()
    means = mean_over_ranks(parameters(reference), world)
    results = {"scaler": close(parameters(model), means, 1e-5), "skipped": local.stats()["skipped_steps"] == rank}
    # The caller steps, a scheduler changes the rate.
    model = network()
    optimizer = adamw(model)
    local = laconic.LocalSGD(model, None, every=2, codec="none")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for x, y in batches(rank, 4, size=16):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        local.after_step()
    results["after_step"] = differing(dict(model.named_parameters())) == [] and local.stats()["exchanges"] == 2
    with pytest.raises(laconic.ConfigError, match="after_step"):
        local.step()
    return results


class Odd(nn.Module):
    """Complex, bf16 and channels-last parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(4, 64, 3).to(memory_format=torch.channels_last)
        self.waves = nn.Parameter(torch.randn(40, 60, dtype=torch.complex64))
        self.low = nn.Parameter(torch.randn(64, 64).bfloat16())
        self.register_buffer("phases", torch.zeros(4, dtype=torch.complex64))


def odd(rank, world):
    model = Odd()
    local = laconic.LocalSGD(model, None, every=1, codec="ef|qsgd:4", outer="mean", fragments=1)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(rank + 7 * step)))
        local.after_step()
    moved = all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return {"same": differing(dict(model.named_parameters())) == [], "moved": moved}


def unfrozen(rank, world):
    """A parameter that is unfrozen later is refused until it is included; then it is exchanged."""
    model = network()
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # it holds the frozen parameter, too
    local = laconic.LocalSGD(model, optimizer, every=2, codec="none", outer="nesterov", fragments=2)
    train(local, 2, rank=rank)
    model[2].weight.requires_grad_(True)
    with pytest.raises(laconic.InputError, match=r"parameter '2.weight' is trained.*include_new_parameters"):
        train(local, 1, rank=rank)
    results = {"included": local.include_new_parameters() == ["2.weight"]}
    train(local, 3, rank=rank)
    local.synchronize()
    results["exchanged"] = differing(dict(model.named_parameters())) == []
    # A run that is resumed finds the parameter trained from the start, in another fragment perhaps.
    again = network(2)
    resumed = laconic.LocalSGD(again, adamw(again), every=2, codec="none", outer="nesterov", fragments=2)
    saved = local.state_dict()
    resumed.load_state_dict(saved)
    again.load_state_dict(model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(local.optimizer.state_dict()))
    for each in (local, resumed):
        train(each, 3, rank=rank, skip=4)
    results["resumed"] = same(parameters(model), parameters(again))
    model[0].late = nn.Linear(3, 3)
    with pytest.raises(laconic.InputError, match=r"'0.late.weight'"):
        train(local, 2, rank=rank)
    with LogCapture() as captured:
        laconic.LocalSGD(network(), adamw(network()), every=2)
    results["foreign"] = captured.has("not parameters of the model")
    return results


def defaults(rank, world):
    results = {}
    for codec, outer in (("none", "nesterov"), ("bf16", "nesterov"), ("ef|sign", "mean"), ("topk:0.1", "mean")):
        local = laconic.LocalSGD(network(), None, codec=codec)
        results[codec] = local.stats()["outer"] == outer
    local = laconic.LocalSGD(network(), None, policy={"0.weight": "ef|sign"})
    results["policy"] = local.stats()["outer"] == "mean"
    model = network()
    local = laconic.LocalSGD(model, laconic.muon(model), every=2, codec="ef|topk:0.1|sign")
    train(local, 4, rank=rank)
    stats = local.stats()
    results["kinds"] = stats["optimizers"] == ["Muon", "AdamW"] and stats["exempt"] != {}
    results["bytes"] = stats["bytes_sent"] > 0 and stats["bytes_received"] > 0 and stats["exchanges"] == 2
    local.synchronize()
    results["no second exchange"] = local.stats()["exchanges"] == 2
    return results


def rejected(rank, world):
    for match, options in (
        ("fragments must be at most every", {"every": 2, "fragments": 3}),
        ("fragments must be at most the 6", {"fragments": 7}),
        ("overlap must be at most every // fragments, 10", {"fragments": 2, "overlap": 11}),
        ("merge must be a number from 0", {"merge": 1.0}),
        ("merge must be a number from 0", {"merge": "all"}),
        ("weight_by must be one of", {"weight_by": "examples"}),
        ("clip must be one of", {"clip": 1.0}),
        ("average must be one of", {"average": "some"}),
        ("average='senders' needs a codec that selects", {"average": "senders", "codec": "ef|sign"}),
        ("needs error feedback: use 'ef.topk:0.1'", {"continue_from": "local", "codec": "topk:0.1"}),
        ("timeout_s must be above 0", {"timeout_s": 0.0}),
        ("exactly the tensors", {"outer": lambda anchors: torch.optim.SGD(anchors[:1], lr=1.0)}),
    ):
        with pytest.raises(laconic.ConfigError, match=match):
            laconic.LocalSGD(network(), None, **options)
    with pytest.raises(laconic.ConfigError, match="optimizer must be"):
        laconic.LocalSGD(network(), "adam")
    with pytest.raises(laconic.ConfigError, match="no parameter with requires_grad"):
        laconic.LocalSGD(network().requires_grad_(False), None)
    model = network()
    local = laconic.LocalSGD(model, laconic.muon(model))
    with pytest.raises(laconic.ConfigError, match="closure needs one optimizer"):
        local.step(lambda: 0.0)
    return {"arguments": True}


PARTS = (
    one_rank, by_hand, progress, timing, resumed, weighted, senders, continued, precision, odd, unfrozen, defaults,
    rejected,
)  # fmt: skip


def battery(rank, world):
    results = {}
    for part in PARTS:
        results |= {f"{part.__name__} {name}": value for name, value in part(rank, world).items()}
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(battery, 2, tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("part", [part.__name__ for part in PARTS])
def test_local_training(part, ranks):
    assert not failures(ranks, part)
