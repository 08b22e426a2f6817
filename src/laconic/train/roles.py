"""The two roles of a run: its server, or one of several, and a worker. Each is a process; they may be on many hosts."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from laconic.cluster import checkpoint, malloc
from laconic.cluster.job import Slots
from laconic.errors import ConfigError, FileError
from laconic.optim import SGD
from laconic.train.data_shards import Shards
from laconic.train.devices import device_of
from laconic.train.metrics import Track
from laconic.train.run import (
    CHECKPOINTS,
    EVENTS,
    SERVER,
    SUMMARY,
    WORKERS,
    Config,
    server_file,
    trainable,
    write_atomically,
)
from laconic.train.snapshots import Snapshots
from laconic.train.task import Task
from laconic.train.worker import Progress, Worker
from laconic.watch.events import EventLog
from laconic.watch.folder import STATUS
from laconic.watch.status_files import StatusWriter, load_status
from laconic.watch.tracker import StatusTracker

if TYPE_CHECKING:
    from laconic.cluster.client import Client
    from laconic.cluster.connection import Connection
    from laconic.cluster.core import Core

__all__ = ["SUPERVISED", "serve", "trainable", "work"]

log = logging.getLogger("laconic")

SUPERVISED = "LACONIC_SUPERVISED"
"""Set by a launcher: its processes end with it, and leave Ctrl-C to it."""
FAREWELL = 60.0
"""Seconds that a server waits at the end for workers to leave."""


def _obey_launcher() -> None:
    if SUPERVISED not in os.environ:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: also when it is killed
    except (OSError, AttributeError):
        return  # not Linux: an orphan ends when its server or its workers do
    if os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGTERM)  # it was gone before we asked


# ----------------------------------------------------------------------------------------------------------- server


def serve(
    run_dir: Path,
    *,
    index: int = 0,
    host: str = "127.0.0.1",
    port: int = 0,
    certs: Path | None = None,
    resume: bool = False,
) -> None:
    """The server of a run, until all its exchanges are done and told, or SIGTERM.

    Args:
        run_dir: The run's folder.
        index: Which of several servers this is.
        host: Where to listen; other than loopback needs certificates.
        port: 0 takes a free one.
        certs: The folder of ``laconic certs new``.
        resume: Go on from the newest checkpoint.
    """
    from laconic.cluster import security
    from laconic.cluster.server import Server

    _obey_launcher()
    malloc.keep_freed_memory()
    stopped = threading.Event()
    for each in (signal.SIGTERM, *(() if SUPERVISED in os.environ else (signal.SIGINT,))):
        signal.signal(each, lambda *_: stopped.set())
    config = Config.load(run_dir)
    credentials = security.load_server(certs) if certs is not None else None
    security.require_tls(host, credentials)
    event_log = EventLog(run_dir / server_file(EVENTS, index))
    tracker = _tracker(config, run_dir, index, resume=resume)

    def history(event: dict[str, Any]) -> None:
        event_log(event)
        tracker.record_event(event)

    core, checkpoint_store = _core(config, run_dir, index, history, resume=resume)

    def keep(version: int) -> None:
        every = config.job.exchanges_per_checkpoint * config.job.updates_per_exchange
        if version % every == 0 or core.finished(config.exchanges):
            _save(checkpoint_store, core, history)

    core.on_update(keep)
    address = f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"
    if credentials is None:
        server = Server(core, address, on_stats=tracker.record_report)
    else:
        job = credentials.identity.job
        server = Server(
            core,
            address,
            credentials=security.server_credentials(credentials),
            identify=lambda context: security.require_worker(context.auth_context(), job),
            on_stats=tracker.record_report,
        )
    told = {"address": address.rpartition(":")[0] + f":{server.port}", "pid": os.getpid()}
    write_atomically(run_dir / server_file(SERVER, index), json.dumps(told))
    log.info("server %d listens on %s", index, told["address"])
    status_writer = StatusWriter(run_dir, index)

    def show(*, last: bool = False) -> None:
        if last or status_writer.due(time.time()):
            phase = "failed" if core.failure else "ended" if core.finished(config.exchanges) else "stopped"
            traffic = {"received": server.traffic.received, "sent": server.traffic.sent}
            status = tracker.status(**traffic, phase=phase if last else "serving", failure=core.failure)
            status_writer.write(status, last=last)

    try:
        _until_over(core, config.exchanges, stopped, show)
    finally:
        server.stop()
        core.settle()
        history({"event": "stopped", "version": core.version, "received": server.traffic.received,
                 "sent": server.traffic.sent})  # fmt: skip
        if core.failure is None and core.holds_current_weights:  # else the last deposit is saved already
            checkpoint_store.save(core.version, *core.state())
        show(last=True)
        status_writer.close()
    if core.failure is not None:
        raise ConfigError(core.failure)
    if core.finished(config.exchanges):
        if SUPERVISED not in os.environ:
            _sum_up(config, run_dir, core, server.traffic.sent + server.traffic.received)
        write_atomically(run_dir / server_file(SERVER, index), json.dumps({"done": True}))
    else:
        log.warning("stopped at exchange %d of %d: go on with --resume", core.version, config.exchanges)
        if SUPERVISED not in os.environ:
            raise KeyboardInterrupt


def _tracker(config: Config, run_dir: Path, index: int, *, resume: bool) -> StatusTracker:
    """Return the tracker of the server's status; with ``resume`` it continues the counts of the last one."""
    previous = None
    if resume:
        try:
            previous = load_status(run_dir / server_file(STATUS, index))
        except FileError as error:
            log.warning("%s: counts begin at zero", error)
    updates = config.exchanges * config.job.updates_per_exchange
    return StatusTracker(config.job.workers, updates, config.iterations, previous)


