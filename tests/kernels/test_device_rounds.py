"""Means that stay on the device: the bits, residuals and counts of the rounds that go through the host."""

from __future__ import annotations

import cProfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from triton_support import DEVICE, MARKS, no_compile_fallback  # noqa: F401

import laws
import ranks
from laconic import kernels
from laconic.collective.exchange import Exchange, _uses_allreduce
from laconic.collective.reductions import device_replay
from laconic.collective.reductions.allreduce import Reducer
from laconic.collective.reductions.exact import Exact
from laconic.collective.reductions.two_shot import TwoShot
from laconic.residual_storage import ResidualStorage

pytestmark = [*MARKS, pytest.mark.usefixtures("no_compile_fallback")]

SHAPES = {"a": (20, 70), "b": (300,), "c": (110, 10)}
"""With three ranks, ``b`` has no shard for the last of them."""

COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "all_gather_single", "all_reduce")


@contextmanager
def recorded_calls() -> Iterator[dict[int, list[tuple[Any, ...]]]]:
    """Record what each rank hands to ``torch.distributed``: collective, dtypes, sizes and splits, in order.

    All ranks are let in, those that are threads of this process together.
    """
    calls: dict[int, list[tuple[Any, ...]]] = {}

    def recording(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            shown = [(x.dtype, tuple(x.shape)) if isinstance(x, torch.Tensor) else x for x in args]
            calls.setdefault(dist.get_rank(), []).append((name, *shown, str(kwargs.get("op"))))
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reducer, "stays_on", lambda self, device: not self.carry)  # else with NCCL alone
        for name in COLLECTIVES:
            if hasattr(dist, name):
                patch.setattr(dist, name, recording(name, getattr(dist, name)))
        yield calls


def slots(rank: int, step: int) -> list[tuple[str, torch.Tensor]]:
    named = [
        (name, laws.normal(*shape, seed=100 * step + 10 * rank + i)) for i, (name, shape) in enumerate(SHAPES.items())
    ]
    if step == 1 and rank == 1:
        named[0][1].view(-1)[-1] = float("inf")  # in the last rank's shard
    if step == 2:
        named[2][1].zero_()
    return named


def means(reduction: TwoShot | Reducer, rank: int, device: str, steps: int) -> list[torch.Tensor]:
    results = []
    for step in range(steps):
        tensors = [(name, x.to(device)) for name, x in slots(rank, step)]
        reduction.reduce_all(tensors)
        results += [x.cpu() for _, x in tensors]
    reduction.settle()
    return results


def means_in_place(reduction: TwoShot | Reducer, rank: int, steps: int) -> list[torch.Tensor]:
    """Return ``means`` of tensors that stay in place: prepared after the first step, but for vectors of PowerSGD."""
    tensors = [(name, x.to(DEVICE)) for name, x in slots(rank, 0)]
    by_host = (
        [each for each in tensors if each[1].dim() == 1]
        if isinstance(reduction, Reducer) and "powersgd" in reduction.contributor.spec
        else []
    )
    prepared = [each for each in tensors if each[1].dim() > 1] if by_host else tensors
    results, launch = [], None
    for step in range(steps):
        for (_, x), (_, y) in zip(tensors, slots(rank, step), strict=True):
            x.copy_(y)
        if launch is None:
            reduction.reduce_all(tensors)
            launch = reduction.prepare(prepared)
            assert launch is not None and (not by_host or reduction.prepare(tensors) is None)
        else:
            launch()
            if by_host:
                reduction.reduce_all(by_host)
        results += [x.cpu().clone() for _, x in tensors]
    reduction.settle()
    return results


def compare(spec: str, steps: int, storage: ResidualStorage, rank: int, world: int) -> dict[str, Any]:
    """Compare means and residuals of a device with those of the host, for a rank that is a process."""
    with recorded_calls() as calls:
        results = compare_means(spec, steps, storage, calls, rank, world)
    return results | {"calls": calls[rank]}


def compare_means(
    spec: str, steps: int, storage: ResidualStorage, calls: dict[int, list[tuple[Any, ...]]], rank: int, world: int
) -> dict[str, Any]:
    by_sums = _uses_allreduce(spec)
    by_host = Reducer(spec, nonfinite="spread", storage=storage) if by_sums else TwoShot(spec, storage=storage)
    expected = means(by_host, rank, "cpu", steps)
    calls[rank] = []  # those by the host are others
    with kernels.use_backend("triton"):
        on_device: Reducer | TwoShot
        if by_sums:
            on_device = Reducer(spec, nonfinite="spread", storage=storage)
        else:
            on_device = TwoShot(spec, on_device=True, storage=storage)
            assert on_device.stays_on(torch.device(DEVICE))
        device_means = means_in_place(on_device, rank, steps)
    state, expected_state = on_device.state_dict(), by_host.state_dict()
    return {
        "means": all(laws.same_bits(x, y) for x, y in zip(device_means, expected, strict=True)),
        "nan": int(torch.isnan(device_means[3]).sum()),
        "state": sorted(state) == sorted(expected_state)
        and all(torch.equal(state[key].cpu(), expected_state[key]) for key in state),
        "counts": [
            (each.stats.skipped_nonfinite, each.stats.values, each.residual_resets) for each in (on_device, by_host)
        ],
        "bytes": (on_device.stats.wire_bytes, by_host.stats.wire_bytes),
        "dtypes": {x.dtype for memory in on_device.memories.values() for x in memory.state_dict().values()},
    }


