"""``laconic train``: server and workers as processes of this host, watched, started again, and summed up."""

from __future__ import annotations

import json
import logging
import os
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
from laconic.train.metrics import keep_records
from laconic.train.roles import SUPERVISED
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
from laconic.train.task import Task

__all__ = ["launch"]

log = logging.getLogger("laconic")

FINAL = {"server": (1, 2), "worker": (2,)}
"""Exit codes of a role that has said what is wrong and would say so again; a worker may only have missed its server."""

Report = dict[str, Any]


def launch(
    runs: Mapping[Path, Config],
    *,
    resume: bool = False,
    restarts: int = 3,
    device: str = "cpu",
    on_reports: Callable[[list[Report]], None] | None = None,
) -> list[dict[str, Any]]:
    """Server and workers on this host, one run after the other in the same processes; a summary of each.

    Args:
        runs: Configurations by folder; all with as many workers and servers.
        resume: Go on with what is in the folders.
        restarts: How often a process that dies is started again.
        device: Where workers train and encode: ``cpu``, ``cuda``, or ``auto``.
        on_reports: Called repeatedly with the newest report of each worker in each run.
    """
    device_of(device)
    tasks = {}
    for run_dir, config in runs.items():
        tasks[run_dir] = config.task()  # what is wrong with data or model is said here, once
        config.parts(trainable(tasks[run_dir].model))
        config.residents(tasks[run_dir])
        if resume:
            if Config.load(run_dir) != config:
                raise ConfigError(f"{run_dir} is a run of another configuration: resume it with the same flags")
        else:
            if (run_dir / CONFIG).exists():
                raise FileError(f"{run_dir} holds a run already: choose another --run-dir, or --resume it")
            config.save(run_dir)
        for server in range(config.servers):
            (run_dir / server_file(SERVER, server)).unlink(missing_ok=True)
    first = next(iter(runs.values()))
    with _roles(list(runs), device) as roles:
        for index in range(first.servers):
            roles.start(f"server {index}", resume=resume)
        for number in range(first.job.workers):
            roles.start(f"worker {number}")
        roles.watch(restarts, on_reports)
    found = []
    for run_dir, config in runs.items():
        summary = _summary(config, tasks[run_dir], run_dir) | {"restarts": roles.started_again}
        shards = Shards(tasks[run_dir].num_train, config.job.workers, config.batch, config.job.seed)
        keep_records(
            config, run_dir, summary, mode=config.job.mode, every=config.job.every,
            numel=tasks[run_dir].dense_numel, iterations_per_epoch=shards.iterations_per_epoch,
        )  # fmt: skip
        found.append(summary)
    return found