def _core(
    config: Config, run_dir: Path, index: int, history: Callable[[dict[str, Any]], None], *, resume: bool
) -> tuple[Core, checkpoint.Folder]:
    from laconic.cluster.core import Core

    if not 0 <= index < config.servers:
        raise ConfigError(f"servers are 0 to {config.servers - 1}, there is no {index}")
    task = config.task()
    parameters = {name: x.clone() for name, x in config.parts(trainable(task.model))[index].items()}
    residents = config.residents(task)
    optimizer = SGD(momentum=config.job.momentum, weight_decay=config.job.weight_decay)
    checkpoint_store = checkpoint.Folder(run_dir / server_file(CHECKPOINTS, index))
    core = Core(
        config.job, parameters, optimizer, config.rates(), history, exchanges=config.exchanges,
        checkpoint_store=checkpoint_store, resident=residents and residents.only(parameters),
    )  # fmt: skip
    found = checkpoint.load_latest(checkpoint_store.path) if resume else None
    if found is not None:
        core.load(found.tensors, found.meta)
        checkpoint_store.forget(core.version)
        history({"event": "resumed", "version": core.version})
        log.info("resumed at exchange %d from %s", core.version, found.path)
    else:
        checkpoint_store.save(0, *core.state())  # somewhere to go back to
    return core, checkpoint_store


def _save(checkpoint_store: checkpoint.Folder, core: Core, history: Callable[[dict[str, Any]], None]) -> None:
    try:
        checkpoint_store.save(core.version, *core.state())
    except FileError as error:  # training goes on: what is lost is the way back
        log.warning("%s", error)
        history({"event": "checkpoint_failed", "version": core.version})
    else:
        history({"event": "checkpoint", "version": core.version})


def _sum_up(config: Config, run_dir: Path, core: Core, wire_bytes: int) -> None:
    """What a server alone can tell of a run; a launcher, which hears of the workers, tells more."""
    told: dict[str, Any] = {
        "method": config.method,
        "iterations": config.iterations,
        "wire_bytes": wire_bytes,
    }
    if config.servers == 1:
        task = config.task()
        config.restore(task, core.parameters, core.resident, core.version)
        told |= task.evaluate()
    write_atomically(run_dir / SUMMARY, json.dumps(told, indent=2))
    log.info("wrote %s", run_dir / SUMMARY)


def _until_over(core: Core, exchanges: int, stopped: threading.Event, show: Callable[[], None]) -> None:
    finished_at: float | None = None
    while not stopped.wait(0.05) and core.failure is None:
        show()
        if core.finished(exchanges):
            finished_at = finished_at or time.monotonic()
            if core.all_gone() or time.monotonic() > finished_at + FAREWELL:
                return


# ----------------------------------------------------------------------------------------------------------- worker


