"""Codec collectives over gloo, threaded and fake groups: results, equal bits, counted bytes, refused arguments."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from operation_values import COMPRESS_ALL, FLOATS, SPECS, relative_error, values

import laconic
from laconic import collective
from laconic.collective import Collectives
from laconic.collective.reductions.two_shot import PART_BY_DEVICE
from laconic.collective.transport import ALL_GATHER, REDUCE_SCATTER
from ranks import failures, run_fake, run_ranks, run_threads

SIZES = (1, 7, 256, 3000)


def same_on_all_ranks(x: torch.Tensor) -> bool:
    return not collective.differing({"x": x})


def results_within_error(rank, world):
    """Compare reduce_scatter and all_gather by each codec, size and dtype with exact results."""
    results = {}
    for spec, limit in SPECS.items():
        collectives = Collectives(spec, policy=COMPRESS_ALL)
        for n in SIZES:
            inputs = [values(r, world * n, seed=n) for r in range(world)]
            total = torch.stack(inputs).sum(0)
            for op in ("mean", "sum"):
                output, given = torch.empty(n), inputs[rank].clone()
                collectives.reduce_scatter([(f"w{n}", output, given)], op=op)
                expected = total.chunk(world)[rank] / (world if op == "mean" else 1)
                results[f"near {spec} {n} {op}"] = relative_error(output, expected) <= limit
                results[f"near {spec} {n} {op} input"] = torch.equal(given, inputs[rank])
            gathered = torch.empty(world * n)
            shards = [values(r, n, seed=n) for r in range(world)]
            collectives.all_gather([(f"w{n}", gathered, shards[rank])])
            results[f"near {spec} {n} gather"] = relative_error(gathered, torch.cat(shards)) <= limit
            results[f"same {spec} {n} gather"] = same_on_all_ranks(gathered)
            reduced = inputs[rank].clone()
            collectives.all_reduce([(f"w{n}", reduced)], op="sum")
            results[f"near {spec} {n} reduce"] = relative_error(reduced, total) <= 2 * limit
            results[f"same {spec} {n} reduce"] = same_on_all_ranks(reduced)
    return results


def dtypes_and_shapes(rank, world):
    results = {}
    for dtype in FLOATS:
        inputs = [values(r, world, 6, 50, dtype=dtype) for r in range(world)]
        total = torch.stack([x.to(torch.float64) for x in inputs]).sum(0)
        collectives = Collectives("qsgd:8", policy=COMPRESS_ALL)
        output = torch.empty(6, 50, dtype=dtype)
        collectives.reduce_scatter([("w", output, inputs[rank])], op="sum")
        results[f"shape {dtype} stacked"] = relative_error(output, total[rank]) < 0.03
        joined = torch.empty(world * 6, 50, dtype=dtype)
        collectives.all_gather([("w", joined, inputs[rank][0])])
        expected = torch.cat([x[0] for x in inputs])
        results[f"shape {dtype} gathered"] = relative_error(joined, expected) < 0.03 and same_on_all_ranks(joined)
        # FSDP's flat buffer: shards of several parameters side by side, for each rank one behind the other.
        flat = torch.cat([x.reshape(world, -1) for x in (inputs[rank], inputs[rank][:, :2])], dim=1)
        views = flat[:, :300].view(world, 6, 50), flat[:, 300:].view(world, 2, 50)
        outputs = torch.empty(6, 50, dtype=dtype), torch.empty(2, 50, dtype=dtype)
        collectives.reduce_scatter([("a", outputs[0], views[0]), ("b", outputs[1], views[1])], op="sum")
        near = [relative_error(x, total[rank][: len(x)]) < 0.03 for x in outputs]
        results[f"shape {dtype} flat buffer"] = all(near)
        own = flat.clone()  # in place, as FSDP gathers: the input is a view of the output
        collectives.all_gather([("c", own, own[rank])])
        results[f"shape {dtype} in place"] = same_on_all_ranks(own) and relative_error(own[rank], flat[rank]) < 0.03
    empty = torch.empty(0)
    Collectives("qsgd:4").reduce_scatter([("w", empty, torch.empty(0))])
    Collectives("qsgd:4").all_gather([("w", torch.empty(0, 3), torch.empty(0, 3))])
    return results | {"shape empty": True}


def equal_to_torch(rank, world):
    """Compare ``none`` with torch's own collectives, bit for bit."""
    results = {}
    for dtype in FLOATS:
        x = values(rank, world * 1001, dtype=dtype)
        expected, output = torch.empty(1001, dtype=dtype), torch.empty(1001, dtype=dtype)
        getattr(dist, REDUCE_SCATTER)(expected, x.clone())
        collective.reduce_scatter(output, x, "none", op="sum")
        results[f"none {dtype} reduce_scatter"] = torch.equal(output, expected)
        halves = [torch.empty(500, dtype=dtype), torch.empty(501, dtype=dtype)]
        rows = x.view(world, -1)
        pairs = [("a", halves[0], rows[:, :500]), ("b", halves[1], rows[:, 500:])]
        Collectives("none").reduce_scatter(pairs, op="sum")
        results[f"none {dtype} reduce_scatter in two"] = torch.equal(torch.cat(halves), expected)
        Collectives("none").reduce_scatter(pairs)
        results[f"none {dtype} reduce_scatter mean"] = torch.equal(torch.cat(halves), expected / world)
        gathered, everything = torch.empty(world, 1001, dtype=dtype), torch.empty(world * 1001, dtype=dtype)
        getattr(dist, ALL_GATHER)(everything, x[:1001].clone())
        collective.all_gather(gathered, x[:1001], "none")
        results[f"none {dtype} all_gather"] = torch.equal(gathered.view(-1), everything)
        total, reduced = x.clone(), x.clone()
        dist.all_reduce(total)
        collective.all_reduce(reduced, "none", op="sum")
        results[f"none {dtype} all_reduce"] = torch.equal(reduced, total)
    return results