class _Roles:
    """The processes of runs. None outlives its launcher."""

    def __init__(self, run_dirs: list[Path], device: str) -> None:
        self._run_dirs, self._device = run_dirs, device
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._lines: dict[tuple[str, int, str], Report] = {}
        """The newest report of each life of a worker about each run."""
        self._starts: dict[str, int] = {}
        self._readers: list[threading.Thread] = []

    @property
    def started_again(self) -> int:
        return sum(self._starts.values())

    def start(self, name: str, *, resume: bool = False, port: int = 0) -> None:
        role, _, number = name.partition(" ")
        arguments = [role, *map(str, self._run_dirs)]
        if role == "server":
            arguments += ["--index", number, "--port", str(port), *(["--resume"] if resume else [])]
        else:
            arguments += ["--worker", number, "--device", self._device]
        life = self._starts[name] = self._starts.get(name, -1) + 1
        process = subprocess.Popen(
            [sys.executable, "-m", "laconic", *arguments], stdout=subprocess.PIPE, text=True, env=_environment()
        )
        self._processes[name] = process
        reader = threading.Thread(target=self._read, args=(name, life, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, name: str, life: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                try:
                    report = json.loads(line)
                    self._lines[name, life, report["run_dir"]] = report
                except (ValueError, KeyError, TypeError):
                    log.info("%s: %s", name, line.rstrip())

    def watch(self, restarts: int, on_reports: Callable[[list[Report]], None] | None) -> None:
        """Until all servers have ended; who died is started again, each time after a longer wait."""
        due: dict[str, float] = {}
        while any(process.poll() != 0 for process in self._servers()):
            time.sleep(0.05)
            if on_reports is not None and self._lines:
                on_reports(self._newest())
            for name, process in list(self._processes.items()):
                if process.poll() not in (None, 0):
                    self._start_again(name, process, restarts, due)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):  # what it had to do is done
                process.wait(10)
        self._finish_reading()
        if on_reports is not None and self._lines:
            on_reports(self._newest())

    def _servers(self) -> list[subprocess.Popen[str]]:
        return [process for name, process in self._processes.items() if name.startswith("server")]

    def _newest(self) -> list[Report]:
        """Of each worker and run the line of its last life."""
        newest: dict[tuple[str, str], Report] = {}
        for (name, _, run_dir), report in list(self._lines.items()):
            newest[name, run_dir] = report
        return list(newest.values())

    def _start_again(self, name: str, process: subprocess.Popen[str], restarts: int, due: dict[str, float]) -> None:
        code = process.returncode
        said = code in FINAL[name.partition(" ")[0]]
        if said or self._starts[name] >= restarts:
            times = self._starts[name] + 1
            how_often = f" {times} times, the last time" if times > 1 else ""
            advice = "what it said is above" if said else "go on with --resume"
            raise LaconicError(f"{name} has died{how_often} with exit code {code}: {advice}")
        if name not in due:
            wait = 0.2 * 2 ** self._starts[name]
            log.warning("%s has died with exit code %s: started again in %.1f s", name, code, wait)
            due[name] = time.monotonic() + wait
        elif time.monotonic() >= due[name]:
            del due[name]
            self.start(name, resume=True, port=self._port(name))
            if name.startswith("server"):  # it may have to go back to before its workers had done all
                for other, ended in list(self._processes.items()):
                    if other.startswith("worker") and ended.poll() == 0:
                        self.start(other)

    def _port(self, name: str) -> int:
        """Where a server listened, so that its workers find it again."""
        role, _, number = name.partition(" ")
        if role == "server":
            for run_dir in reversed(self._run_dirs):
                try:
                    told = json.loads((run_dir / server_file(SERVER, int(number))).read_text(encoding="utf-8"))
                    return int(told["address"].rpartition(":")[2])
                except (OSError, ValueError, KeyError):
                    continue
        return 0

    def stop(self) -> None:
        """Workers first: they need not see their server go."""
        for role in ("worker", "server"):
            mine = [process for name, process in self._processes.items() if name.startswith(role)]
            for process in mine:
                if process.poll() is None:
                    process.terminate()
            for process in mine:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._finish_reading()
        self._keep_reports()

    def _keep_reports(self) -> None:
        """What workers told last, in the run's folder: a run that is resumed counts what came before, too."""
        for run_dir in self._run_dirs:
            mine = [report for (_, _, where), report in self._lines.items() if where == str(run_dir)]
            try:
                if mine and (run_dir / CONFIG).exists():
                    with (run_dir / REPORTS).open("a", encoding="utf-8") as out:
                        out.writelines(json.dumps(report) + "\n" for report in mine)
            except OSError as error:  # a disk that is full: what ended the run is what to tell
                log.warning("cannot keep what workers told: %s", error.strerror)

    def _finish_reading(self) -> None:
        for reader in self._readers:
            reader.join(5)


@contextmanager
def _roles(run_dirs: list[Path], device: str) -> Iterator[_Roles]:
    roles = _Roles(run_dirs, device)
    try:
        yield roles
    finally:
        roles.stop()


def _environment() -> dict[str, str]:
    """One thread a process: as many as there are cores would fight."""
    return {"OMP_NUM_THREADS": "1", **os.environ, SUPERVISED: "1"}


# ---------------------------------------------------------------------------------------------------------- summary


def _summary(config: Config, task: Task, run_dir: Path) -> dict[str, Any]:
    """Of all lives of all workers: bytes are what was sent, also what was sent again."""
    reports = [json.loads(line) for line in (run_dir / REPORTS).read_text(encoding="utf-8").splitlines()]
    found = _trained(config, run_dir)
    config.restore(task, found["parameter"], found["resident"], config.exchanges)
    wire = sum(report["bytes_sent"] + report["bytes_received"] for report in reports)
    raw = 8 * task.dense_numel * config.job.workers * config.iterations
    workers = {report["worker"] for report in reports}

    def worst(key: str) -> float:
        """Of the worker with the most."""
        return max((sum(r[key] for r in reports if r["worker"] == worker) for worker in workers), default=0.0)

    summary = {
        "method": config.method,
        "model": config.model,
        "data": config.data,
        "workers": config.job.workers,
        "servers": config.servers,
        "iterations": config.iterations,
        "codec_push": config.job.push,
        "codec_pull": config.job.pull,
        **({"layers": config.layers} if config.layers else {}),
        **task.evaluate(),
        "wire_bytes_per_iteration": wire / config.iterations,
        "bytes_saved": raw - wire,
        "compute_s": worst("compute"),
        "encode_s": worst("encode"),
        "communication_s": worst("communication"),
        "overlapped_s": worst("overlapped"),
        "apply_s": worst("apply"),
        "total_s": worst("total_s"),
    }
    write_atomically(run_dir / SUMMARY, json.dumps(summary, indent=2))
    return summary


def _trained(config: Config, run_dir: Path) -> dict[str, dict[str, Tensor]]:
    """The slots of all servers at the end, and what belongs to them."""
    slots: dict[str, dict[str, Tensor]] = {"parameter": {}, "resident": {}}
    for server in range(config.servers):
        found = checkpoint.load_latest(run_dir / server_file(CHECKPOINTS, server))
        if found is None:
            raise FileError(f"{run_dir} has no checkpoint: the run did not end well")
        for key, x in found.tensors.items():
            part, _, name = key.partition("/")
            if part in slots:
                slots[part][name] = x
    return slots
