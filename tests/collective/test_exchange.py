"""Exchange on 2 and 3 ranks: unbiased means, conserved residuals, values that are not finite, counted bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.collective import Exchange, TwoShot
from ranks import LogCapture, batches, by_name, failures, network, run_ranks, same

UNBIASED = ("qsgd:3", "terngrad", "randk:0.2", "shared:4,round=stochastic", "randk:0.5|qsgd:4")
COMPRESS_ALL = laconic.Policy(min_numel=0, exempt_1d=False)


def unbiased(rank, world):
    """Exchange the same tensor in many rounds; return the mean error of a round and the error of the mean."""
    results = {}
    x = torch.randn(30, 100, generator=torch.Generator().manual_seed(rank))
    total = x.clone()
    dist.all_reduce(total)
    expected = total / world
    for spec in UNBIASED:
        exchange = Exchange(spec, policy=COMPRESS_ALL)
        mean, errors = torch.zeros_like(x), []
        for _ in range(64):
            y = x.clone()
            exchange.mean([("w", y)])
            errors.append(float((y - expected).square().sum() / expected.square().sum()))
            mean += y / 64
        mean_error = float((mean - expected).square().sum() / expected.square().sum())
        results[f"unbiased {spec}"] = (sum(errors) / 64, mean_error)
    return results


def conserved(rank, world):
    """Return the largest difference between what went in and what came out plus the residuals."""
    results = {}
    for spec in ("ef|topk:0.05", "ef|qsgd:4", "ef|topk:0.05|qsgd:4"):
        exchange = Exchange(spec, policy=COMPRESS_ALL)
        put_in, came_out = torch.zeros(4000), torch.zeros(4000)
        for step in range(12):
            x = torch.randn(4000, generator=torch.Generator().manual_seed(100 * step + rank))
            put_in += x / world
            exchange.mean([("a", a := x[:2500]), ("b", b := x[2500:])])
            came_out += torch.cat([a, b])
        residuals = torch.zeros(4000)
        for key, residual in exchange.state_dict().items():
            if key.endswith("/residual"):
                direction, _, rest = key.partition("//")[2].partition("/")
                slot, _, span = rest.removesuffix("]/residual").partition("[")
                begin, end = (int(number) + (2500 if slot == "b" else 0) for number in span.split(":"))
                # An owner's residual is one of the mean; a sender's counts by its share of the mean.
                residuals[begin:end] += residual / (world if direction == "there" else 1)
        totals = torch.stack([put_in, residuals])
        dist.all_reduce(totals)
        results[f"conserved {spec}"] = float((came_out + totals[1] - totals[0]).abs().max())
    return results


def decayed(rank, world):
    """Compare rounds of ``ef:0.5`` with rounds of ``ef`` whose residuals, a sender's and an owner's, are halved."""
    results = {}
    for codec in ("topk:0.05|qsgd:4", "sign", "thc:4", "powersgd:2"):
        fading, plain = (Exchange(f"{ef}|{codec}", policy=COMPRESS_ALL) for ef in ("ef:0.5", "ef"))
        for step in range(4):
            state = {key.replace("ef:0.5|", "ef|", 1): x for key, x in fading.state_dict().items()}
            plain.load_state_dict({key: x / 2 if key.endswith("/residual") else x for key, x in state.items()})
            x = torch.randn(50, 80, generator=torch.Generator().manual_seed(100 * step + rank))
            copies = [x.clone(), x.clone()]
            for exchange, y in zip((fading, plain), copies, strict=True):
                exchange.mean([("w", y)])
            results[f"decayed {codec} {step}"] = same(copies[:1], copies[1:])
        residuals = [x for key, x in fading.state_dict().items() if key.endswith("/residual")]
        kept = 1 if codec in ("thc:4", "powersgd:2") else 2  # as a sender to the other rank, and as an owner
        results[f"decayed {codec} residuals"] = sum(bool(x.any()) for x in residuals) == kept
    return results


def grouped_messages(rank, world):
    """Start sends and receives in one group, as NCCL needs it: the result has the same bits."""
    results = {}
    for spec in ("ef|topk:0.05|qsgd:4", "qsgd:4"):
        reductions = [TwoShot(spec), TwoShot(spec)]
        reductions[1].transport.grouped = True
        for step in range(5):
            x = torch.randn(9000, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + step)
            copies = [x.clone(), x.clone()]
            for reduction, y in zip(reductions, copies, strict=True):
                reduction.reduce_all([("w", y)])
            results[f"grouped {spec} {step}"] = same(copies[:1], copies[1:])
    return results


def not_finite(rank, world):
    results = {}
    for spec in ("ef|topk:0.1", "shared:8", "qsgd:4"):
        for mode in ("spread", "skip", "raise"):
            exchange = Exchange(spec, policy=COMPRESS_ALL, nonfinite=mode)
            x, other = torch.ones(6000), torch.ones(6000)
            if rank == 1:
                x[17] = float("inf")
            with LogCapture() as logged:
                if mode == "raise":
                    with pytest.raises(laconic.NonFiniteError, match="not finite"):
                        exchange.mean([("w", x)])
                else:
                    exchange.mean([("w", x), ("v", other)])
            right = {"spread": bool(x[17].isnan()), "skip": bool(torch.isfinite(x).all()), "raise": True}[mode]
            other_exchanged = mode == "raise" or (bool(torch.isfinite(other).all()) and bool(other.any()))
            results[f"not finite {spec} {mode}"] = right and other_exchanged
            counted = logged.has("not finite") and exchange.stats.skipped_nonfinite == 1
            # If only one contribution is left out, only its rank counts it.
            results[f"not finite {spec} {mode} counted"] = counted == (
                mode != "skip" or rank == 1 or spec == "shared:8"
            )
            if mode == "spread":
                y = torch.ones(6000)
                exchange.mean([("w", y)])
                results[f"not finite {spec} next round"] = bool(torch.isfinite(y).all()) and bool(y.any())
    return results


def overlapping(rank, world):
    """Rank 0 begins two means before it ends the first, rank 1 takes them in turn: the bits of means in turn."""
    results = {}
    for spec in ("ef|qsgd:4", "ef|topk:0.05|qsgd:4"):
        in_turn, overlapped = Exchange(spec), Exchange(spec)
        for step in range(4):
            tensors = [
                [(f"{name}.weight", torch.randn(64, 80 + step, generator=torch.Generator().manual_seed(9 * step + i))),
                 (f"{name}.bias", torch.full((40,), float(rank + step)))]
                for i, name in enumerate("ab", start=100 * rank)
            ]  # fmt: skip
            expected = [[(name, x.clone()) for name, x in each] for each in tensors]
            for each in expected:
                in_turn.mean(each)
            steps = (overlapped.mean_in_steps(overlapped.group_by_spec(each)) for each in tensors)
            running = list(steps) if rank == 0 else steps
            if rank == 0:
                for each in running:
                    next(each)  # what is sent first has left
            for each in running:
                for _ in each:
                    pass
            reduced, wanted = ([x for each in given for _, x in each] for given in (tensors, expected))
            results[f"overlapping {spec} {step}"] = same(reduced, wanted)
        ours, theirs = overlapped.state_dict(), in_turn.state_dict()
        results[f"overlapping {spec} residuals"] = ours.keys() == theirs.keys() and same(
            list(ours.values()), list(theirs.values())
        )
    results["overlapping allowed"] = overlapped.overlaps and not Exchange("ef|thc:4").overlaps
    results["overlapping refused"] = not Exchange("qsgd:4", policy={"a": "topk:0.1"}).overlaps
    return results


def exchanges(rank, world):
    parts = unbiased, conserved, decayed, grouped_messages, not_finite, overlapping
    return {name: result for part in parts for name, result in part(rank, world).items()}


class HandedOver:
    """Counts the bytes handed to ``torch.distributed``, by kind of collective."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nbytes = {"all_reduce": 0, "send": 0, "broadcast": 0}
        all_reduce, batch, broadcast = dist.all_reduce, dist.batch_isend_irecv, dist.broadcast
        all_to_all = dist.all_to_all_single

        def counted_all_reduce(x, *args, **options):
            self.nbytes["all_reduce"] += x.numel() * x.element_size()
            return all_reduce(x, *args, **options)

        def counted_batch(operations):
            sends = [operation.tensor for operation in operations if operation.op is dist.isend]
            self.nbytes["send"] += sum(x.numel() * x.element_size() for x in sends)
            return batch(operations)

        def counted_all_to_all(output, x, *args, **options):
            self.nbytes["send"] += x.numel() * x.element_size()
            return all_to_all(output, x, *args, **options)

        def counted_broadcast(x, source, *args, **options):
            if dist.get_rank() == source:
                self.nbytes["broadcast"] += x.numel() * x.element_size()
            return broadcast(x, source, *args, **options)

        patch.setattr(dist, "all_reduce", counted_all_reduce)
        patch.setattr(dist, "batch_isend_irecv", counted_batch)
        patch.setattr(dist, "all_to_all_single", counted_all_to_all)
        patch.setattr(dist, "broadcast", counted_broadcast)


