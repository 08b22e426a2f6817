"""A server process of a run."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cluster import checkpoint, malloc
from laconic.errors import ConfigError, FileError
from laconic.train.run import CHECKPOINTS, EVENTS, SERVER, SUMMARY, Config, server_file, trainable, write_atomically
from laconic.train.supervision import end_with_launcher, is_supervised
from laconic.watch.events import EventLog
from laconic.watch.folder import STATUS
from laconic.watch.status_files import StatusWriter, load_status
from laconic.watch.tracker import StatusTracker

if TYPE_CHECKING:
    from laconic.cluster.core import Core
    from laconic.cluster.server import Server

__all__ = ["serve"]

log = logging.getLogger("laconic")

LEAVE_TIMEOUT = 60.0
"""Seconds that a server waits at the end for workers to leave."""

OnEvent = Callable[[dict[str, Any]], None]


def serve(
    run_dir: Path, *, index: int = 0, host: str = "127.0.0.1", port: int = 0, certs: Path | None = None,
    resume: bool = False,
) -> None:  # fmt: skip
    """Serve a run until all exchanges are done and the workers have left, or until SIGTERM.

    Args:
        host: Address to listen on; all but loopback need certificates.
        port: 0 takes a free port.
        certs: The folder of ``laconic certs new``.
        resume: Continue from the newest checkpoint.
    """
    end_with_launcher()
    malloc.keep_freed_memory()
    stopped = threading.Event()

    def stop(number: int, _: object) -> None:
        if number == signal.SIGINT and not stopped.is_set():  # log may be what was interrupted, and have its lock
            os.write(2, b"\nlaconic: stopping...\n" if sys.stderr.isatty() else b"laconic: stopping...\n")
        stopped.set()

    for number in (signal.SIGTERM, *(() if is_supervised() else (signal.SIGINT,))):
        signal.signal(number, stop)
    config = Config.load(run_dir)
    credentials = _credentials(host, certs)
    event_log = EventLog(run_dir / server_file(EVENTS, index))
    tracker = _status_tracker(config, run_dir, index, resume=resume)

    def on_event(event: dict[str, Any]) -> None:
        event_log(event)
        tracker.record_event(event)

    core, checkpoints = _core(config, run_dir, index, on_event, resume=resume)
    _save_checkpoints(config, core, checkpoints, on_event)
    server = _start(core, host, port, credentials, certs, tracker)
    address = f"{_bracketed(host)}:{server.port}"
    write_atomically(run_dir / server_file(SERVER, index), json.dumps({"address": address, "pid": os.getpid()}))
    log.info("server %d listens on %s", index, address)
    status_writer = StatusWriter(run_dir, index)

    def write_status(*, last: bool = False) -> None:
        if last or status_writer.due(time.time()):
            phase = "failed" if core.failure else "ended" if core.finished(config.exchanges) else "stopped"
            traffic = {"received": server.traffic.received, "sent": server.traffic.sent}
            status = tracker.status(**traffic, phase=phase if last else "serving", failure=core.failure)
            status_writer.write(status, last=last)

    try:
        _wait_until_over(core, config.exchanges, stopped, write_status)
    finally:
        server.stop()
        core.settle()
        on_event({"event": "stopped", "version": core.version, "received": server.traffic.received,
                  "sent": server.traffic.sent})  # fmt: skip
        if core.failure is None and core.holds_current_weights:  # otherwise the last upload is already saved
            checkpoints.save_at_stop(core.version, *core.state())
        write_status(last=True)
        status_writer.close()
        event_log.close()
    if core.failure is not None:
        raise ConfigError(core.failure)
    if core.finished(config.exchanges):
        if not is_supervised():
            _write_summary(config, run_dir, core, server.traffic.sent + server.traffic.received)
        write_atomically(run_dir / server_file(SERVER, index), json.dumps({"done": True}))
    else:
        log.warning("stopped at exchange %d of %d: continue with --resume", core.version, config.exchanges)
        if not is_supervised():
            raise KeyboardInterrupt
        logging.shutdown()
        os._exit(0)  # the launcher waits, and everything is saved: torch need not be taken down


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _credentials(host: str, certs: Path | None) -> Any:
    from laconic.cluster import security

    credentials = security.load_server(certs) if certs is not None else None
    security.require_tls(host, credentials)
    return credentials


def _start(
    core: Core, host: str, port: int, credentials: Any, certs: Path | None, tracker: StatusTracker
) -> Server:  # fmt: skip
    from laconic.cluster import security
    from laconic.cluster.deny_list import DENIED_FILE, DenyList
    from laconic.cluster.server import Server

    address = f"{_bracketed(host)}:{port}"
    if credentials is None or certs is None:
        return Server(core, address, on_stats=tracker.record_report)
    job = credentials.identity.job
    return Server(
        core, address, credentials=security.server_credentials(credentials),
        identify=lambda context: security.require_worker(context.auth_context(), job),
        deny_list=DenyList(certs / DENIED_FILE), on_stats=tracker.record_report,
    )  # fmt: skip


def _status_tracker(config: Config, run_dir: Path, index: int, *, resume: bool) -> StatusTracker:
    """Return the tracker of the server's status; with ``resume`` it continues the counts of the last status."""
    previous = None
    if resume:
        try:
            previous = load_status(run_dir / server_file(STATUS, index))
        except FileError as error:
            log.warning("%s: counts begin at zero", error)
    updates = config.exchanges * config.job.updates_per_exchange
    return StatusTracker(config.job.workers, updates, config.iterations, previous)


