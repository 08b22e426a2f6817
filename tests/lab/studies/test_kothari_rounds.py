"""Computed exchanges equal those of a server and its workers, bit for bit and byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from steppers import host_transfers_forbidden

from laconic.channels import Channel
from laconic.cluster.core import Core
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job
from laconic.errors import ConfigError
from laconic.frames import decode
from laconic.kernels import random
from laconic.optim import SGD, Schedule
from laconic.policy import Policy
from laconic.train import Shards, build_task
from laconic.train.in_process import run_in_threads
from laconic.train.methods import METHODS, method_options
from laconic.train.worker import Worker
from laconic_lab.studies.kothari2021.computed import ComputedChannel, in_order, rounding_keys
from laconic_lab.studies.kothari2021.rounds import FrameRounds, server_seed, server_seeds, worker_seed, worker_seeds

BATCH, RATE = 16, Schedule(0.05)


def run_with_server(job: Job, exchanges: int) -> tuple[Core, list[Worker]]:
    """Run a job with the server's core and real workers as threads."""
    first = build_task("lenet5", "digits", seed=job.seed)
    parameters = {name: p.detach().clone() for name, p in first.model.named_parameters()}
    optimizer = SGD(momentum=job.momentum, weight_decay=job.weight_decay)
    core = Core(job, parameters, optimizer, RATE, exchanges=exchanges)
    workers = []
    for number in range(job.workers):
        task = build_task("lenet5", "digits", seed=job.seed)
        shards = Shards(task.num_train, job.workers, BATCH, job.seed)
        workers.append(Worker(number, task, shards, job, RATE, InProcessConnection(core, number)))
    assert not run_in_threads(workers, exchanges)
    return core, workers


AS_WRITTEN = {"push": "none", "pull": "none", "sends": "weights", "returns": "weights"}
"""Changes of method 6: the weights of the best worker replace all others."""
DECAYS = [*((name, 1e-4) for name in METHODS if name != "homomorphic"), ("1", 0.0), ("6 as written", 0.0)]


@pytest.mark.parametrize("method, decay", DECAYS)
def test_rounds_in_one_process_equal_those_of_a_server(method: str, decay: float) -> None:
    options = method_options(method.partition(" ")[0]) | (AS_WRITTEN if " " in method else {})
    job = Job(lr=0.05, weight_decay=decay, seed=3, **options)
    exchanges = 4 if job.every == 1 else 2
    core, workers = run_with_server(job, exchanges)
    tasks = [build_task("lenet5", "digits", seed=3) for _ in range(2)]
    rounds = FrameRounds(job, tasks, Shards(tasks[0].num_train, 2, BATCH, 3), RATE)
    for _ in range(exchanges):
        rounds.exchange()
    for name, x in core.parameters.items():
        assert rounds.server[name].equal(x), name
        for mine, theirs in zip(rounds.workers, workers, strict=True):
            assert mine[name].equal(theirs.parameters[name]), name
    assert rounds.bytes_sent == sum(worker.bytes_sent for worker in workers)
    assert rounds.bytes_received == sum(worker.bytes_received for worker in workers)


SLOTS = {"a": (96, 100), "bias": (33,), "c": (64, 80), "scalar": (5, 7), "large": (300, 211), "b": (10,)}

CHANNELS = [
    ("none", "none"), ("qsgd:4,norm=l2", "none"), ("topk:0.01|qsgd:4,norm=l2", "bf16"),
    ("qsgd:4,bucket=0,norm=l2", "qsgd:3,bucket=0"),
    ("momentum:0.9|topk:0.005|qsgd:4|rans:auto", "momentum:0.9|bf16"),
    ("momentum:0.9,nesterov=true|topk:0.005|qsgd:3,round=nearest|rans:auto", "momentum:0.9|qsgd:8"),
    ("ef|topk:0.01|qsgd:4,round=nearest|huffman", "ef|qsgd:4,round=nearest"),
    ("momentum:0.9|topk:0.01|sign", "momentum:0.9|none"), ("ef|topk:1.0|sign", "none"), ("ef:0.9|bf16", "ef|sign"),
]  # fmt: skip


@pytest.mark.parametrize("spec, small", CHANNELS)
def test_computed_values_sizes_and_memories_equal_those_of_frames(spec: str, small: str) -> None:
    policy = Policy(small=small)
    names = in_order(SLOTS, policy)
    assert names == ["a", "c", "large", "bias", "scalar", "b"]
    computed = ComputedChannel({n: SLOTS[n] for n in names}, spec, policy, torch.device("cpu"), ring=3)
    channel = Channel(spec, policy=policy)
    generator = torch.Generator().manual_seed(1)
    for r in range(3):
        x = {name: torch.randn(SLOTS[name], generator=generator) for name in names}
        if r == 0:
            x["c"].zero_()  # a header alone
        if r == 2:
            x["a"].round_()  # equal magnitudes
        seeds = np.array([(r * 77 + i) * 2**33 + 5 for i in range(len(names))], dtype=np.uint64)
        frames = [channel.encode(n, x[n], seed=int(seed)) for n, seed in zip(names, seeds, strict=True)]
        flat = torch.cat([one.view(-1) for one in x.values()])
        sent = torch.zeros_like(flat)
        for part in computed.send(flat, rounding_keys(seeds), torch.tensor([r])):
            part.add_to(sent, 1.0)
        assert sent.equal(torch.cat([decode(frame).view(-1) for frame in frames]))
        assert computed.nbytes(r + 1)[r] == sum(map(len, frames))
    memories, wanted = computed.memories(names), channel.state_dict()
    assert memories.keys() == wanted.keys() and all(memories[key].equal(wanted[key]) for key in memories)


@pytest.mark.parametrize("spec, small", CHANNELS)
def test_computed_channel_can_be_captured_in_a_cuda_graph(spec: str, small: str) -> None:
    policy = Policy(small=small)
    names = in_order(SLOTS, policy)
    channel = ComputedChannel({name: SLOTS[name] for name in names}, spec, policy, torch.device("cpu"))
    numel = sum(torch.Size(shape).numel() for shape in SLOTS.values())
    x, keys, at = torch.ones(numel), rounding_keys(np.arange(len(names), dtype=np.uint64)), torch.tensor([0])
    with host_transfers_forbidden():
        channel.send(x, keys, at)


@pytest.mark.parametrize("spec", ["randk:0.1", "uniform:8", "topk:0.1", "topk:0.1,approx=true|qsgd:4"])
def test_unsupported_codec_raises_config_error(spec: str) -> None:
    with pytest.raises(ConfigError, match="here"):
        ComputedChannel({"a": (100, 100)}, spec, Policy(), torch.device("cpu"))


def test_vectorised_seeds_equal_single_seeds() -> None:
    job = Job(seed=5, workers=3)
    sequences, slots = np.arange(2, 5, dtype=np.uint64)[:, None], np.arange(4, dtype=np.uint64)[None]
    workers, servers = worker_seeds(job, sequences, 2, slots), server_seeds(job, sequences, slots, 4)
    for i in range(3):
        for slot in range(4):
            assert int(workers[i, slot]) == worker_seed(job, 2 + i, 2, slot)
            assert int(servers[i, slot]) == server_seed(job, 2 + i, slot, 4)
    low, high = rounding_keys(workers)[1, 2].tolist()
    assert high << 32 | low == random.key(int(workers[1, 2]), random.ROUNDING)