def handed_over_bytes(rank, world):
    """Return the bytes that attach and LocalSGD hand to torch.distributed, next to their stats."""
    results = {}
    policy = {"0.weight": "ef|thc:6", "2.weight": "ef|topk:0.05|qsgd:4"}
    for name, spec, options in (
        ("exact", "none", {"check_every": 2}),
        ("mixed", "qsgd:4", {"check_every": 2, "warmup_steps": 1, "policy": policy}),
    ):
        with pytest.MonkeyPatch.context() as patch:
            module = DistributedDataParallel(network(), bucket_cap_mb=0.03)
            handed_over = HandedOver(patch)
            attachment = laconic.attach(module, spec, **options)
            for x, y in batches(rank, 4):
                nn.functional.cross_entropy(module(x), y).backward()
            results[f"bytes {name}"] = (handed_over.nbytes, attachment.stats())
    with pytest.MonkeyPatch.context() as patch:
        handed_over, model = HandedOver(patch), network()
        local = laconic.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, codec="ef|topk:0.1")
        for x, y in batches(rank, 4):
            nn.functional.cross_entropy(model(x), y).backward()
            local.step()
        stats = vars(local.exchange.stats) | {"wire_bytes": local.exchange.stats.wire_bytes}
        results["bytes local"] = (handed_over.nbytes, stats)
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(exchanges, 2, tmp_path_factory.mktemp("exchange"))


