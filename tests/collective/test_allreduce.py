"""Reducer on 4 ranks: the same bits on every rank, equal to those of a server that adds the packets one by one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import laconic
import laws
from laconic import collective, wire
from laconic.aggregate import homomorphic
from laconic.collective.reductions import allreduce as allreduce_module
from laconic.kernels.reference import packed_ints
from ranks import failures, run_ranks

WORLD = 4
SPECS = (
    "shared:8", "thc:4", "thc:6,round=stochastic", "shared:3", "randk:0.5|thc:7", "randk:0.3", "union", "powersgd:2",
)  # fmt: skip


def tensor(rank: int) -> torch.Tensor:
    return laws.normal(60, 50, seed=rank) * (1 + rank)


def means(rank, world):
    results = {}
    for spec in SPECS:
        x = tensor(rank)
        results[f"mean {spec}"] = collective.allreduce(x, spec, seed=5)
        assert results[f"mean {spec}"] is x
    for dtype in laws.DTYPES:
        x = tensor(rank).to(dtype)[::2].t()
        before = x.clone()
        results[f"dtype {dtype}"] = collective.allreduce(x, "shared:8").clone()
        y = collective.Reducer("shared:8").reduce("a", before)
        assert torch.equal(y, x) and not torch.equal(before, x)
    for shape in ((), (0,), (1,), (1025,)):
        results[f"shape {shape}"] = collective.allreduce(laws.normal(*shape, seed=rank), "thc:8")
    alone = [dist.new_group([r]) for r in range(world)][rank]
    results["alone"] = collective.allreduce(tensor(0), "shared:8", alone)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    results["pair"] = collective.allreduce(tensor(rank), "thc:8", pair)
    return results


def round_tensor(step, rank):
    """Return a tensor that is not finite on rank 2 in steps 3 and 5."""
    x = laws.normal(60, 50, seed=100 * step + rank)
    if step in (3, 5) and rank == 2:
        x[7, 7] = float("nan") if step == 3 else float("inf")
    return x


def rounds_with_memory(rank, world):
    """Run eight rounds, two of which all ranks skip, and resume after the fifth."""
    results = {}
    for carry in (False, True):
        reducer = collective.Reducer("ef|thc:4", carry=carry)
        put_in, came_out, outputs = torch.zeros(60, 50), torch.zeros(60, 50), []
        for step in range(8):
            x = round_tensor(step, rank)
            outputs.append(reducer.reduce("w", x).clone())
            came_out += outputs[-1]
            if step not in (3, 5):
                put_in += x
            if step == 4:
                state = reducer.state_dict()
        results[f"came out {carry}"], results[f"put in {carry}"] = came_out, put_in
        results[f"residual {carry}"] = reducer.contributor.residual("w")
        results[f"skipped {carry}"] = (
            not outputs[3].any() and not outputs[5].any() and bool(outputs[4].any())
        ) and reducer.stats.skipped_nonfinite == 2
        resumed = collective.Reducer("ef|thc:4", carry=carry)
        resumed.load_state_dict(state)
        for step in (5, 6, 7):
            y = resumed.reduce("w", round_tensor(step, rank))
        results[f"resumed {carry}"] = torch.equal(y, outputs[7])
    return results


def parts(rank, world):
    """Cut a tensor into parts, as large ones are: the same mean, and a round that is skipped for all parts."""
    results = {}
    whole = {spec: collective.Reducer(spec).reduce("w", tensor(rank)) for spec in ("shared:8", "ef|shared:8")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(allreduce_module, "PART", 1024)
        for spec, expected in whole.items():
            for dtype in (torch.float32, torch.float64):
                out = torch.empty(50, 60, dtype=dtype).t()
                mean = collective.Reducer(spec).reduce("w", tensor(rank), out=out).float()
                results[f"parts {spec} {dtype}"] = torch.equal(mean, expected)
            reducer = collective.Reducer(spec)
            reducer.reduce("w", tensor(rank))
            before = {key: x.clone() for key, x in reducer.contributor.state_dict().items()}
            x = tensor(rank)
            if rank == 3:
                x[-1, -1] = float("nan")  # in the last part, when the others could already be on their way
            skipped = not reducer.reduce("w", x, out=x).any() and reducer.stats.skipped_nonfinite == 1
            after = reducer.contributor.state_dict()
            unchanged = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
            results[f"parts {spec} skipped"] = skipped and unchanged and len(before) == (3 if "ef" in spec else 0)
            results[f"parts {spec} continues"] = bool(reducer.reduce("w", tensor(rank)).any())
    return results


def rejected(rank, world):
    with pytest.raises(laconic.NonFiniteError, match="some rank"):
        collective.allreduce(torch.full((9,), float("nan") if rank == 1 else 0.5), "shared:8", nonfinite="raise")
    with pytest.raises(laconic.ConfigError, match="can add 3 workers"):
        collective.allreduce(torch.ones(5), "thc:2")
    with pytest.raises(laconic.InputError, match="do not reduce the same"):
        collective.allreduce(torch.ones(5 + (rank == 3)), "thc:4")
    with pytest.raises(laconic.ConfigError, match="carry clips"):
        collective.Reducer("thc:4", carry=True)
    return {"rejected": True}


def battery(rank, world):
    return means(rank, world) | rounds_with_memory(rank, world) | parts(rank, world) | rejected(rank, world)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(battery, WORLD, tmp_path_factory.mktemp("allreduce"))


def test_every_rank_has_the_same_bits(ranks):
    for name, first in ranks[0].items():
        if name.startswith(("mean", "dtype", "shape", "came out")):
            assert all(laws.same_bits(first, rank[name]) for rank in ranks), name
    assert laws.same_bits(ranks[0]["pair"], ranks[1]["pair"]) and laws.same_bits(ranks[2]["pair"], ranks[3]["pair"])


@pytest.mark.parametrize("spec", SPECS)
def test_result_equals_that_of_a_server(spec, ranks):
    xs = [tensor(rank) for rank in range(WORLD)]
    summing = laconic.summing(spec, workers=WORLD, ring=True)
    agreed = summing.agree([summing.probe(x, seed=5) for x in xs])
    total = homomorphic.add(*(summing.encode(x, agreed, seed=5, worker=rank) for rank, x in enumerate(xs)))
    if isinstance(summing.chain.values, laconic.codecs.packed_ints.PackedIntStage):
        assert laws.same_bits(laconic.decode(total), ranks[0][f"mean {spec}"])
        assert homomorphic.count(total) == WORLD
    else:
        torch.testing.assert_close(laconic.decode(total), ranks[0][f"mean {spec}"], rtol=1e-4, atol=1e-5)


def test_means_are_close_to_the_exact_mean(ranks):
    xs = [tensor(rank) for rank in range(WORLD)]
    mean = sum(xs) / WORLD
    for name, bound in (("mean shared:8", 0.05), ("mean union", 1e-6), ("mean thc:4", 0.45)):
        assert float((ranks[0][name] - mean).norm() / mean.norm()) < bound, name
    pair = sum(xs[2:]) / 2
    assert float((ranks[3]["pair"] - pair).norm() / pair.norm()) < 0.05
    assert float((ranks[3]["alone"] - xs[0]).norm() / xs[0].norm()) < 0.02
    for dtype in laws.DTYPES:
        expected = sum(x[::2].t().double() for x in xs) / WORLD
        assert float((ranks[0][f"dtype {dtype}"].double() - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("carry", [False, True])
def test_error_feedback_conserves_the_sum_over_skipped_rounds(carry, ranks):
    assert all(rank[f"skipped {carry}"] and rank[f"resumed {carry}"] for rank in ranks)
    rotated = sum(rank[f"residual {carry}"] for rank in ranks).view(-1, 1024) / WORLD
    signs = packed_ints.rotation_signs(rotated.numel(), 0, rotated.device)
    residual = (packed_ints.hadamard(rotated * 2.0**-5).view(-1) * signs)[:3000].view(60, 50)
    put_in = sum(rank[f"put in {carry}"] for rank in ranks) / WORLD
    assert float((ranks[0][f"came out {carry}"] + residual - put_in).abs().max()) < 1e-4


def test_parts_of_a_large_tensor_give_the_same_mean(ranks):
    assert not failures(ranks, "parts")


def test_wrong_arguments_raise_on_all_ranks(ranks):
    assert not failures(ranks, "rejected")


def test_missing_process_group_raises_config_error():
    with pytest.raises(laconic.ConfigError, match="init_process_group"):
        collective.allreduce(torch.ones(3), "shared:8")


def test_packets_of_a_ring_are_ordinary_frames():
    summing = laconic.summing("thc:4", workers=3, ring=True)
    x = tensor(0)
    frame = summing.encode(x, summing.probe(x))
    assert wire.unpack(frame).codec == "thc:4" and laconic.decode(frame).shape == x.shape
