"""Jobs with returns=sum after failures: the same bits, although workers alone hold the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import core_of, train
from summing_jobs import sum_job
from test_faults import at_version, config_of, events_of, kill, weights_of

from laconic.cluster.checkpoint import load_latest
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job
from laconic.cluster.replies import regather
from laconic.train import Shards
from laconic.train.in_process import run_in_threads
from laconic.train.launch import launch
from laconic.train.run import CHECKPOINTS, trainable
from laconic.train.worker import Worker
from laconic_lab.faults.invariants import applied_once
from laconic_lab.faults.recovery import Training, require_same_weights

LOCAL_STEPS = {"every": 2, "sends": "changes"}


def recovery_job(**options: Any) -> tuple[Job, int]:
    """Return a job and its number of exchanges."""
    job = sum_job(checkpoint_every=4, **options)
    return job, 12 // job.every


@pytest.mark.parametrize("options", [{}, LOCAL_STEPS, {"push": "thc:4", "push_small": "shared:8"}], ids=str)
def test_lost_server_and_workers_change_no_bit(options: dict[str, Any], tmp_path: Path) -> None:
    job, exchanges = recovery_job(**options)
    clean = Training(job, tmp_path / "clean", exchanges)
    clean.run()
    first = Training(job, tmp_path / "hurt", exchanges)
    first.exchanges = exchanges // 2 + 1
    first.cores = [first.core()]  # it stops half way, some exchanges after a checkpoint
    first.run(dies=0, at=exchanges // 2 - 1, delivered=True)
    again = Training(job, tmp_path / "hurt", exchanges, first_incarnation=10)
    assert 0 < again.cores[0].version <= first.exchanges
    again.run(dies=1, at=exchanges - 1)
    require_same_weights(again, clean)
    assert not [e for run in (first, again) for e in run.events[0] if e["event"] == "memory_lost"]


def test_worker_lost_in_the_first_round_changes_no_bit(tmp_path: Path) -> None:
    job, _ = recovery_job()
    clean = Training(job, tmp_path / "clean", 3)
    clean.run()
    hurt = Training(job, tmp_path / "hurt", 3)
    hurt.run(dies=1, at=0)
    require_same_weights(hurt, clean)


def test_two_servers_give_the_bits_of_one(tmp_path: Path) -> None:
    job, exchanges = recovery_job()
    one = Training(job, tmp_path / "one", exchanges)
    one.run()
    two = Training(job, tmp_path / "two", exchanges, servers=2)
    two.run(dies=0, at=exchanges - 2, delivered=True)
    require_same_weights(two, one)


def test_worker_without_its_files_continues_from_the_last_upload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, exchanges = recovery_job()
    run = Training(job, tmp_path, exchanges)
    run.loses_files = 1
    run.run(dies=1, at=exchanges - 2)
    assert [(e["worker"], e["version"]) for e in run.events[0] if e["event"] == "memory_lost"] == [(1, 8)]
    assert "worker 1" in caplog.text and run.cores[0].version == exchanges and run.cores[0].holds_current_weights
    applied_once(run.events[0])


def test_server_lost_before_the_last_upload_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, exchanges = recovery_job()
    clean = Training(job, tmp_path / "clean", exchanges)
    clean.run()
    hurt = Training(job, tmp_path / "hurt", exchanges)
    made: list[Worker] = []
    make, upload = hurt.worker, InProcessConnection.upload_weights

    def worker(number: int, **options: Any) -> Worker:
        made.append(make(number, **options))
        return made[-1]

    def crash(self: InProcessConnection, version: int, frames: Any) -> None:
        if version == exchanges and len(made) == 2:
            made.append(made[0])
            hurt.cores = [hurt.core()]  # the state on disk
            for each in made:
                each.connection.core = hurt.cores[0]  # type: ignore[attr-defined]
            raise regather()
        upload(self, version, frames)

    hurt.worker = worker  # type: ignore[method-assign]
    monkeypatch.setattr(InProcessConnection, "upload_weights", crash)
    hurt.run()
    assert len(made) == 3 and hurt.cores[0].holds_current_weights and hurt.cores[0].version == exchanges
    require_same_weights(hurt, clean)


@pytest.fixture
def _one_thread() -> Any:
    """Compute with one thread, as the processes of a launched run do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_killed_processes_restart_and_the_run_ends_as_in_one_process(tmp_path: Path) -> None:
    config, hurt = config_of("homomorphic"), tmp_path / "hurt"
    clean, _ = train(config.job, config.exchanges)
    killers = [at_version(hurt, 25, lambda: kill("worker", hurt)), at_version(hurt, 47, lambda: kill("server", hurt))]
    launch({hurt: config})
    for killer in killers:
        killer.join(1)
    assert [e["version"] for e in events_of(hurt) if e["event"] == "resumed"] == [40]
    result = weights_of(hurt)
    assert len(result) == len(clean.parameters)
    for name, x in clean.parameters.items():
        assert torch.equal(result[f"parameter/{name}"], x), name


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_killed_worker_restores_its_renewed_subspaces(tmp_path: Path) -> None:
    """The server has of them only what was uploaded; T=5 and checkpoints every 8 do not coincide."""
    config = replace(config_of("homomorphic", checkpoint_every=8), layers="subspace:0.1,T=5", iterations=24)
    task = config.task()
    residents = config.subspace_state(task)
    assert residents is not None
    slots = {name: x.clone() for name, x in trainable(task.model).items()}
    clean = core_of(config.job, slots, exchanges=24, resident=residents)
    workers = []
    for number in range(config.job.workers):
        own = config.task()
        shards = Shards(own.num_train, config.job.workers, config.batch, config.job.seed)
        workers.append(Worker(number, own, shards, config.job, config.rates(), InProcessConnection(clean, number)))
    assert not run_in_threads(workers, 24)
    killer = at_version(tmp_path, 12, lambda: kill("worker", tmp_path))
    launch({tmp_path: config})
    killer.join(1)
    assert [e["event"] for e in events_of(tmp_path)].count("gather") >= 1
    result = load_latest(tmp_path / CHECKPOINTS)
    assert result is not None and result.meta["version"] == 24
    expected = {f"parameter/{name}": x for name, x in clean.parameters.items()}
    expected |= {f"resident/{name}": x for name, x in clean.resident.items()}
    assert len(clean.resident) == 2
    for name, x in expected.items():
        assert torch.equal(result.tensors[name], x), name
