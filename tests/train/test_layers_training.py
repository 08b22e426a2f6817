"""Compressed layers with the parameter server: learning, equal bits in all processes, restarts."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.cluster.checkpoint import Folder
from laconic.cluster.connection import ShardedConnection
from laconic.cluster.core import Core
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job
from laconic.errors import ConfigError
from laconic.layers import subspaces
from laconic.optim import SGD
from laconic.train import Shards, build_task
from laconic.train.break_even import describe, measure
from laconic.train.in_process import run_in_threads
from laconic.train.methods import METHODS, method_options
from laconic.train.run import Config, trainable
from laconic.train.worker import Worker

BATCH = 32


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def config(scheme: str = "subspace:0.1,T=4", exchanges: int = 10, *, servers: int = 1, **options: Any) -> Config:
    job = Job(**{"workers": 2, "lr": 0.05, "checkpoint_every": 1} | options)
    return Config(batch=BATCH, iterations=exchanges * job.every, layers=scheme, servers=servers, job=job)


def cores_of(config: Config, folder: Path | None = None) -> list[Core]:
    task = config.task()
    residents = config.subspace_state(task)
    cores = []
    for number, part in enumerate(config.parts(trainable(task.model))):
        part = {name: x.clone() for name, x in part.items()}
        optimizer = SGD(momentum=config.job.momentum, weight_decay=config.job.weight_decay)
        checkpoint_store = None if folder is None else Folder(folder / str(number))
        resident = residents and residents.only(part)
        exchanges = config.exchanges
        core = Core(
            config.job, part, optimizer, config.rates(), exchanges=exchanges, checkpoint_store=checkpoint_store,
            resident=resident,
        )  # fmt: skip
        if checkpoint_store is not None and checkpoint_store.versions():
            core.load(*checkpoint_store.fetch(max(checkpoint_store.versions())))
        elif checkpoint_store is not None:
            checkpoint_store.save(0, *core.state())
        cores.append(core)
    return cores


def workers_of(config: Config, cores: list[Core], folder: Path | None = None, *, incarnation: int = 0) -> list[Worker]:
    workers = []
    for number in range(config.job.workers):
        task = config.task()
        parameters = trainable(task.model)
        links = [InProcessConnection(core, number, incarnation=incarnation) for core in cores]
        numbers = {name: i for i, name in enumerate(parameters)}
        parts = [[numbers[name] for name in part] for part in config.parts(parameters)]
        link: Any = ShardedConnection(links, parts) if len(links) > 1 else links[0]
        shards = Shards(task.num_train, config.job.workers, BATCH, config.job.seed)
        memory = None if folder is None else Folder(folder / f"worker-{number}")
        workers.append(Worker(number, task, shards, config.job, config.rates(), link, store=memory))
    return workers


def run(config: Config, folder: Path | None = None, *, stop: int | None = None) -> tuple[list[Core], list[Worker]]:
    cores = cores_of(config, folder)
    if folder is not None:
        for number, core in enumerate(cores):
            checkpoint_store = Folder(folder / str(number))
            core.on_update(
                lambda version, core=core, checkpoint_store=checkpoint_store: checkpoint_store.save(
                    version, *core.state()
                )
            )  # type: ignore[misc]
    workers = workers_of(config, cores, folder, incarnation=0 if stop else 1)
    failed = run_in_threads(workers, stop or config.exchanges)
    assert not failed, failed
    return cores, workers


def dense_weights(config: Config, cores: list[Core]) -> dict[str, Tensor]:
    """Return the dense model that the servers have."""
    task = config.task()
    slots = {name: x for core in cores for name, x in core.parameters.items()}
    config.restore(task, slots, {name: x for core in cores for name, x in core.resident.items()}, cores[0].version)
    return _dense(task.model)


def _dense(model: torch.nn.Module) -> dict[str, Tensor]:
    from laconic import expand

    return {name: x.detach() for name, x in expand(model).named_parameters()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(
    "scheme, least", [("monarch:0.2", 75), ("lowrank:0.2", 75), ("subspace:0.1,T=20", 80), ("hashed:0.1", 75)]
)
def test_model_learns_digits(scheme: str, least: float) -> None:
    setup = config(scheme, 70)  # not right after a renewal, which takes many steps at once
    _, workers = run(setup)
    assert workers[0].task.evaluate()["accuracy"] > least
    assert workers[0].task.dense_numel == 327_880
    assert workers[0].bytes_sent < 70 * (0.25 * 4 * 327_880 + 4000)


def test_renewed_subspace_equals_training_in_one_process() -> None:
    """One worker with a server equals torch's SGD with the subspace hook."""
    setup = config(exchanges=11, workers=1, weight_decay=0.01)
    cores, _ = run(setup)
    task = setup.task()
    shards = Shards(task.num_train, 1, BATCH, 0)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for i in range(11):
        optimizer.zero_grad()
        task.loss(task.batch(shards.indices(0, i))).backward()
        optimizer.step()
    one, other = dense_weights(setup, cores), _dense(task.model)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)
    assert [layer.steps for _, layer in subspaces(task.model)] == [11, 11]


