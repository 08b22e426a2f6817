"""Starts server and workers as processes on this host, restarts those that die, and summarizes the run."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from laconic.cluster import checkpoint
from laconic.errors import ConfigError, FileError, LaconicError
from laconic.train.data_shards import Shards
from laconic.train.devices import device_of
from laconic.train.metrics import write_records
from laconic.train.run import (
    CHECKPOINTS,
    CONFIG,
    REPORTS,
    SERVER,
    SUMMARY,
    Config,
    server_file,
    trainable,
    write_atomically,
)
from laconic.train.supervision import SUPERVISED
from laconic.train.task import Task

__all__ = ["launch"]

log = logging.getLogger("laconic")

FINAL_EXIT_CODES = {"server": (1, 2), "worker": (2,)}
"""Exit codes after which a restart is useless; a worker that exits with 1 may only have lost its server."""

CHECKPOINT_TIMEOUT = 30.0
"""Seconds that a server may take for its last checkpoint."""

Report = dict[str, Any]


def launch(
    runs: Mapping[Path, Config], *, resume: bool = False, restarts: int = 3, device: str = "cpu",
    certs: Path | None = None, on_reports: Callable[[list[Report]], None] | None = None,
    on_start: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train one run after the other with the same processes on this host; return a summary of each run.

    Args:
        runs: Configurations by folder; all have the same number of workers and servers.
        resume: Continue the runs in these folders.
        restarts: How often a process that dies is restarted.
        device: Where workers train and encode: ``cpu``, ``cuda`` or ``auto``.
        certs: Certificates of server and workers, if they shall use TLS, which they need not on one host.
        on_reports: Called repeatedly with the newest report of each worker in each run.
        on_start: Called repeatedly, until there are reports, with what the launcher waits for.
    """
    device_of(device)
    tasks = {}
    for run_dir, config in runs.items():
        tasks[run_dir] = config.task()  # errors of data and model are raised here, once
        config.parts(trainable(tasks[run_dir].model))
        config.subspace_state(tasks[run_dir])
        if resume:
            if Config.load(run_dir) != config:
                raise ConfigError(f"{run_dir} has another configuration: resume it with the same flags")
        else:
            if (run_dir / CONFIG).exists():
                raise FileError(f"{run_dir} holds a run already: choose another --run-dir, or --resume it")
            config.save(run_dir)
        for server in range(config.servers):
            (run_dir / server_file(SERVER, server)).unlink(missing_ok=True)
    first = next(iter(runs.values()))
    with _running(list(runs), device, certs) as processes:
        for index in range(first.servers):
            processes.start(f"server {index}", resume=resume)
        for number in range(first.job.workers):
            processes.start(f"worker {number}")
        processes.supervise(restarts, on_reports, on_start)
    summaries = []
    for run_dir, config in runs.items():
        summary = _summary(config, tasks[run_dir], run_dir) | {"restarts": processes.num_restarts}
        shards = Shards(tasks[run_dir].num_train, config.job.workers, config.batch, config.job.seed)
        write_records(
            config, run_dir, summary, mode=config.job.mode, every=config.job.every,
            numel=tasks[run_dir].dense_numel, iterations_per_epoch=shards.iterations_per_epoch,
        )  # fmt: skip
        summaries.append(summary)
    return summaries


