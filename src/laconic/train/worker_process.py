"""A worker process of a run."""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from laconic.cluster import checkpoint, malloc
from laconic.cluster.job import Slots
from laconic.cluster.membership import incarnation_now
from laconic.cluster.replies import RefusedError
from laconic.errors import ConfigError, FileError
from laconic.train.data_shards import Shards
from laconic.train.devices import device_of
from laconic.train.metrics import Track
from laconic.train.reports import Progress
from laconic.train.run import SERVER, WORKERS, Config, server_file, trainable
from laconic.train.snapshots import SampledAccuracy, Snapshots
from laconic.train.supervision import end_with_launcher, is_supervised
from laconic.train.task import Task
from laconic.train.worker import Worker

if TYPE_CHECKING:
    from laconic.cluster.client import Client
    from laconic.cluster.connection import Connection

__all__ = ["work"]

log = logging.getLogger("laconic")


def _print_line(report: dict[str, Any]) -> None:
    print(json.dumps(report), flush=True)


def work(
    run_dir: Path, number: int, *, incarnation: int | None = None, addresses: list[str] | None = None,
    certs: Path | None = None, patience: float = 60.0, device: str = "cpu",
    report: Callable[[dict[str, Any]], None] = _print_line,
) -> None:  # fmt: skip
    """Train as one worker of a run until its end.

    Args:
        incarnation: Must grow with each start of this worker; default: the time.
        addresses: Addresses of the servers, in order; default: those that servers on this host wrote to the folder.
        certs: The folder of ``laconic certs new``.
        patience: Seconds to retry a server that does not answer.
        device: Where the worker trains and encodes: ``cpu``, ``cuda`` or ``auto``.
        report: Called with a report after each exchange; default: print it as JSON.
    """
    from laconic.cluster import security

    end_with_launcher()
    if is_supervised():  # it has nothing to save: the launcher has its reports, the server its gradients
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    malloc.keep_freed_memory()
    config = Config.load(run_dir)
    if addresses is not None and len(addresses) != config.servers:
        raise ConfigError(f"expected {config.servers} server addresses, got {len(addresses)}")
    if not 0 <= number < config.job.workers:
        raise ConfigError(f"--worker must be from 0 to {config.job.workers - 1}, got {number}")
    known = [_wait_for_address(run_dir, i) for i in range(config.servers)] if addresses is None else addresses
    listening = [address for address in known if address is not None]
    if len(listening) < len(known):
        return  # the run has ended before this process was restarted
    credentials = security.load_worker(certs, number) if certs is not None else None
    for address in listening:
        security.require_tls(address, credentials)
    task = config.task()
    task.model.to(device_of(device))
    incarnation = incarnation_now() if incarnation is None else incarnation
    channel = security.channel_credentials(credentials) if credentials is not None else None
    clients = _clients(listening, (number, incarnation), config, task, channel, patience)
    connection = _connection(clients, config, task)
    worker = Worker(
        number, task, Shards(task.num_train, config.job.workers, config.batch, config.job.seed), config.job,
        config.rates(), connection, layout=config.layout(trainable(task.model)),
        store=checkpoint.Folder(run_dir / WORKERS / str(number)),
    )  # fmt: skip
    began, track, snapshots = time.perf_counter(), Track(), _snapshots(config, task, number)
    sampled = SampledAccuracy(task, run_dir, config.iterations, config.batch) if snapshots is not None else None

    def on_progress(progress: Progress) -> None:
        seconds = time.perf_counter() - began
        track.add(progress.iteration, seconds, progress.loss, progress.bytes_sent, progress.bytes_received)
        if snapshots is not None:
            snapshots.update(progress.iteration, seconds, progress.bytes_sent, progress.bytes_received)
        if sampled is not None:
            sampled.update(progress.iteration, seconds)
        values = {
            "run_dir": str(run_dir), "worker": number, "total_s": seconds,
            "retries": sum(client.retries for client in clients),
            "traffic": sum(client.traffic.sent + client.traffic.received for client in clients), **asdict(progress),
            **asdict(worker.times),
        }  # fmt: skip
        report(values)
        _report_to_servers(clients, values)

    try:
        worker.run(config.exchanges, on_progress)
        if is_supervised():  # only a launcher writes Records
            track.save(run_dir, number, worker.encoder.counts)
        connection.leave()
    except RefusedError as error:
        if error.reason != "diverged" or not is_supervised():
            raise
        log.info("worker %d: %s", number, error)  # the server prints it, and ends the run
        return
    finally:
        connection.close()  # ends calls that still wait
    if snapshots is not None:
        forward_s = worker.times.compute / config.iterations / config.batch / 3  # about a third of a step
        judged = snapshots.evaluate(forward_s * task.num_test)
        track.save(run_dir, number, worker.encoder.counts, judged=judged)


def _snapshots(config: Config, task: Task, number: int) -> Snapshots | None:
    """Return the snapshots of the first worker, if a launcher waits for its report.

    Models with renewed subspaces have none: their parameters alone do not define the model.
    """
    if number or not is_supervised() or config.subspace_state(task) is not None:
        return None
    return Snapshots(task, config.iterations)


def _report_to_servers(clients: Sequence[Client], values: Mapping[str, Any]) -> None:
    """Send a report to the servers, so that ``laconic watch`` shows workers of all hosts."""
    from laconic.cluster.protocol import WORKER_STATS

    for client in clients:
        client.stats = {name: values[name] for name in WORKER_STATS if name in values and math.isfinite(values[name])}


def _clients(
    addresses: Sequence[str], identity: tuple[int, int], config: Config, task: Task, credentials: Any, patience: float
) -> list[Client]:
    from laconic.cluster.client import Client, Patience

    subspaces = config.subspace_state(task)
    dense: Mapping[str, Tensor] | None = None if subspaces is None else subspaces.tensors()
    number, incarnation = identity
    return [
        Client(
            address, worker=number, incarnation=incarnation, slots=Slots.of(shard),
            limits=config.job.pull_limits(shard.values()),
            resident=() if dense is None else config.job.pull_limits(dense.get(name, x) for name, x in shard.items()),
            credentials=credentials, patience=Patience(total=patience),
        )
        for address, shard in zip(addresses, config.parts(trainable(task.model)), strict=True)
    ]  # fmt: skip


def _connection(clients: Sequence[Client], config: Config, task: Task) -> Connection:
    from laconic.cluster.connection import ShardedConnection

    if len(clients) == 1:
        return clients[0]
    parameters = trainable(task.model)
    numbers = {name: i for i, name in enumerate(config.layout(parameters).pack(parameters))}
    return ShardedConnection(clients, [[numbers[name] for name in shard] for shard in config.parts(parameters)])


def _wait_for_address(run_dir: Path, server: int, patience: float = 600.0) -> str | None:
    """Return the address of a server on this host as soon as it listens; None if it has ended."""
    began, warned = time.monotonic(), False
    while time.monotonic() < began + patience:
        if not warned and time.monotonic() > began + 10:
            log.warning("waiting for a server of %s on this host: start it, or give its address with --server", run_dir)
            warned = True
        try:
            values = json.loads((run_dir / server_file(SERVER, server)).read_text(encoding="utf-8"))
            return None if values.get("done") else str(values["address"])
        except (OSError, ValueError, KeyError):
            time.sleep(0.02)
    raise FileError(f"no server of {run_dir} has written its address in {patience:.0f} s")
