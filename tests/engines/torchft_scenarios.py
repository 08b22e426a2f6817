"""Scenarios of test_torchft_engine.py: replicas in threads of this process, with a lighthouse of torchft."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta

import pytest
import torch
import torchft
from torch import nn
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

import laconic
from laconic.torchft import attach

INITIAL = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def network() -> nn.Sequential:
    return deepcopy(INITIAL)


def manager_of(lighthouse: str, number: int, model: nn.Module, *, sync: bool):
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)), min_replica_size=2, replica_id=f"replica{number}",
        state_dict=model.state_dict, load_state_dict=model.load_state_dict, store_addr="localhost",
        store_port=store.port, rank=0, world_size=1, lighthouse_addr=lighthouse, use_async_quorum=not sync,
        quorum_timeout=timedelta(seconds=60), timeout=timedelta(seconds=30), init_sync=False,
    )  # fmt: skip
    manager.store_of_test = store  # lives as long as the manager
    return manager


def in_replicas(function) -> list:
    """Return what the function returns for two replicas, which run beside each other."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=1000)
    try:
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(function, lighthouse.address(), number) for number in range(2)]
            return [future.result(120) for future in futures]
    finally:
        lighthouse.shutdown()


def batch(number: int, step: int) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + number))


def train_locally(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(number, step)).square().mean().backward()
        optimizer.step()


def train_ddp(lighthouse: str, number: int, spec: str | None, steps: int = 6):
    model = network()
    manager = manager_of(lighthouse, number, model, sync=False)
    ddp = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    attachment = None if spec is None else attach(manager, spec, ddp)
    while manager.current_step() < steps:
        optimizer.zero_grad()
        ddp(batch(number, manager.current_step())).square().mean().backward()
        optimizer.step()
    manager.shutdown(wait=False)
    return [p.detach().clone() for p in model.parameters()], attachment


def ddp_gives_equal_replicas_names_slots_and_sends_less():
    (first, attachment), (second, _) = in_replicas(lambda *each: train_ddp(*each, "ef|qsgd:4"))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert set(attachment.unsent()) == {"0.weight", "2.weight"}
    stats = attachment.stats()
    assert set(stats["exempt"]) == {"0.bias", "2.bias"} and stats["committed_steps"] == 6
    assert stats["wire_bytes"] < 0.3 * 6 * 4 * sum(x.numel() for x in first)


def ddp_with_none_has_the_bits_of_plain_torchft():
    (ours, attachment), _ = in_replicas(lambda *each: train_ddp(*each, "none"))
    (plain, _), _ = in_replicas(lambda *each: train_ddp(*each, None))
    assert all(torch.equal(x, y) for x, y in zip(ours, plain, strict=True))
    assert attachment.stats()["uncompressed"] == {"the codec is none": 6}


def diloco_fragments_have_names_of_their_own(bucketized=False):
    def train(lighthouse: str, number: int):
        model = network()
        manager = manager_of(lighthouse, number, model, sync=True)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        fragments = [model[0], model[2]]
        outer = [torch.optim.SGD(each.parameters(), lr=1.0) for each in fragments]
        diloco = DiLoCo(manager, fragments, inner, outer, sync_every=4, use_bucketization=bucketized)
        attachment = attach(manager, "ef|qsgd:4", diloco)
        with diloco:
            train_locally(model, inner, number, 12)
        manager.shutdown(wait=False)
        kept = [dict(each.original_parameters) for each in diloco._fragments]
        return kept, attachment

    (first, attachment), (second, _) = in_replicas(train)
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    slots = set(attachment.unsent())
    if bucketized:
        assert {slot.partition("[")[0] for slot in slots} == {"fragment0", "fragment1"}
    else:
        assert slots == {"fragment0.weight", "fragment1.weight"}
    assert attachment.stats()["committed_steps"] == 6


def local_sgd_is_refused_and_without_names_stays_exact():
    def train(lighthouse: str, number: int):
        model = network()
        manager = manager_of(lighthouse, number, model, sync=False)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        local = LocalSGD(manager, model, sgd, sync_every=2)
        with pytest.raises(laconic.ConfigError, match="got a LocalSGD"):
            attach(manager, "qsgd:2", local)
        attachment = attach(manager, "qsgd:2")
        with local:
            train_locally(model, sgd, number, 2)
        manager.shutdown(wait=False)
        return [p.detach().clone() for p in model.parameters()], attachment.stats()["uncompressed"]

    (first, counted), (second, _) = in_replicas(train)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert counted == {"parameters, not gradients or changes": 4}


def diloco_buckets_have_names_of_their_own():
    diloco_fragments_have_names_of_their_own(bucketized=True)


SCENARIOS = (
    ddp_gives_equal_replicas_names_slots_and_sends_less, ddp_with_none_has_the_bits_of_plain_torchft,
    diloco_fragments_have_names_of_their_own, diloco_buckets_have_names_of_their_own,
    local_sgd_is_refused_and_without_names_stays_exact,
)  # fmt: skip

if __name__ == "__main__":
    for scenario in SCENARIOS:
        scenario()
        print(scenario.__name__, flush=True)