def asynchronous(rank, world):
    """Start several operations at once, wait in another order, and compare with the synchronous ones."""
    results = {}
    inputs = [values(rank, world * 5000, seed=i) for i in range(4)]
    expected, collectives = [], Collectives("ef|topk:0.1", policy=COMPRESS_ALL)
    for i, x in enumerate(inputs):
        output = torch.empty(5000)
        collectives.reduce_scatter([(f"w{i}", output, x)])
        gathered = torch.empty(world * 5000)
        collectives.all_gather([(f"w{i}", gathered, output)])
        expected += [output, gathered]
    outputs, works, collectives = [], [], Collectives("ef|topk:0.1", policy=COMPRESS_ALL)
    for i, x in enumerate(inputs):
        outputs += [torch.empty(5000), torch.empty(world * 5000)]
        works.append(collectives.reduce_scatter([(f"w{i}", outputs[-2], x)], async_op=True))
        works.append(collectives.all_gather([(f"w{i}", outputs[-1], outputs[-2])], async_op=True))
    future = works[-1].get_future()
    results["async wait"] = all(work.wait() for work in reversed(works))
    results["async completed"] = all(work.is_completed() and work.is_success() for work in works)
    results["async future"] = future.wait()[0].data_ptr() == outputs[-1].data_ptr()
    results["async same"] = all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=True))
    y = values(rank, 600)
    collectives.all_reduce([("y", y)])  # after asynchronous ones: on the same thread
    results["async then synchronous"] = same_on_all_ranks(y)
    collectives.close()
    return results


def not_finite(rank, world):
    results = {}
    for mode in ("spread", "skip", "raise"):
        collectives = Collectives("qsgd:4", policy=COMPRESS_ALL, nonfinite=mode)
        for bad in range(world):  # the sender's own shard, and a shard of another rank
            x, output = torch.ones(world * 300), torch.zeros(300)
            if rank == 1 % world:
                x[300 * bad + 5] = float("nan")
            if mode == "raise":
                with pytest.raises(laconic.NonFiniteError, match="not finite"):
                    collectives.reduce_scatter([("w", output, x)])
                right = True
            else:
                collectives.reduce_scatter([("w", output, x)])
                left_out = (world - 1) / world if rank == bad else 1.0
                good = mode == "skip" or rank != bad
                close = torch.allclose(output, torch.full((300,), left_out), atol=0.2)
                right = close if good else bool(output.isnan().any())
            results[f"not finite {mode} {bad}"] = right
        shard = torch.full((300,), float("inf") if rank == 0 else 1.0)
        gathered = torch.zeros(world * 300)
        if mode == "raise":
            with pytest.raises(laconic.NonFiniteError, match="not finite"):
                collectives.all_gather([("w", gathered, shard)])
        else:
            collectives.all_gather([("w", gathered, shard)])
            lost = gathered[:300].isnan() if mode == "spread" else gathered[:300] == 0
            results[f"not finite {mode} gather"] = bool(lost.all()) and bool((gathered[300:] > 0.9).all())
        results[f"not finite {mode} counted"] = collectives.stats.skipped_nonfinite > 0 or mode == "skip"
        # The next round is as usual: after ``raise``, too, and on the thread of asynchronous operations.
        work = collectives.all_gather([("w", gathered, torch.ones(300))], async_op=True)
        results[f"not finite {mode} next"] = work.wait() and bool((gathered > 0.9).all())
        if mode == "raise":
            work = collectives.all_gather([("w", gathered, shard)], async_op=True)
            with pytest.raises(laconic.NonFiniteError, match="not finite"):
                work.wait()
            work = collectives.all_gather([("w", gathered, torch.ones(300))], async_op=True)
            results["not finite raise again"] = work.wait() and bool((gathered > 0.9).all())
        collectives.close()
    return results