EXACT = [name for name in METHODS if name not in ("2w", "adaptive")]


@pytest.mark.parametrize("method", [*EXACT, "sharded"])
def test_server_and_workers_have_equal_weights(method: str) -> None:
    options = method_options("5" if method == "sharded" else method)
    if options.get("every"):
        options["every"] = 3
    setup = config(exchanges=9, servers=2 if method == "sharded" else 1, **options)
    cores, workers = run(setup)
    held = dense_weights(setup, cores)
    for worker in workers:
        assert_equal(_dense(worker.task.model), held)
    steps = 9 * setup.job.every
    assert {layer.steps for worker in workers for _, layer in subspaces(worker.task.model)} == {steps}
    origin = dict(subspaces(setup.task().model))["fc1"].origin
    assert not torch.equal(cores[0].resident.get("fc1.z", cores[-1].resident.get("fc1.z")), origin)


@pytest.mark.parametrize("method", ["4", "6", "laconic", "sharded", "homomorphic"])
def test_restart_gives_the_same_bits(tmp_path: Path, method: str) -> None:
    """All processes end between two renewals and resume from their files."""
    options = method_options("4" if method == "sharded" else method)
    if options.get("every"):
        options["every"] = 3
    setup = config(exchanges=10, servers=2 if method == "sharded" else 1, weight_decay=0.001, **options)
    straight, _ = run(setup)
    run(setup, tmp_path, stop=6)
    cores, workers = run(setup, tmp_path)
    assert_equal(dense_weights(setup, cores), dense_weights(setup, straight))
    for worker in workers:
        assert_equal(_dense(worker.task.model), dense_weights(setup, straight))


SUMMED = {
    "local steps": {"every": 3, "sends": "changes"},
    "several servers": {"servers": 2},
}


@pytest.mark.parametrize("kind", SUMMED)
def test_restarts_with_returns_sum_give_the_same_bits(tmp_path: Path, kind: str) -> None:
    """With returns=sum weights come from uploads, from a worker's disk, or from the server if that disk is lost."""
    setup = config(exchanges=10, weight_decay=0.001, **method_options("homomorphic") | SUMMED[kind])
    straight, before = run(setup)
    wanted = dense_weights(setup, straight)
    for worker in before:
        assert_equal(_dense(worker.task.model), wanted)
    run(setup, tmp_path, stop=6)
    cores, workers = run(setup, tmp_path)
    assert_equal(dense_weights(setup, cores), wanted)
    for worker in workers:
        assert_equal(_dense(worker.task.model), wanted)


def test_worker_without_its_disk_gets_the_last_uploaded_weights(tmp_path: Path) -> None:
    setup = config(exchanges=10, checkpoint_every=3, **method_options("homomorphic"))
    run(setup, tmp_path, stop=7)
    shutil.rmtree(tmp_path / "worker-1")
    cores, workers = run(setup, tmp_path)
    for worker in workers:
        assert_equal(_dense(worker.task.model), dense_weights(setup, cores))