class _Processes:
    """The server and worker processes of runs; they end with the launcher."""

    def __init__(self, run_dirs: list[Path], device: str, certs: Path | None) -> None:
        self._run_dirs, self._device, self._certs = run_dirs, device, certs
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._reports: dict[tuple[str, int, str], Report] = {}
        """The newest report by process name, number of its restarts, and run."""
        self._restarts: dict[str, int] = {}
        self._readers: list[threading.Thread] = []

    @property
    def num_restarts(self) -> int:
        return sum(self._restarts.values())

    def start(self, name: str, *, resume: bool = False, port: int = 0) -> None:
        role, _, number = name.partition(" ")
        arguments = [role, *map(str, self._run_dirs)]
        if role == "server":
            arguments += ["--index", number, "--port", str(port), *(["--resume"] if resume else [])]
        else:
            arguments += ["--worker", number, "--device", self._device]
        arguments += ["--certs", str(self._certs)] if self._certs is not None else []
        restart = self._restarts[name] = self._restarts.get(name, -1) + 1
        with _without_interrupts():
            process = subprocess.Popen(
                [sys.executable, "-m", "laconic", *arguments], stdout=subprocess.PIPE, text=True, env=_environment()
            )
        self._processes[name] = process
        reader = threading.Thread(target=self._read, args=(name, restart, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, name: str, restart: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                try:
                    report = json.loads(line)
                    self._reports[name, restart, report["run_dir"]] = report
                except (ValueError, KeyError, TypeError):
                    log.info("%s: %s", name, line.rstrip())

    def supervise(
        self, restarts: int, on_reports: Callable[[list[Report]], None] | None, on_start: Callable[[str], None] | None
    ) -> None:
        """Wait until all servers have ended; restart processes that die, each time after a longer delay."""
        due: dict[str, float] = {}
        while any(process.poll() != 0 for process in self._servers()):
            time.sleep(0.05)
            if on_reports is not None and self._reports:
                on_reports(self._newest_reports())
            elif on_start is not None:
                on_start(self._awaited())
            for name, process in list(self._processes.items()):
                if process.poll() not in (None, 0):
                    self._restart(name, process, restarts, due)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):  # its work is done
                process.wait(10)
        self._finish_reading()
        if on_reports is not None and self._reports:
            on_reports(self._newest_reports())

    def _awaited(self) -> str:
        """Return which processes have not started yet: servers write their address, workers report."""
        servers, workers = len(self._servers()), len(self._processes) - len(self._servers())
        listening = sum((self._run_dirs[0] / server_file(SERVER, index)).exists() for index in range(servers))
        if listening < servers:
            return f"starting {servers} server{'s' * (servers != 1)}"
        return f"starting {workers} worker{'s' * (workers != 1)}"

    def _servers(self) -> list[subprocess.Popen[str]]:
        return [process for name, process in self._processes.items() if name.startswith("server")]

    def _newest_reports(self) -> list[Report]:
        """Return the newest report of each worker and run."""
        newest: dict[tuple[str, str], Report] = {}
        for (name, _, run_dir), report in list(self._reports.items()):
            newest[name, run_dir] = report
        return list(newest.values())

    def _restart(self, name: str, process: subprocess.Popen[str], restarts: int, due: dict[str, float]) -> None:
        code = process.returncode
        final = code in FINAL_EXIT_CODES[name.partition(" ")[0]]
        if final or self._restarts[name] >= restarts:
            times = self._restarts[name] + 1
            repeated = f" {times} times, the last time" if times > 1 else ""
            advice = "see its message above" if final else "continue with --resume"
            raise LaconicError(f"{name} has died{repeated} with exit code {code}: {advice}")
        if name not in due:
            wait = 0.2 * 2 ** self._restarts[name]
            log.warning("%s has died with exit code %s: restart in %.1f s", name, code, wait)
            due[name] = time.monotonic() + wait
        elif time.monotonic() >= due[name]:
            del due[name]
            self.start(name, resume=True, port=self._port(name))
            if name.startswith("server"):  # it may resume at an exchange that its workers had already passed
                for other, ended in list(self._processes.items()):
                    if other.startswith("worker") and ended.poll() == 0:
                        self.start(other)

    def _port(self, name: str) -> int:
        """Return the port of a server's previous process, so that its workers find it again."""
        role, _, number = name.partition(" ")
        if role == "server":
            for run_dir in reversed(self._run_dirs):
                try:
                    values = json.loads((run_dir / server_file(SERVER, int(number))).read_text(encoding="utf-8"))
                    return int(values["address"].rpartition(":")[2])
                except (OSError, ValueError, KeyError):
                    continue
        return 0

    def stop(self) -> None:
        """End all processes: workers at once, servers after a last checkpoint. A second Ctrl-C kills them, too."""
        try:
            for name in sorted(self._processes, reverse=True):  # workers first: they need not see their server end
                if self._processes[name].poll() is None:
                    self._processes[name].terminate()
            self._wait("worker", 1.0)
            self._wait("server", CHECKPOINT_TIMEOUT)
        except KeyboardInterrupt:
            for process in self._processes.values():
                process.kill()
            raise
        finally:
            self._finish_reading()
            self._save_reports()

    def _wait(self, role: str, seconds: float) -> None:
        """Wait for the processes of a role that were signalled to end, and kill those that take longer."""
        until = time.monotonic() + seconds
        for name, process in self._processes.items():
            if name.startswith(role):
                try:
                    process.wait(max(until - time.monotonic(), 0))
                except subprocess.TimeoutExpired:
                    if role == "server":
                        log.warning("%s did not save a checkpoint in %.0f s and is killed", name, seconds)
                    process.kill()
                    process.wait()

    def _save_reports(self) -> None:
        """Append the last reports of all processes to the run's folder: a resumed run adds them to its counts."""
        for run_dir in self._run_dirs:
            reports = [report for (_, _, folder), report in self._reports.items() if folder == str(run_dir)]
            try:
                if reports and (run_dir / CONFIG).exists():
                    with (run_dir / REPORTS).open("a", encoding="utf-8") as out:
                        out.writelines(json.dumps(report) + "\n" for report in reports)
            except OSError as error:  # the disk is full: report the error that ended the run
                log.warning("cannot save the workers' reports: %s", error.strerror)

    def _finish_reading(self) -> None:
        for reader in self._readers:
            reader.join(5)


@contextmanager
def _running(run_dirs: list[Path], device: str, certs: Path | None) -> Iterator[_Processes]:
    processes = _Processes(run_dirs, device, certs)
    try:
        yield processes
    finally:
        processes.stop()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start processes that do not receive Ctrl-C, from their first instruction on: the launcher ends them."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by what is started
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _environment() -> dict[str, str]:
    """Return the environment of the processes: one thread each, so that they do not compete for cores."""
    return {"OMP_NUM_THREADS": "1", **os.environ, SUPERVISED: "1"}


# ---------------------------------------------------------------------------------------------------------- summary


def _summary(config: Config, task: Task, run_dir: Path) -> dict[str, Any]:
    """Summarize the reports of all worker processes; bytes include those that were sent again."""
    reports = [json.loads(line) for line in (run_dir / REPORTS).read_text(encoding="utf-8").splitlines()]
    slots = _final_slots(config, run_dir)
    config.restore(task, slots["parameter"], slots["resident"], config.exchanges)
    wire = sum(report["bytes_sent"] + report["bytes_received"] for report in reports)
    raw = 8 * task.dense_numel * config.job.workers * config.iterations
    workers = {report["worker"] for report in reports}

    def slowest(key: str) -> float:
        """Return the seconds of the worker with the most."""
        return max((sum(r[key] for r in reports if r["worker"] == worker) for worker in workers), default=0.0)

    summary = {
        "method": config.method, "model": config.model, "data": config.data, "workers": config.job.workers,
        "servers": config.servers, "iterations": config.iterations, "codec_push": config.job.push,
        "codec_pull": config.job.pull, **({"layers": config.layers} if config.layers else {}), **task.evaluate(),
        "wire_bytes_per_iteration": wire / config.iterations, "bytes_saved": raw - wire,
        "compute_s": slowest("compute"), "encode_s": slowest("encode"), "communication_s": slowest("communication"),
        "overlapped_s": slowest("overlapped"), "apply_s": slowest("apply"), "total_s": slowest("total_s"),
    }  # fmt: skip
    write_atomically(run_dir / SUMMARY, json.dumps(summary, indent=2))
    return summary


def _final_slots(config: Config, run_dir: Path) -> dict[str, dict[str, Tensor]]:
    """Return the slots of all servers from their last checkpoints, and the state of subspaces."""
    slots: dict[str, dict[str, Tensor]] = {"parameter": {}, "resident": {}}
    for server in range(config.servers):
        latest = checkpoint.load_latest(run_dir / server_file(CHECKPOINTS, server))
        if latest is None:
            raise FileError(f"{run_dir} has no checkpoint: the run has failed")
        for key, x in latest.tensors.items():
            part, _, name = key.partition("/")
            if part in slots:
                slots[part][name] = x
    return slots