def _print_line(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def work(
    run_dir: Path,
    number: int,
    *,
    incarnation: int | None = None,
    addresses: list[str] | None = None,
    certs: Path | None = None,
    patience: float = 60.0,
    device: str = "cpu",
    report: Callable[[dict[str, Any]], None] = _print_line,
) -> None:
    """One worker of a run, from where the server says to the end.

    Args:
        run_dir: The run's folder.
        number: The worker's.
        incarnation: Grows with each start of this worker; by default the time of day.
        addresses: Of the servers, in order; by default what they have told on this host.
        certs: The folder of ``laconic certs new``.
        patience: Seconds to try a server that does not answer.
        device: Where it trains and encodes: ``cpu``, ``cuda``, or ``auto``.
        report: Given a line after each exchange; by default it is printed as JSON.
    """
    from laconic.cluster import security
    from laconic.cluster.connection import ShardedConnection

    _obey_launcher()
    malloc.keep_freed_memory()
    config = Config.load(run_dir)
    if addresses is not None and len(addresses) != config.servers:
        raise ConfigError(f"the run has {config.servers} servers, got {len(addresses)} addresses")
    if not 0 <= number < config.job.workers:
        raise ConfigError(f"workers are 0 to {config.job.workers - 1}, there is no {number}")
    found = [_address(run_dir, i) for i in range(config.servers)] if addresses is None else addresses
    there = [address for address in found if address is not None]
    if len(there) < len(found):
        return  # it is over: this process was started again late
    credentials = security.load_worker(certs, number) if certs is not None else None
    for address in there:
        security.require_tls(address, credentials)
    where = device_of(device)
    task = config.task()
    task.model.to(where)
    parameters = trainable(task.model)
    identity = (number, time.time_ns() // 1_000_000 if incarnation is None else incarnation)
    channel = security.channel_credentials(credentials) if credentials is not None else None
    residents = config.residents(task)
    dense = None if residents is None else residents.tensors()
    clients = [
        _client(address, identity, config, part, dense, channel, patience)
        for address, part in zip(there, config.parts(parameters), strict=True)
    ]
    link: Connection = clients[0]
    if config.servers > 1:
        numbers = {name: i for i, name in enumerate(config.layout(parameters).pack(parameters))}
        link = ShardedConnection(clients, [[numbers[name] for name in part] for part in config.parts(parameters)])
    worker = Worker(
        number,
        task,
        Shards(task.num_train, config.job.workers, config.batch, config.job.seed),
        config.job,
        config.rates(),
        link,
        layout=config.layout(parameters),
        memory=checkpoint.Folder(run_dir / WORKERS / str(number)),
    )
    began, track, snapshots = time.perf_counter(), Track(), _snapshots(config, task, number)

    def tell(progress: Progress) -> None:
        seconds = time.perf_counter() - began
        track.add(progress.iteration, seconds, progress.loss, progress.bytes_sent, progress.bytes_received)
        if snapshots is not None:
            snapshots.update(progress.iteration, seconds, progress.bytes_sent, progress.bytes_received)
        line = {
            "run_dir": str(run_dir),
            "worker": number,
            "total_s": seconds,
            "retries": sum(client.retries for client in clients),
            "traffic": sum(client.traffic.sent + client.traffic.received for client in clients),
            **asdict(progress),
            **asdict(worker.times),
        }
        report(line)
        _tell_servers(clients, line)

    try:
        worker.run(config.exchanges, tell)
        if SUPERVISED in os.environ:  # else nobody here makes Records of it
            track.save(run_dir, number, worker.counts)
        link.leave()
    finally:
        link.close()  # whatever waits in a call is let go
    if snapshots is not None:
        # Forward is about a third of a step.
        each_s = worker.times.compute / config.iterations / config.batch / 3 * task.num_test
        track.save(run_dir, number, worker.counts, judged=snapshots.evaluate(each_s))


def _snapshots(config: Config, task: Task, number: int) -> Snapshots | None:
    """Of the first worker, where a launcher waits for its report; of renewed subspaces parameters are not all."""
    if number or SUPERVISED not in os.environ or config.residents(task) is not None:
        return None
    return Snapshots(task, config.iterations)


def _tell_servers(clients: Sequence[Client], line: Mapping[str, Any]) -> None:
    """Whoever watches hears of workers on all hosts from their server."""
    from laconic.cluster.protocol import WORKER_STATS

    for client in clients:
        client.stats = {name: line[name] for name in WORKER_STATS if name in line and math.isfinite(line[name])}


def _client(
    address: str,
    identity: tuple[int, int],
    config: Config,
    part: Mapping[str, Tensor],
    dense: Mapping[str, Tensor] | None,
    credentials: Any,
    patience: float,
) -> Client:
    from laconic.cluster.client import Client, Patience

    return Client(
        address,
        worker=identity[0],
        incarnation=identity[1],
        slots=Slots.of(part),
        limits=config.job.pull_limits(part.values()),
        resident=() if dense is None else config.job.pull_limits(dense.get(name, x) for name, x in part.items()),
        credentials=credentials,
        patience=Patience(total=patience),
    )


def _address(run_dir: Path, server: int, patience: float = 600.0) -> str | None:
    """Where the server of a run on this host listens, once it does; None when it has ended."""
    began, told_so = time.monotonic(), False
    while time.monotonic() < began + patience:
        if not told_so and time.monotonic() > began + 10:
            log.warning("waiting for a server of %s on this host: is it running? Else name it with --server", run_dir)
            told_so = True
        try:
            told = json.loads((run_dir / server_file(SERVER, server)).read_text(encoding="utf-8"))
            return None if told.get("done") else str(told["address"])
        except (OSError, ValueError, KeyError):
            time.sleep(0.02)
    raise FileError(f"no server of {run_dir} has told its address in {patience:.0f} s")