@pytest.mark.parametrize("spec", UNBIASED)
def test_mean_over_rounds_of_an_unbiased_codec_converges_to_the_exact_mean(spec, ranks):
    error, error_of_mean = ranks[0][f"unbiased {spec}"]
    assert error_of_mean < 2.5 * error / 64


def test_error_feedback_conserves_the_sum(ranks):
    differences = by_name(ranks, "conserved")
    assert len(differences) == 3 and all(max(values) < 1e-4 for values in differences.values()), differences


def test_residuals_of_senders_and_owners_decay(ranks):
    assert not failures(ranks, "decayed")


def test_grouped_sends_and_receives_give_the_same_bits(ranks):
    assert not failures(ranks, "grouped")


def test_means_that_overlap_have_the_bits_of_means_in_turn(ranks):
    assert not failures(ranks, "overlapping")


def test_values_that_are_not_finite_are_spread_skipped_or_raised_on_all_ranks(ranks):
    assert not failures(ranks, "not finite")


def test_stats_count_the_bytes_handed_to_torch_distributed(tmp_path):
    for rank in run_ranks(handed_over_bytes, 3, tmp_path):
        for name, (handed_over, stats) in rank.items():
            counted = {"all_reduce": "bytes_reduced", "send": "bytes_sent", "broadcast": "bytes_broadcast"}
            assert handed_over == {kind: stats[field] for kind, field in counted.items()}, name
            assert stats["wire_bytes"] == sum(handed_over.values()) > 0, name
        (_, mixed), (_, exact) = rank["bytes mixed"], rank["bytes exact"]
        assert mixed["bytes_sent"] > 0 and exact["bytes_reduced"] > 0
        assert exact["bytes_sent"] < 0.02 * exact["bytes_reduced"]  # settings and checksums are compared
        for stats in (mixed, exact):  # the model of a ring with 3 ranks
            assert stats["ring_bytes_estimate"] == stats["bytes_sent"] + stats["bytes_reduced"] * 4 / 3
