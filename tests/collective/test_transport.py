"""Small all-reduces go from each rank to each other, and first messages of a known length come in one piece."""

import pytest
import torch
import torch.distributed as dist

from laconic.collective.exchange import Exchange
from laconic.collective.stats import ExchangeStats
from laconic.collective.transport import Transport, all_reduce
from ranks import failures, run_ranks

LARGE = (1 << 20) // 4 + 1
"""Values of float32 that two ranks add by a ring."""


def own_values(rank, dtype, shape=(3, 5)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul_(100)
    return x.to(dtype)


def reductions(rank, world):
    results = {}
    everybody = range(world)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64):
        x, values = own_values(rank, dtype), [own_values(one, dtype) for one in everybody]
        stats = ExchangeStats()
        all_reduce(x, None, stats).wait()
        total = values[0].clone()
        for other in values[1:]:
            total += other
        results[f"sum {dtype}"] = torch.equal(x, total)
        results[f"bytes {dtype}"] = stats.bytes_sent == stats.bytes_received == (world - 1) * x.nbytes
        results[f"no ring {dtype}"] = stats.bytes_reduced == 0
        x = own_values(rank, dtype)
        all_reduce(x, None, ExchangeStats(), dist.ReduceOp.MAX).wait()
        results[f"maximum {dtype}"] = torch.equal(x, torch.stack(values).amax(0))
    bits = torch.tensor([1 << rank, 255 if rank == 0 else 0], dtype=torch.uint8)
    all_reduce(bits, None, ExchangeStats(), dist.ReduceOp.BOR).wait()
    results["union"] = bits.tolist() == [(1 << world) - 1, 255]

    scattered = own_values(rank, torch.float32, (6, 4)).t()
    all_reduce(scattered, None, ExchangeStats()).wait()
    total = sum(own_values(one, torch.float32, (6, 4)) for one in everybody).t()
    results["strides"] = torch.allclose(scattered, total, rtol=1e-5)

    pending = [all_reduce(torch.full((4,), float(rank + step)), None, ExchangeStats()) for step in range(3)]
    for work in reversed(pending):
        work.wait()
    results["several under way"] = [work._x[0].item() for work in pending] == [
        sum(range(step, step + world)) for step in range(3)
    ]

    ours, torchs, stats = (
        own_values(rank, torch.float32, (1000,)),
        own_values(rank, torch.float32, (1000,)),
        ExchangeStats(),
    )
    all_reduce(ours, None, stats, as_torch=True).wait()
    dist.all_reduce(torchs)
    results["bits of torch"] = torch.equal(ours, torchs) and (stats.bytes_sent, stats.bytes_reduced) == (0, 4000)

    large, stats = torch.ones(LARGE), ExchangeStats()
    all_reduce(large, None, stats).wait()
    results["large"] = bool((large == world).all()) and (stats.bytes_sent, stats.bytes_reduced) == (0, 4 * LARGE)

    nan = torch.tensor([float("nan") if rank == 1 else 1.0])
    all_reduce(nan, None, ExchangeStats(), dist.ReduceOp.MAX).wait()
    results["not a number"] = bool(nan.isnan())
    return results


def everything(rank, world):
    return reductions(rank, world) | first_messages(rank, world)


def first_messages(rank, world):
    """Count the pieces in which the first messages of a codec leave a rank."""
    results = {}
    for spec, fixed in (("ef|sign", True), ("qsgd:4", True), ("topk:0.1", False), ("adaptive:5.0|huffman", False)):
        exchange, pieces = Exchange(spec), []
        start = Transport.start

        def counted(transport, sending, receiving, tag, pieces=pieces, start=start):
            pieces.extend(sending)
            return start(transport, sending, receiving, tag)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Transport, "start", counted)
            exchange.mean([("w", torch.randn(128, 64))])
        rounds = 2 * (world - 1)
        results[f"first messages {spec}"] = len(pieces) == rounds if fixed else rounds < len(pieces) <= 2 * rounds
    return results


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request, tmp_path_factory):
    return run_ranks(everything, request.param, tmp_path_factory.mktemp("transport"))


@pytest.mark.parametrize(
    "result", ["sum", "bytes", "no ring", "maximum", "union", "strides", "several", "bits of torch", "large", "not a"]
)  # fmt: skip
def test_all_reduce(ranks, result):
    assert not failures(ranks, result)


def test_first_messages_of_a_fixed_size_come_in_one_piece(ranks):
    assert not failures(ranks, "first messages")