ALL = [
    (2, "ef:0.9|qsgd:8,bucket=256"), (2, "ef|thc:4"), (3, "ef|topk:0.05|qsgd:4,bucket=128"), (2, "ef|powersgd:2"),
    (3, "qsgd:4,bucket=128"), (2, "ef|sign:256"), (1, "ef:0.9|qsgd:8,bucket=256"), (2, "ef:0.95|bins:2,bucket=128"),
    (2, "topk:0.1"), (2, "ef|topk:0.1|sign"), (3, "fp16"), (2, "ef|bf16"), (3, "shared:8"), (2, "ef:0.9|powersgd:1"),
]  # fmt: skip
"""PowerSGD adds floats, of at most two ranks: with more, the order of gloo's sums depends on where values are."""


@pytest.mark.parametrize("world, spec", [ALL[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL[1:])])
def test_means_and_residuals_equal_those_by_the_host(world: int, spec: str, tmp_path: Path) -> None:
    agree(ranks.run_ranks(partial(compare, spec, 3, ResidualStorage()), world, tmp_path), world, spec)


SHORT = [
    (2, "ef:0.9|topk:0.05|qsgd:4,bucket=128"), (2, "ef|thc:4"), (2, "ef|powersgd:2"), (3, "ef|sign:256"),
    (2, "ef|bf16"), (1, "ef|qsgd:4,bucket=128"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("world, spec", SHORT)
def test_residuals_in_bfloat16_equal_those_by_the_host(world: int, spec: str, tmp_path: Path) -> None:
    storage = ResidualStorage(torch.bfloat16, torch.device("cpu"))
    results = ranks.run_ranks(partial(compare, spec, 3, storage), world, tmp_path)
    agree(results, world, spec)
    assert all(torch.bfloat16 in result["dtypes"] for result in results)


def agree(results: list[dict[str, Any]], world: int, spec: str) -> None:
    """Means, states, counts and bytes are those by the host, and the calls of all ranks fit together."""
    for result in results:
        assert result["means"] and result["state"]
        assert result["counts"][0] == result["counts"][1]
        assert (result["nan"] > 0) == (world > 1)
        sent, sent_by_host = result["bytes"]
        # Tiny shards make the longest message long, to which others are padded; slots are padded to whole blocks.
        assert sent <= (2.5 if _uses_allreduce(spec) else 1.6) * sent_by_host
    calls_fit(results)


def calls_fit(results: list[dict[str, Any]]) -> None:
    """All ranks call the same collectives in the same order, with the sizes that the others expect.

    One of them holds values that are not finite: what is called does not depend on values, so ranks cannot wait for
    each other for ever.
    """
    for calls in zip(*(result["calls"] for result in results), strict=True):
        names = {call[0] for call in calls}
        assert len(names) == 1, names
        if names == {"all_to_all_single"}:
            for sender, call in enumerate(calls):
                for receiver, other in enumerate(calls):
                    assert call[4][receiver] == other[3][sender]
        else:
            assert len(set(calls)) == 1


def calls_of_prepared_means(spec: str, slots: int, rank: int, world: int) -> dict[str, int]:
    """Return how many Python functions a prepared mean calls beside the work that a CUDA graph would hold."""
    with kernels.use_backend("triton"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_replay.Replay, "__call__", lambda self: None)
        patch.setattr(TwoShot, "_rounds_on", lambda self, device: self._device_rounds)
        exchange = Exchange(spec)
        exchange._reductions[spec] = TwoShot(spec, on_device=True, stats=exchange.stats)
        named = [(f"{i}", laws.normal(8, 16, seed=i).to(DEVICE)) for i in range(slots)]
        launch = exchange.prepare({"none": [("exempt", laws.normal(5, seed=1).to(DEVICE))], spec: named})
        assert launch is not None
        launch()
        profiler = cProfile.Profile()
        profiler.runcall(launch)
        launch()
    return {
        "calls": sum(entry.callcount for entry in profiler.getstats()), "values": exchange.stats.values,
        "round": int(exchange.state_dict()[f"{spec}//0/round"]),
    }  # fmt: skip


def test_prepared_mean_takes_the_host_few_calls(tmp_path: Path) -> None:
    """Each call delays backward: what does not change from step to step is prepared once."""
    (few,) = ranks.run_ranks(partial(calls_of_prepared_means, "ef|qsgd:4", 2), 1, tmp_path)
    (many,) = ranks.run_ranks(partial(calls_of_prepared_means, "ef|qsgd:4", 12), 1, tmp_path)
    assert few["calls"] <= 40 and many["calls"] <= few["calls"] + 5 * 10
    assert many["values"] == 3 * (12 * 128 + 5) and many["round"] == 3


def exact_means(rank: int, world: int) -> list[bool]:
    """Whether gathering and copying back by kernels gives the bits of torch's operations, round by round."""
    named = [(name, x) for name, x in slots(rank, 0)] + [("odd", laws.normal(5, seed=rank))]
    expected = [(name, x.clone()) for name, x in named]
    on_device = [(name, x.to(DEVICE)) for name, x in named]
    by_torch, by_kernels, same = Exact(), Exact(), []
    with kernels.use_backend("triton"):
        launch = by_kernels.prepare(on_device)
    for _ in range(2):
        by_torch.reduce_all(expected)
        with kernels.use_backend("triton"):
            launch()()
        same += [laws.same_bits(x.cpu(), y) for (_, x), (_, y) in zip(on_device, expected, strict=True)]
    same.append(by_kernels.stats.wire_bytes == by_torch.stats.wire_bytes > 0)
    return same


def test_exempt_slots_gathered_by_kernels_have_the_same_means(tmp_path: Path) -> None:
    assert all(all(same) for same in ranks.run_ranks(exact_means, 2, tmp_path))