def _core(
    config: Config, run_dir: Path, index: int, on_event: OnEvent, *, resume: bool
) -> tuple[Core, checkpoint.Folder]:
    from laconic.cluster.core import Core

    if not 0 <= index < config.servers:
        raise ConfigError(f"--index must be from 0 to {config.servers - 1}, got {index}")
    task = config.task()
    parameters = {name: x.clone() for name, x in config.parts(trainable(task.model))[index].items()}
    subspaces = config.subspace_state(task)
    job = config.job
    optimizer = job.make_optimizer()
    checkpoints = checkpoint.Folder(run_dir / server_file(CHECKPOINTS, index))
    core = Core(
        config.job, parameters, optimizer, config.rates(), on_event, exchanges=config.exchanges,
        checkpoint_store=checkpoints, resident=subspaces and subspaces.only(parameters),
    )  # fmt: skip
    latest = checkpoint.load_latest(checkpoints.path) if resume else None
    if latest is not None:
        try:
            core.load(latest.tensors, latest.meta)
        except (KeyError, TypeError, ValueError, OverflowError) as error:  # sealed, but not by a server of ours
            raise FileError(f"{latest.path} is not a server's checkpoint: {type(error).__name__}: {error}") from None
        checkpoints.forget(core.version)
        on_event({"event": "resumed", "version": core.version})
        log.info("resumed at exchange %d from %s", core.version, latest.path)
    else:
        checkpoints.save(0, *core.state())  # workers may have to go back to the start
    return core, checkpoints


def _save_checkpoints(config: Config, core: Core, checkpoints: checkpoint.Folder, on_event: OnEvent) -> None:
    """Save a checkpoint after every n-th update and at the end; if that fails, training continues."""
    every = config.job.exchanges_per_checkpoint * config.job.updates_per_exchange

    def on_update(version: int) -> None:
        if version % every and not core.finished(config.exchanges):
            return
        try:
            checkpoints.save(core.version, *core.state())
        except FileError as error:
            log.warning("%s", error)
            on_event({"event": "checkpoint_failed", "version": core.version})
        else:
            on_event({"event": "checkpoint", "version": core.version})

    core.on_update(on_update)


def _write_summary(config: Config, run_dir: Path, core: Core, wire_bytes: int) -> None:
    """Write what the server knows of the run; a launcher, which has the workers' reports, writes more."""
    summary: dict[str, Any] = {"method": config.method, "iterations": config.iterations, "wire_bytes": wire_bytes}
    if config.servers == 1:
        task = config.task()
        config.restore(task, core.parameters, core.resident, core.version)
        summary |= task.evaluate()
    write_atomically(run_dir / SUMMARY, json.dumps(summary, indent=2))
    log.info("wrote %s", run_dir / SUMMARY)


def _wait_until_over(core: Core, exchanges: int, stopped: threading.Event, write_status: Callable[[], None]) -> None:
    finished_at: float | None = None
    while not stopped.wait(0.05) and core.failure is None:
        write_status()
        if core.finished(exchanges):
            finished_at = finished_at or time.monotonic()
            if core.all_gone() or time.monotonic() > finished_at + LEAVE_TIMEOUT:
                return
