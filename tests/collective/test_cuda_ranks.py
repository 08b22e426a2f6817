"""Gradients on a GPU: compressed there, and exchanged by gloo through the host or by NCCL.

NCCL needs a GPU for each rank, so a machine with one GPU can test one rank of it; with gloo several ranks share a GPU.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import counters
from laconic.collective.exchange import Exchange
from laconic.collective.reductions import device_replay
from laconic.collective.reductions.device_replay import record_exchanges
from laconic.residual_storage import ResidualStorage
from ranks import batches, network, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SPECS = ["none", "qsgd:4", "ef|qsgd:4", "ef|thc:4", "shared:8", "ef|sign", "ef|topk:0.1|qsgd:4", "ef|powersgd:2"]


def train_steps(model, optimizer, rank, steps):
    """Return the loss of each step."""
    losses = []
    for x, y in batches(rank, steps):
        loss = cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(spec, backend, rank, world, steps=300):
    group = dist.new_group(backend=backend)
    model = DistributedDataParallel(network().cuda(), process_group=group)
    attachment = laconic.attach(model, spec, policy=laconic.Policy(min_numel=0, exempt_1d=False))
    losses = train_steps(model, torch.optim.SGD(model.parameters(), lr=0.3), rank, steps)
    stats = attachment.stats()
    attachment.detach()
    return {
        "losses": losses,
        "parameters": torch.cat([each.detach().flatten().cpu() for each in model.parameters()]),
        "rounds": stats["rounds"],
        "fallbacks": counters.counts().get("reference_kernels", 0),
    }


def learned(losses):
    return sum(losses[-10:]) < 0.9 * sum(losses[:10])


@pytest.mark.parametrize("spec", SPECS)
def test_gloo_ranks_on_one_gpu_learn_the_same_parameters(spec, tmp_path):
    first, second = run_ranks(partial(train, spec, "gloo"), 2, tmp_path)
    assert torch.equal(first["parameters"], second["parameters"])
    assert learned(first["losses"]) and learned(second["losses"])
    assert first["fallbacks"] == 0, "the torch fallback was used instead of kernels"
    assert spec == "none" or first["rounds"] > 0


@pytest.mark.parametrize("spec", SPECS)
def test_nccl_rank_learns(spec, tmp_path):
    (result,) = run_ranks(partial(train, spec, "nccl"), 1, tmp_path)
    assert learned(result["losses"]) and result["fallbacks"] == 0


def train_locally(rank, world, steps=60):
    """Train twice with exchanges beside training, on streams of their own, and once without overlap."""
    results = {}
    for name, options in (
        ("first", {"fragments": 2, "overlap": 3}), ("second", {"fragments": 2, "overlap": 3}), ("waiting", {}),
    ):  # fmt: skip
        model = network().cuda()
        local = laconic.LocalSGD(model, laconic.muon(model), every=6, codec="ef|topk:0.1|sign", **options)
        losses = train_steps(model, local, rank, steps)
        local.finish()
        parameters = torch.cat([each.detach().flatten().cpu() for each in model.parameters()])
        results[name] = {"losses": losses, "parameters": parameters, "stats": local.stats()}
    return results


def test_local_sgd_beside_training_does_not_depend_on_timing(tmp_path):
    ranks = run_ranks(train_locally, 2, tmp_path)
    for result in ranks:
        for name in ("first", "second", "waiting"):
            assert learned(result[name]["losses"]), name
            assert torch.equal(result[name]["parameters"], ranks[0][name]["parameters"]), name
        assert torch.equal(result["first"]["parameters"], result["second"]["parameters"])
        # Of both fragments in 60 steps, and finish exchanges the first one again, which is three steps old by then.
        assert result["first"]["stats"]["exchanges"] == 21 and result["waiting"]["stats"]["exchanges"] == 10


DEVICE_SPECS = [
    "ef|thc:4", "ef|topk:0.05|qsgd:4", "ef|powersgd:2", "ef|qsgd:4", "ef|sign", "ef|topk:0.05", "qsgd:4", "bf16",
    "shared:8",
]  # fmt: skip


@pytest.fixture
def nccl_rank():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["launched", "recorded"])
def _recording(request):
    record_exchanges(request.param == "recorded")
    yield
    record_exchanges()


@contextmanager
def forbidden_waits():
    """Let torch raise where the host would wait for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, says torch
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_recording")
@pytest.mark.parametrize("spec", DEVICE_SPECS)
def test_exchange_gives_the_means_of_the_cpu(spec, nccl_rank):
    """Rounds are launched, or after the first ones replayed; all have the bits of a CPU, and the host never waits."""
    means_agree(spec, None)


KEPT = {
    "bf16": ResidualStorage(torch.bfloat16),
    "pinned": ResidualStorage(torch.float32, torch.device("cpu")),
    "bf16, pinned": ResidualStorage(torch.bfloat16, torch.device("cpu")),
}


