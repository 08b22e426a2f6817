"""Residuals in bfloat16: unbiased rounding, the same bits on all backends, resumed runs, half of the memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
import laws
import ranks
from laconic import counters, kernels
from laconic.aggregate.homomorphic import Contributor
from laconic.collective import Exchange
from laconic.errors import ConfigError
from laconic.residual_storage import ResidualStorage
from laconic.train import data

ALL = laconic.Policy(min_numel=0, exempt_1d=False)
BF16 = ResidualStorage(torch.bfloat16)


def rounded(x, seed, backend=kernels.cpu):
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    backend.stochastic_bf16(x, seed, out)
    return out


def test_rounding_takes_a_neighbour_and_is_unbiased():
    x = laws.normal(2000) * torch.exp(8 * laws.normal(2000, seed=1))
    step = torch.exp2(torch.frexp(x).exponent - 8.0)  # between bfloat16 values of this size
    total = torch.zeros(2000, dtype=torch.float64)
    for seed in range(400):
        y = rounded(x, seed).float()
        assert bool(((y - x).abs() < step).all())
        total += y
    error = (total / 400 - x) / step
    assert float(error.abs().max()) < 0.15 and abs(float(error.mean())) < 0.002  # 0.025 and 0.0006 are expected


def test_values_of_bfloat16_stay_and_none_becomes_infinite():
    x = laws.normal(5000).to(torch.bfloat16)
    x[:4] = torch.tensor([0.0, -0.0, torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).tiny / 64])
    for seed in range(5):
        assert laws.same_bits(rounded(x.float(), seed), x)
    largest = torch.full((1000,), laws.FLOAT32_MAX)
    assert bool((rounded(torch.cat([largest, -largest]), 0).abs() == torch.finfo(torch.bfloat16).max).all())
    assert not bool(rounded(torch.tensor([float("inf"), float("-inf"), float("nan")]), 0).isfinite().any())


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 257, 5000, 70_001])
def test_core_rounds_as_the_reference_does(n, threads):
    x = laws.normal(n) * torch.exp(20 * laws.normal(n, seed=1))
    for seed in (0, 5, -3, 2**63):
        assert laws.same_bits(rounded(x, seed), rounded(x, seed, kernels.reference))


@pytest.mark.parametrize("spec", ["ef|topk:0.1", "ef|qsgd:2", "ef:0.9|sign", "momentum:0.9|topk:0.1|qsgd:4"])
def test_channel_delivers_what_it_keeps_in_bfloat16(spec):
    """What was sent plus the residual is the sum of the inputs, up to the rounding of residuals, which has no bias."""
    short, exact = (
        laconic.channel(spec, policy=ALL, residual_dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    decayed = "0.9" in spec
    sent, total = torch.zeros(3000), torch.zeros(3000)
    for step in range(40):
        x = laws.normal(3000, seed=step)
        total += x
        sent += laconic.decode(short.encode("w", x, seed=step))
        exact.encode("w", x, seed=step)
    residual, wanted = short.residual("w"), exact.residual("w")
    assert residual.dtype == torch.float32 and short.stored("w").dtype == torch.bfloat16
    assert short.residual_nbytes * 2 == exact.residual_nbytes > 0
    # Other values are selected or rounded up than by float32, so that only the sizes can be compared.
    assert float(residual.norm() / wanted.norm()) == pytest.approx(1.0, abs=0.03)
    if not decayed:
        error = sent + residual - total
        assert float(error.norm() / total.norm()) < 0.02 and abs(float(error.mean())) < 0.001


def test_seed_slot_and_index_decide_the_random_bits():
    def kept(slot, seed):
        channel = laconic.channel("ef|topk:0.01", policy=ALL, residual_dtype=torch.bfloat16)
        channel.encode(slot, laws.normal(3000), seed=seed)
        return channel.stored(slot)

    assert laws.same_bits(kept("a", 1), kept("a", 1))
    assert not laws.same_bits(kept("a", 1), kept("b", 1)) and not laws.same_bits(kept("a", 1), kept("a", 2))


@pytest.mark.parametrize("spec", ["ef|topk:0.1|qsgd:4", "momentum:0.9|topk:0.1"])
def test_resumed_channel_has_the_same_bits(spec):
    channel = laconic.channel(spec, policy=ALL, residual_dtype=torch.bfloat16)
    for step in range(3):
        channel.encode("w", laws.normal(500, seed=step), seed=step)
    saved, before = copy.deepcopy(channel.state_dict()), counters.counts().get("residual_conversions", 0)
    assert all(x.dtype == torch.bfloat16 for x in saved.values())
    resumed = laconic.channel(spec, policy=ALL, residual_dtype=torch.bfloat16)
    resumed.load_state_dict(saved)
    for step in range(3, 6):
        x = laws.normal(500, seed=step)
        assert resumed.encode("w", x, seed=step) == channel.encode("w", x, seed=step)
    assert counters.counts().get("residual_conversions", 0) == before


def test_state_of_another_dtype_is_converted_and_counted(caplog):
    wide = laconic.channel("ef|topk:0.1", policy=ALL)
    wide.encode("w", laws.normal(500))
    before = counters.counts().get("residual_conversions", 0)
    short = laconic.channel("ef|topk:0.1", policy=ALL, residual_dtype=torch.bfloat16)
    short.load_state_dict(wide.state_dict())
    assert short.stored("w").dtype == torch.bfloat16
    torch.testing.assert_close(short.residual("w"), wide.residual("w"), rtol=2**-7, atol=0)
    wide.load_state_dict(short.state_dict())
    assert wide.stored("w").dtype == torch.float32 and torch.equal(wide.residual("w"), short.residual("w"))
    assert counters.counts()["residual_conversions"] == before + 2
    assert "another dtype become bfloat16" in caplog.text


def test_contributor_undoes_a_round_in_bfloat16():
    contributor = Contributor("ef|thc:4", workers=2, storage=BF16)
    for step in range(2):
        x = laws.normal(3000, seed=step)
        contributor.packet("w", contributor.probe("w", x, seed=step), seed=step)
        kept = contributor.stored("w").clone()
    contributor.packet("w", contributor.probe("w", x, seed=2), seed=2)
    assert not laws.same_bits(contributor.stored("w"), kept) and contributor.stored("w").dtype == torch.bfloat16
    contributor.undo("w")
    assert laws.same_bits(contributor.stored("w"), kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ConfigError, match="residual_dtype must be"):
        laconic.channel("ef|sign", residual_dtype=dtype)


@pytest.mark.parametrize("device", ["cuda", "nowhere", 3.5])
def test_other_devices_are_refused(device):
    with pytest.raises(ConfigError, match="residual_device must be None"):
        laconic.channel("ef|sign", residual_device=device)


# -------------------------------------------------------------------------------------------------- between ranks

SPECS = ("ef|qsgd:4", "ef|topk:0.1|sign", "ef|thc:4", "ef|powersgd:2", "momentum:0.9|topk:0.1")


def exchanges(rank, world):
    """Means by residuals in bfloat16: close to those by float32, resumed with the same bits, half of the memory."""
    results = {}
    for spec in SPECS:
        short, exact = (Exchange(spec, policy=ALL, storage=storage) for storage in (BF16, None))

        def mean(exchange, step):
            x = laws.normal(40, 60, seed=10 * step + rank)
            exchange.mean([("w", x)])
            return x

        sums = [torch.zeros(40, 60), torch.zeros(40, 60)]
        for step in range(12):
            for total, exchange in zip(sums, (short, exact), strict=True):
                total += mean(exchange, step)
        results[f"close {spec}"] = float((sums[0] - sums[1]).norm() / sums[1].norm()) < 0.2
        results[f"half {spec}"] = 2 * short.residual_nbytes == exact.residual_nbytes > 0
        state = copy.deepcopy(short.state_dict())
        resumed = Exchange(spec, policy=ALL, storage=BF16)
        resumed.load_state_dict(state)
        results[f"resumed {spec}"] = torch.equal(mean(resumed, 12), mean(short, 12))
        after, before = resumed.state_dict(), short.state_dict()
        results[f"state {spec}"] = all(torch.equal(after[key], x) for key, x in before.items())
        results[f"dtype {spec}"] = all(x.dtype == torch.bfloat16 for key, x in before.items() if "residual" in key)
    return results


def attached(rank, world):
    """An attachment and LocalSGD keep their residuals in bfloat16 and continue from their state with the same bits."""
    results = {}
    saved = {}
    model = DistributedDataParallel(ranks.network())
    attachment = laconic.attach(
        model, "ef|topk:0.1|qsgd:4", policy=ALL, residual_dtype=torch.bfloat16, residual_device="cpu"
    )

    def train(steps):
        for x, y in list(ranks.batches(rank, steps[-1] + 1))[steps[0] :]:
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        return ranks.parameters(model)

    train(range(5))
    saved = copy.deepcopy((attachment.state_dict(), model.state_dict()))
    wanted = train(range(5, 8))
    attachment.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    results["attached resumed"] = ranks.same(train(range(5, 8)), wanted)
    values = sum(p.numel() for p in model.parameters())
    results["attached bytes"] = attachment.stats()["residual_bytes"] == 2 * values
    attachment.detach()
    local_model = ranks.network()
    local = laconic.LocalSGD(
        local_model, torch.optim.SGD(local_model.parameters(), lr=0.1), every=2, codec="ef|sign", policy=ALL,
        residual_dtype=torch.bfloat16,
    )  # fmt: skip
    for x, y in ranks.batches(rank, 6):
        local.zero_grad()
        nn.functional.cross_entropy(local_model(x), y).backward()
        local.step()
    results["local bytes"] = local.stats()["residual_bytes"] == 2 * values
    results["local finite"] = all(x < 100 for x in local.stats()["residual_norms"].values())
    return results


test_ranks = ranks.facts(
    [exchanges, attached], 2,
    {
        "means are close to those by float32": "close", "half of the memory": "half", "a resumed run": "resumed",
        "its state": "state", "states are bfloat16": "dtype", "attach": "attached", "LocalSGD": "local",
    },
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- training


def accuracy_on_digits(spec, dtype):
    """Train a small network on digits with gradients that go through a channel; return the accuracy."""
    digits = data.load("digits")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    channel = laconic.channel(spec, policy=ALL, residual_dtype=dtype)
    images, tests = ((each.float() - 33) / 79 for each in (digits.train_images, digits.test_images))
    for step in range(160):
        chosen = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), digits.train_labels[chosen].long()).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * laconic.decode(channel.encode(name, parameter.grad, seed=step))
    with torch.no_grad():
        return float((model(tests).argmax(1) == digits.test_labels).float().mean())


@pytest.mark.parametrize("spec", ["ef|topk:0.02", "ef|sign"])
def test_digits_are_learned_as_well_with_residuals_in_bfloat16(spec):
    short, exact = (accuracy_on_digits(spec, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert short > 0.85 and short > exact - 0.015, (short, exact)