def test_residuals_of_a_renewed_subspace_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Seven exchanges with T=4 renew each of two layers once, in every channel on both sides."""
    caplog.set_level(logging.WARNING, "laconic")
    _, (worker, _) = run(config(exchanges=7, **method_options("homomorphic")))
    assert worker.encoder.summing is not None and worker.encoder.summing.residual_resets == 1  # fc2 has few
    options = method_options("laconic") | {"every": 1, "sends": "gradients"}
    (core,), (worker, _) = run(config(exchanges=4, **options))
    assert worker.encoder.channel.stats.residual_resets == 2 == core._weights.channel.stats.residual_resets
    assert (
        worker.encoder.channel.residual("fc1.z") is None and worker.encoder.channel.residual("head.weight") is not None
    )
    messages = [record.message for record in caplog.records if "its subspace was drawn anew" in record.message]
    assert len(messages) == 5  # two workers in each run, and a server: logged once each


@pytest.mark.parametrize("options, words", [
    ({"mode": "async"}, "mode async: give mode sync"), ({"mode": "bounded:2"}, "mode bounded:2: give mode sync"),
    ({"returns": "delta", "pull": "topk:0.1"}, "give returns=gradients, or pull=none"),
    ({"pull": "qsgd:4"}, "a lossy reply"),
])  # fmt: skip
def test_renewal_needs_equal_weights_in_all_processes(options: dict[str, Any], words: str) -> None:
    setup = config(**options)
    with pytest.raises(ConfigError, match=words) as caught:
        setup.subspace_state(setup.task())
    assert "use T=0 without weight decay" in str(caught.value)
    still = replace(setup, layers="subspace:0.1,T=0")
    assert still.subspace_state(still.task()) is None
    dense = replace(setup, layers="monarch:0.2")
    assert dense.subspace_state(dense.task()) is None


def test_bundled_slots_cannot_be_renewed() -> None:
    setup = replace(config(), bundled=True)
    with pytest.raises(ConfigError, match="bundled slots: give --layerwise"):
        setup.subspace_state(setup.task())


def test_fixed_subspace_has_no_state_besides_its_coordinates() -> None:
    setup = config("subspace:0.1,T=0", 6, mode="async")
    cores, workers = run(setup)
    assert cores[0].resident == {} and workers[0].task.evaluate()["loss"] < 2.2


def test_server_sends_the_dense_weights_once() -> None:
    pytest.importorskip("grpc")
    from laconic.cluster.client import Client
    from laconic.cluster.job import Slots
    from laconic.cluster.server import Server

    setup = config(exchanges=6)
    (core,) = cores_of(setup)
    server = Server(core, "127.0.0.1:0")
    try:
        workers = workers_of(setup, [core])
        for worker in workers:
            parameters = trainable(worker.task.model)
            residents = setup.subspace_state(worker.task)
            assert residents is not None
            dense = [residents.tensors().get(name, x) for name, x in parameters.items()]
            worker.connection = Client(
                f"127.0.0.1:{server.port}", worker=worker.number, incarnation=1, slots=Slots.of(parameters),
                limits=setup.job.pull_limits(parameters.values()), resident=setup.job.pull_limits(dense),
            )  # fmt: skip
        failed = run_in_threads(workers, 6)
        assert not failed, failed
        for worker in workers:
            assert_equal(_dense(worker.task.model), dense_weights(setup, [core]))
            assert worker.bytes_received < 6 * 0.11 * 4 * 327_880
            worker.connection.close()
    finally:
        server.stop()


def test_configuration_with_layers_json_round_trip() -> None:
    setup = config()
    assert Config.from_json(setup.to_json()) == setup
    with pytest.raises(ConfigError, match="unknown scheme 'thin'"):
        config("thin:0.1")
    with pytest.raises(ConfigError, match="layers_init must be project or fresh"):
        replace(setup, layers_init="zero")


def test_every_process_builds_the_same_model() -> None:
    for scheme in ("monarch:0.1", "hashed:0.1", "subspace:0.1"):
        one, other = (build_task(seed=3, layers=scheme).model.state_dict() for _ in range(2))
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_measure_evaluates_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = config("monarch:0.2", 10)
    raw = 8 * 327_880 * 2
    summary = {"wire_bytes_per_iteration": raw / 10, "encode_s": 0.0}
    monkeypatch.setattr("laconic.train.break_even.MAX_VARIATION", 1e9)
    bound = measure(setup, summary, bandwidth=1e9)
    assert bound["rho"] == pytest.approx(0.1) and bound["rho_layers"] == pytest.approx(0.2, abs=0.01)
    assert bound["h_with_encoding"] == bound["h"] > 0
    assert bound["r_min"] == pytest.approx(bound["h"] + 0.1 * bound["slope"])
    assert bound["r_min_dense"] == pytest.approx(1 + bound["slope"])
    assert bound["speedup_over_one_node"] == pytest.approx(2 / bound["r_min"])
    assert bound["exempt"]["head.weight"] == "is the output layer's"
    assert "rho 0.2 by layers, 0.1 on the wire, h " in describe(bound) and "at 1 Gbit/s" in describe(bound)
    monkeypatch.setattr("laconic.train.break_even.MAX_VARIATION", -1.0)
    bound = measure(setup, summary, bandwidth=1e9)
    assert bound["h"] is None and "too much to compute h" in describe(bound)