@pytest.mark.usefixtures("_recording")
@pytest.mark.parametrize("storage", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("spec", ["ef|thc:4", "ef:0.9|topk:0.05|qsgd:4", "ef|powersgd:2", "ef|qsgd:4"])
def test_residuals_kept_otherwise_are_those_of_the_cpu(spec, storage, nccl_rank):
    on_gpu, on_cpu = means_agree(spec, storage)
    state, expected = on_gpu.state_dict(), on_cpu.state_dict()
    for key, x in state.items():
        assert x.dtype == expected[key].dtype and torch.equal(x.cpu(), expected[key]), key
    for reduction in on_gpu._reductions.values():
        for memory in reduction.memories.values():
            for each in memory._memories.values():
                assert each.residual.dtype == storage.dtype and each.residual.is_cuda == (storage.device is None)


@pytest.mark.parametrize("storage", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("spec", ["ef|qsgd:4", "ef|topk:0.05|qsgd:4|rans", "momentum:0.9|topk:0.05"])
def test_channel_keeps_residuals_otherwise_on_a_gpu(spec, storage):
    on_gpu, on_cpu = (
        laconic.channel(spec, residual_dtype=storage.dtype, residual_device=storage.device) for _ in range(2)
    )
    for step in range(4):
        x = torch.randn(64, 300, generator=torch.Generator().manual_seed(step))
        assert on_gpu.encode("w", x.cuda(), seed=step) == on_cpu.encode("w", x, seed=step)
    assert torch.equal(on_gpu.residual("w").cpu(), on_cpu.residual("w"))
    assert on_gpu.stored("w").is_pinned() == (storage.device is not None)


def means_agree(spec, storage):
    """Assert that means of a GPU have the bits of a CPU's; return both exchanges."""
    on_gpu, on_cpu = (Exchange(spec, group, storage=storage) for group in (None, dist.new_group(backend="gloo")))
    assert on_gpu.stays_on(torch.device("cuda", 0), [spec])
    shapes = {"a": (300, 70), "b": (64, 2048), "c": (513, 100), "small": (33,)}
    tensors = [(name, torch.zeros(shape, device="cuda")) for name, shape in shapes.items()]
    stream = torch.cuda.Stream()
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        given = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
        if step == 4:
            given[0][1][5, 5] = float("inf")
        for (_, x), (_, y) in zip(tensors, given, strict=True):
            x.copy_(y)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), forbidden_waits() if step in (1, 3, 5) else nullcontext():
            on_gpu.mean(tensors)
        torch.cuda.synchronize()
        on_cpu.mean(given)
        for (name, x), (_, y) in zip(tensors, given, strict=True):
            assert torch.equal(x.cpu().nan_to_num(7.0), y.nan_to_num(7.0)), (step, name)
    on_gpu.settle()
    assert on_gpu.stats.skipped_nonfinite == on_cpu.stats.skipped_nonfinite == 1
    assert counters.counts().get("unrecorded_exchanges", 0) == 0
    return on_gpu, on_cpu


def train_attached(spec, steps, *, replaced=None):
    """Return the gradients of a few attached steps of a network with dropout, and the losses."""
    torch.manual_seed(7)
    layers = torch.nn.Linear(64, 300), torch.nn.Dropout(0.2), torch.nn.Linear(300, 128), torch.nn.Linear(128, 10)
    network = torch.nn.Sequential(*layers)
    model = DistributedDataParallel(network.cuda(), bucket_cap_mb=0.1)
    attachment = laconic.attach(model, "none")
    found = []
    for each in [spec] if replaced is None else [replaced, spec]:
        attachment.set(each)
        for step in range(steps):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda()
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            found += [loss.item(), *(p.grad.detach().cpu().clone() for p in model.parameters())]
        gc.collect()  # the graphs of a codec that was replaced are gone before the next ones are recorded
    attachment.detach()
    return found


@pytest.mark.parametrize("spec", ["ef|qsgd:4", "ef|thc:4", "ef|powersgd:2", "ef|topk:0.05"])
def test_recorded_steps_have_the_gradients_of_launched_ones(spec, nccl_rank):
    results = []
    for recorded in (False, True):
        record_exchanges(recorded)
        results.append(train_attached(spec, 6, replaced="qsgd:8"))
    record_exchanges()
    assert counters.counts().get("unrecorded_exchanges", 0) == 0
    for launched, recorded in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(launched), torch.as_tensor(recorded))


def test_what_follows_backward_waits_for_exchanges_that_were_only_launched(nccl_rank, monkeypatch):
    expected, prepare, slowed = train_attached("qsgd:4", 6), Exchange.prepare, []

    def prepare_slowly(exchange, groups):
        launch = prepare(exchange, groups)

        def launch_slowly():
            torch.cuda._sleep(20_000_000)  # some 10 ms
            slowed.append(launch)
            launch()

        return launch_slowly

    monkeypatch.setattr(Exchange, "prepare", prepare_slowly)
    slow = train_attached("qsgd:4", 6)
    assert len(slowed) >= 6  # two buckets, from the second or third step on
    for x, y in zip(expected, slow, strict=True):
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(y))


def test_work_that_cannot_be_recorded_is_launched_and_torch_stays_usable(nccl_rank):
    ran, waits = [], torch.zeros(1, device="cuda")
    stream, before = torch.cuda.Stream(), counters.counts().get("unrecorded_exchanges", 0)

    def work():
        ran.append(float(waits + 1))  # waits for the GPU, which a graph cannot hold

    replay = device_replay.Replay(work, torch.device("cuda", 0))
    with torch.cuda.stream(stream):
        for _ in range(5):
            replay()
    assert ran == [1.0] * 5 and counters.counts()["unrecorded_exchanges"] == before + 1
    torch.nn.functional.dropout(torch.ones(100, device="cuda"))  # the generator is not left in the recording
    again = device_replay.Replay(lambda: waits.add_(1), torch.device("cuda", 0))
    with torch.cuda.stream(stream):
        for _ in range(5):
            again()
    assert float(waits) == 5  # recorded or, where torch refuses that from now on, launched