def memory(rank, world):
    """Residuals conserve what was put in, survive a saved state, and are dropped for another number of ranks."""
    results = {}
    collectives = Collectives("ef|topk:0.05|qsgd:4", policy=COMPRESS_ALL)
    put_in, came_out = torch.zeros(world * 2000), torch.zeros(2000)
    for step in range(8):
        x, output = values(rank, world * 2000, seed=step), torch.empty(2000)
        collectives.reduce_scatter([("w", output, x)], op="sum")
        put_in += x
        came_out += output
        if step == 3:
            restored = Collectives("ef|topk:0.05|qsgd:4", policy=COMPRESS_ALL)
            results["memory kept"] = restored.load_state_dict(collectives.state_dict())
            collectives = restored
    residual = torch.zeros(world * 2000)
    for key, x in collectives.state_dict().items():
        if key.startswith("reduce_scatter/") and key.endswith("/residual"):
            begin, _, end = key.rpartition("[")[2].removesuffix("]/residual").partition(":")
            residual[int(begin) : int(end)] += x
    totals = put_in - residual
    dist.all_reduce(totals)
    results["memory conserved"] = bool((totals.chunk(world)[rank] - came_out).abs().max() < 1e-3)
    state = collectives.state_dict() | {"world": torch.tensor([rank, world + 1])}
    other = Collectives("ef|topk:0.05|qsgd:4", policy=COMPRESS_ALL)
    results["memory of another size dropped"] = not other.load_state_dict(state)
    results["memory rounds kept"] = any(key.endswith("/round") for key in other.state_dict())
    results["memory of another codec dropped"] = not Collectives("ef|sign").load_state_dict(collectives.state_dict())
    # An all-gather with error feedback sends in the end what was left out at first.
    gathered, total = torch.empty(world * 1000), torch.zeros(world * 1000)
    shard = values(rank, 1000)
    for _ in range(60):
        collectives.all_gather([("p", gathered, shard)])
        total += gathered / 60
    everything = torch.empty(world * 1000)
    getattr(dist, ALL_GATHER)(everything, shard)
    results["memory all_gather"] = relative_error(total, everything) < 0.3
    return results


def several_parts(rank, world):
    """Tensors larger than a part are cut; momentum, which also encodes a rank's own shard, gives the same mean."""
    results = {}
    inputs = [values(r, world * 3001) for r in range(world)]
    mean = torch.stack(inputs).mean(0)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0 or dist.get_backend() != "threaded":  # threads share it
            patch.setitem(PART_BY_DEVICE, "cpu", 2048)
        dist.barrier()
        for spec in ("qsgd:8", "momentum:0.5|topk:1.0"):
            collectives = Collectives(spec, policy=COMPRESS_ALL)
            for step in range(2):
                outputs = torch.empty(3001), torch.empty(100)
                small = inputs[rank].view(world, -1)[:, :100]
                collectives.reduce_scatter([("a", outputs[0], inputs[rank]), ("b", outputs[1], small)])
                own = mean.chunk(world)[rank]
                near = relative_error(outputs[0], own) < 0.02 and relative_error(outputs[1], own[:100]) < 0.02
                results[f"parts {spec} {step}"] = near
            if spec == "qsgd:8":
                gathered = torch.empty(world, 3001)
                collectives.all_gather([("a", gathered, outputs[0])])
                results["parts gathered"] = relative_error(gathered.view(-1), mean) < 0.03 and same_on_all_ranks(
                    gathered
                )
        dist.barrier()
    return results


