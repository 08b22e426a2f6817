"""Means over processes: the same bits on every rank, and those of a server that adds one packet after the other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import laconic
import laws
from laconic import collective, wire
from laconic.aggregate import homomorphic
from laconic.collective.reductions import allreduce as reducer_module

WORLD = 4
SPECS = (
    "shared:8",
    "thc:4",
    "thc:6,round=stochastic",
    "shared:3",
    "randk:0.5|thc:7",
    "randk:0.3",
    "union",
    "powersgd:2",
)


def tensors(rank: int, n: int = 3000) -> torch.Tensor:
    return laws.normal(n // 50, 50, seed=rank) * (1 + rank)


def _work(rank: int, path: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    results: dict[str, object] = {}
    for spec in SPECS:
        x = tensors(rank)
        results[f"mean {spec}"] = collective.allreduce(x, spec, seed=5)
        assert results[f"mean {spec}"] is x
    for dtype in laws.DTYPES:
        x = tensors(rank).to(dtype)[::2].t()
        before = x.clone()
        results[f"dtype {dtype}"] = collective.allreduce(x, "shared:8").clone()
        y = collective.Reducer("shared:8").reduce("a", before)
        assert torch.equal(y, x) and not torch.equal(before, x)
    for shape in ((), (0,), (1,), (1025,)):
        results[f"shape {shape}"] = collective.allreduce(laws.normal(*shape, seed=rank), "thc:8")
    # Alone in a group.
    alone = [dist.new_group([r]) for r in range(WORLD)][rank]
    results["alone"] = collective.allreduce(tensors(0), "shared:8", alone)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    results["pair"] = collective.allreduce(tensors(rank), "thc:8", pair)
    # Rounds with memory, one of which is lost for all because of one.
    for carry in (False, True):
        reducer = collective.Reducer("ef|thc:4", carry=carry)
        came, went, log = torch.zeros(60, 50), torch.zeros(60, 50), []
        for step in range(8):
            x = laws.normal(60, 50, seed=100 * step + rank)
            if step in (3, 5) and rank == 2:
                x[7, 7] = float("nan") if step == 3 else float("inf")
            y = reducer.reduce("w", x)
            log.append(y.clone())
            went += y
            if step not in (3, 5):
                came += x
            if step == 4:
                state = reducer.state_dict()
        results[f"went {carry}"], results[f"came {carry}"] = went, came
        results[f"residual {carry}"] = reducer.contributor.residual("w")
        results[f"zero {carry}"] = not log[3].any() and not log[5].any() and bool(log[4].any())
        results[f"skipped {carry}"] = reducer.stats.skipped_nonfinite
        again = collective.Reducer("ef|thc:4", carry=carry)
        again.load_state_dict(state)
        for step in (5, 6, 7):
            x = laws.normal(60, 50, seed=100 * step + rank)
            if step == 5 and rank == 2:
                x[7, 7] = float("inf")
            y = again.reduce("w", x)
        results[f"resumed {carry}"] = torch.equal(y, log[7])
    # Part by part, as large tensors go.
    whole = {spec: collective.Reducer(spec).reduce("w", tensors(rank)) for spec in ("shared:8", "ef|shared:8")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer_module, "PART", 1024)
        for spec, wanted in whole.items():
            reducer = collective.Reducer(spec)
            for dtype in (torch.float32, torch.float64):
                out = torch.empty(50, 60, dtype=dtype).t()
                results[f"parts {spec} {dtype}"] = torch.equal(
                    collective.Reducer(spec).reduce("w", tensors(rank), out=out).float(), wanted
                )
            reducer.reduce("w", tensors(rank))
            kept = [reducer.contributor.residual(f"w[{i}]") for i in range(3)]
            kept = [None if residual is None else residual.clone() for residual in kept]
            x = tensors(rank)
            if rank == 3:
                x[-1, -1] = float("nan")  # in the last part: the others are on their way by then
            lost = not reducer.reduce("w", x, out=x).any()
            same = all(
                residual is None or torch.equal(residual, reducer.contributor.residual(f"w[{i}]"))
                for i, residual in enumerate(kept)
            )
            results[f"parts {spec} lost"] = lost and same and reducer.stats.skipped_nonfinite == 1
            results[f"parts {spec} goes on"] = bool(reducer.reduce("w", tensors(rank)).any())
    with pytest.raises(laconic.NonFiniteError, match="some rank"):
        collective.allreduce(torch.full((9,), float("nan") if rank == 1 else 0.5), "shared:8", nonfinite="raise")
    with pytest.raises(laconic.ConfigError, match="can add 3 workers"):
        collective.allreduce(torch.ones(5), "thc:2")
    with pytest.raises(laconic.InputError, match="do not reduce the same"):
        collective.allreduce(torch.ones(5 + (rank == 3)), "thc:4")
    with pytest.raises(laconic.ConfigError, match="carry clips"):
        collective.Reducer("thc:4", carry=True)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_work, args=(str(folder / "store"), str(folder)), nprocs=WORLD, start_method="fork")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def test_every_rank_has_the_same_bits(ranks):
    for name, first in ranks[0].items():
        if name.startswith(("mean", "dtype", "shape", "went")):
            assert all(laws.same_bits(first, rank[name]) for rank in ranks), name
    assert laws.same_bits(ranks[0]["pair"], ranks[1]["pair"]) and laws.same_bits(ranks[2]["pair"], ranks[3]["pair"])


@pytest.mark.parametrize("spec", SPECS)
def test_they_are_the_bits_of_a_server(spec, ranks):
    xs = [tensors(rank) for rank in range(WORLD)]
    summing = laconic.summing(spec, workers=WORLD, ring=True)
    agreed = summing.agree([summing.probe(x, seed=5) for x in xs])
    total = homomorphic.add(*(summing.encode(x, agreed, seed=5, worker=rank) for rank, x in enumerate(xs)))
    if isinstance(summing.chain.values, laconic.codecs.packed_ints.PackedIntStage):
        assert laws.same_bits(laconic.decode(total), ranks[0][f"mean {spec}"])
        assert homomorphic.count(total) == WORLD
    else:
        torch.testing.assert_close(laconic.decode(total), ranks[0][f"mean {spec}"], rtol=1e-4, atol=1e-5)


def test_means_are_close(ranks):
    xs = [tensors(rank) for rank in range(WORLD)]
    mean = sum(xs) / WORLD
    for name, bound in (("mean shared:8", 0.05), ("mean union", 1e-6), ("mean thc:4", 0.45)):
        assert float((ranks[0][name] - mean).norm() / mean.norm()) < bound, name
    pair = sum(xs[2:]) / 2
    assert float((ranks[3]["pair"] - pair).norm() / pair.norm()) < 0.05
    assert float((ranks[3]["alone"] - xs[0]).norm() / xs[0].norm()) < 0.02
    for dtype in laws.DTYPES:
        wanted = sum(x[::2].t().double() for x in xs) / WORLD
        assert float((ranks[0][f"dtype {dtype}"].double() - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize("carry", [False, True])
def test_rounds_of_which_one_is_lost(carry, ranks):
    from laconic.kernels.reference import packed_ints

    for rank in ranks:
        assert rank[f"zero {carry}"] and rank[f"skipped {carry}"] == 2 and rank[f"resumed {carry}"]
    left = sum(rank[f"residual {carry}"] for rank in ranks).view(-1, 1024) / WORLD
    back = packed_ints.hadamard(left * 2.0**-5).view(-1) * packed_ints.rotation_signs(left.numel(), 0, left.device)
    came = sum(rank[f"came {carry}"] for rank in ranks) / WORLD
    assert float((ranks[0][f"went {carry}"] + back[:3000].view(60, 50) - came).abs().max()) < 1e-4


def test_parts_are_as_good_as_the_whole(ranks):
    found = {name: rank[name] for rank in ranks for name in rank if name.startswith("parts")}
    assert len(found) == 8 and all(found.values()), found


def test_without_a_group_it_says_so():
    with pytest.raises(laconic.ConfigError, match="init_process_group"):
        collective.allreduce(torch.ones(3), "shared:8")


def test_packets_of_a_ring_are_ordinary_frames():
    summing = laconic.summing("thc:4", workers=3, ring=True)
    x = tensors(0)
    frame = summing.encode(x, summing.probe(x))
    assert wire.unpack(frame).codec == "thc:4" and laconic.decode(frame).shape == x.shape