def policies(rank, world):
    collectives = Collectives("qsgd:4", policy={"*.weight": "bf16"})
    bias, weight, matrix = torch.ones(8), torch.ones(64, 64), torch.ones(64, 64)
    pairs = [
        (name, torch.empty_like(x), x.repeat(world, *[1] * (x.dim() - 1)))
        for name, x in (("bias", bias), ("a.weight", weight), ("matrix", matrix))
    ]
    collectives.reduce_scatter(pairs)
    exempt = {name: reason.partition(":")[0] for name, reason in collectives.exempt.items()}
    return {
        "policy exempt": exempt == {"bias": "none", "a.weight": "bf16"},
        "policy results": all(torch.allclose(output, torch.ones(()), atol=0.2) for _, output, _ in pairs),
        "policy exact bytes": collectives.stats.bytes_scattered == 4 * 8 * world,
    }


def refused(rank, world):
    results = {}
    for spec, problem in ((f"qsgd:{4 + rank % 2}", "codec here"), ("none" if rank else "qsgd:4", "codec here")):
        with pytest.raises(laconic.ConfigError, match="different arguments") as raised:
            Collectives(spec)
        results[f"refused {problem} {spec[:4]}"] = problem in str(raised.value)
    collectives = Collectives("qsgd:4")
    for call, error, text in (
        (lambda: collectives.reduce_scatter([("w", torch.empty(3), torch.empty(4))]), laconic.InputError, "'w'.*shape"),
        (lambda: collectives.all_gather([("w", torch.empty(3), torch.empty(4))]), laconic.InputError, "'w'.*shape"),
        (
            lambda: collectives.all_gather([("w", torch.empty(world * 3), torch.empty(3).half())]),
            laconic.InputError, "one dtype",
        ),
        (
            lambda: collectives.all_reduce([("w", torch.ones(5, dtype=torch.int32))]),
            laconic.InputError, "float tensor, got int32",
        ),
        (lambda: collectives.all_reduce([("w", torch.ones(5))], op="max"), laconic.ConfigError, "op must be"),
        (lambda: collective.all_reduce(torch.ones(5), "ef|sign"), laconic.ConfigError, "keeps memory"),
        (lambda: Collectives("qsgd:4", nonfinite="no"), laconic.ConfigError, "nonfinite"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    for method, spec, text in (
        ("reduce_scatter", "powersgd:2", "whole matrices"), ("all_gather", "momentum:0.9|topk:0.1", "momentum"),
    ):  # fmt: skip
        large, small = torch.ones(world * 64, 64), torch.ones(64, 64)
        pair = ("w", small, large) if method == "reduce_scatter" else ("w", large, small)
        with pytest.raises(laconic.ConfigError, match=text):
            getattr(Collectives(spec), method)([pair])
    return results | {"refused all": True}


HANDED_OVER: dict[tuple[int, str], int] = {}
"""Bytes handed to torch, by thread (each rank of a threaded group has its own) and kind of collective."""


def add_handed_over(kind: str, x: torch.Tensor) -> None:
    key = threading.get_ident(), kind
    HANDED_OVER[key] = HANDED_OVER.get(key, 0) + x.numel() * x.element_size()


def count_calls(patch: pytest.MonkeyPatch) -> None:
    def counting(name: str, count) -> None:
        original = getattr(dist, name)

        def counted(*args, **options):
            count(*args)
            return original(*args, **options)

        patch.setattr(dist, name, counted)

    def count_sends(operations) -> None:
        for operation in operations:
            if operation.op is dist.isend:
                add_handed_over("send", operation.tensor)

    counting("all_reduce", lambda x, *_: add_handed_over("all_reduce", x))
    counting(REDUCE_SCATTER, lambda output, x, *_: add_handed_over("reduce_scatter", x))
    counting(ALL_GATHER, lambda output, x, *_: add_handed_over("all_gather", x))
    counting("all_to_all_single", lambda output, x, *_: add_handed_over("send", x))
    counting("batch_isend_irecv", count_sends)


def counted_bytes(rank, world):
    """Compare stats with the bytes handed to torch, by kind of collective."""
    collectives = Collectives("ef|qsgd:4")
    sent, reduced = collectives.stats.bytes_sent, collectives.stats.bytes_reduced  # settings were compared
    with pytest.MonkeyPatch.context() as patch:
        dist.barrier()
        if rank == 0 or dist.get_backend() != "threaded":
            count_calls(patch)
        dist.barrier()
        for step in range(3):
            matrix, bias = values(rank, world * 64, 80, seed=step), values(rank, world * 5, seed=step)
            collectives.reduce_scatter([("m", torch.empty(64, 80), matrix), ("b", torch.empty(5), bias)])
            collectives.all_gather([("m", matrix, torch.ones(64, 80)), ("b", bias, torch.ones(5))])
            collectives.all_reduce([("m", matrix), ("b", bias)])
        dist.barrier()
    stats, own = collectives.stats, threading.get_ident()
    counted = {
        "send": stats.bytes_sent - sent, "all_reduce": stats.bytes_reduced - reduced,
        "reduce_scatter": stats.bytes_scattered, "all_gather": stats.bytes_gathered,
    }  # fmt: skip
    dense = 3 * 4 * 64 * 80 * (world - 1) * 4  # a reduce-scatter and an all-gather; and both for the all-reduce
    return {
        "bytes counted": counted == {kind: HANDED_OVER.get((own, kind), 0) for kind in counted},
        "bytes compressed": 0 < stats.bytes_sent < dense / 6,
        "bytes in all": stats.wire_bytes == sum(counted.values()) + sent + reduced,
    }


def battery(rank, world):
    parts = (
        results_within_error, dtypes_and_shapes, equal_to_torch, asynchronous, not_finite, memory, several_parts,
        policies, refused, counted_bytes,
    )  # fmt: skip
    return {name: result for part in parts for name, result in part(rank, world).items()}


@pytest.fixture(scope="module", params=["gloo", "threaded"])
def ranks(request, tmp_path_factory):
    if request.param == "gloo":
        return run_ranks(battery, 3, tmp_path_factory.mktemp("operations"))
    return run_threads(battery, 3)


@pytest.mark.parametrize(
    "what", ["near", "same", "shape", "none", "async", "not finite", "memory", "parts", "policy", "refused", "bytes"]
)
def test_collectives(what, ranks):
    assert not failures(ranks, what)


def fake_operations(rank, world):
    collectives = Collectives("ef|qsgd:4", policy=COMPRESS_ALL)
    x, output = values(rank, world * 3000), torch.empty(3000)
    work = collectives.reduce_scatter([("w", output, x)], async_op=True)
    results = {"fake reduce_scatter": work.wait() and torch.allclose(output, x[:3000] / world)}
    gathered = torch.zeros(world * 3000)
    collectives.all_gather([("w", gathered, x[:3000])])
    results["fake all_gather"] = relative_error(gathered[:3000], x[:3000]) < 0.6 and not gathered[3000:].any()
    collectives.all_reduce([("w", x)])
    sent = collectives.stats.bytes_sent
    # Each of four rounds sends world - 1 shards of 3,000 values, at 4 bits and a scale for each bucket.
    return results | {"fake bytes": 4 * (world - 1) * 1500 < sent < 4 * (world - 1) * 1800}


def test_fake_group_counts_bytes_and_receives_nothing():
    assert not failures(run_fake(fake_operations, 4), "fake")


def unregistered(rank, world):
    """Use a group that torch.distributed does not know, as torchft makes them."""
    store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroup(store, rank, world)
    from datetime import timedelta

    backend = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=30))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    results = {}
    for spec in ("qsgd:8", "thc:8", "none"):
        collectives = Collectives(spec, group, policy=COMPRESS_ALL)
        x = values(rank, 600)
        total = torch.stack([values(r, 600) for r in range(world)]).sum(0)
        y = x.clone()
        collectives.all_reduce([("w", y)], op="sum")
        results[f"unregistered {spec}"] = relative_error(y, total) < 0.05
        output, gathered = torch.empty(600 // world), torch.empty(600)
        collectives.reduce_scatter([("w", output, x)], op="sum")
        collectives.all_gather([("w", gathered, output)])
        results[f"unregistered {spec} both"] = relative_error(gathered, total) < 0.05
    return results


def test_group_that_torch_distributed_does_not_know(tmp_path):
    assert not failures(run_ranks(unregistered, 2, tmp_path), "unregistered")


def test_collectives_need_a_process_group():
    with pytest.raises(laconic.ConfigError, match="init_process_group"):
        Collectives("qsgd:4")
