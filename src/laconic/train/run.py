"""A run: a folder with its configuration, and the three roles that share it: server, worker, launcher.

``laconic train`` writes the configuration, starts ``laconic server`` and ``laconic worker`` as processes of their own
on this host, starts a worker again that has died, and sums up. The same two commands run on different hosts.
"""

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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from laconic.cluster import checkpoint
from laconic.cluster.job import Job, Slots
from laconic.codecs import parse
from laconic.errors import ConfigError, FileError, LaconicError
from laconic.frames import max_nbytes
from laconic.optim import SGD, Schedule
from laconic.train.shards import Shards
from laconic.train.task import Task, build_task
from laconic.train.worker import Progress, Worker

__all__ = ["Config", "launch", "serve", "work"]

log = logging.getLogger("laconic")

CONFIG, SERVER, EVENTS, SUMMARY, CHECKPOINTS = (
    "config.json",
    "server.json",
    "events.jsonl",
    "summary.json",
    "checkpoints",
)


@dataclass(frozen=True)
class Config:
    """All that decides a run. Two runs of equal configurations end with equal weights when they are synchronous.

    Args:
        model: Name of the model.
        data: Name of the data set.
        data_dir: Where its files lie; None for embedded data or the environment's folder.
        script: ``file.py:function`` that builds the task instead of model and data.
        batch: Examples of a worker in an iteration.
        iterations: How many there are.
        method: The method that the job's options came from, for the record.
        schedule: How the learning rate changes.
        warmup: Iterations that lead up to it.
        holdout: Fraction of the training examples that only judge.
        job: What server and workers agree on.
    """

    model: str = "mlp"
    data: str = "digits"
    data_dir: str | None = None
    script: str | None = None
    batch: int = 64
    iterations: int = 200
    method: str = "1"
    schedule: str = "constant"
    warmup: int = 0
    holdout: float = 0.05
    job: Job = field(default_factory=Job)

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.iterations % self.job.every:
            raise ConfigError(
                f"iterations must be a multiple of every ({self.job.every}), at least one; got {self.iterations}"
            )

    def task(self) -> Task:
        folder = Path(self.data_dir) if self.data_dir else None
        return build_task(
            self.model,
            self.data,
            data_dir=folder,
            seed=self.job.seed,
            holdout=self.holdout,
            script=self.script,
        )

    def rates(self) -> Schedule:
        return Schedule(self.job.lr, self.schedule, warmup=self.warmup, iterations=self.iterations)

    @property
    def exchanges(self) -> int:
        return self.iterations // self.job.every

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Config:
        known = {one.name for one in fields(cls)}
        if set(values) != known:
            raise ConfigError(f"a configuration has the fields {', '.join(sorted(known))}")
        return cls(**{**values, "job": Job.from_json(values["job"])})

    def save(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        _write_whole(run_dir / CONFIG, json.dumps(self.to_json(), indent=2))

    @classmethod
    def load(cls, run_dir: Path) -> Config:
        try:
            return cls.from_json(json.loads((run_dir / CONFIG).read_text(encoding="utf-8")))
        except OSError as error:
            raise FileError(f"{run_dir} is no run folder: it has no {CONFIG} ({error.strerror})") from None
        except (ValueError, TypeError, KeyError) as error:
            raise FileError(f"{run_dir / CONFIG} does not hold a configuration: {error}") from None


def _write_whole(path: Path, text: str) -> None:
    """All of it or nothing: readers poll for these files."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


# ----------------------------------------------------------------------------------------------------------- server


class History:
    """Events of a server as JSON lines: what happened, in order, for people and for the checkers of promises."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def __call__(self, event: dict[str, Any]) -> None:
        line = json.dumps({"at": round(time.time(), 6), **event})
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()


def serve(
    run_dir: Path, *, host: str = "127.0.0.1", port: int = 0, certs: Path | None = None, resume: bool = False
) -> None:
    """The server of a run, until all its exchanges are done and told, or SIGTERM.

    Args:
        run_dir: The run's folder.
        host: Where to listen; other than loopback needs certificates.
        port: 0 takes a free one.
        certs: The folder of ``laconic certs new``.
        resume: Go on from the newest checkpoint.
    """
    from laconic.cluster import security
    from laconic.cluster.core import Core
    from laconic.cluster.server import Server

    config = Config.load(run_dir)
    credentials = security.load_server(certs) if certs is not None else None
    security.require_tls(host, credentials)
    task = config.task()
    parameters = {name: p.detach().clone() for name, p in task.model.named_parameters() if p.requires_grad}
    optimizer = SGD(momentum=config.job.momentum, weight_decay=config.job.weight_decay)
    history = History(run_dir / EVENTS)
    core = Core(config.job, parameters, optimizer, config.rates(), history)
    folder = run_dir / CHECKPOINTS
    if resume and (found := checkpoint.load_latest(folder)) is not None:
        core.load(found.tensors, found.meta)
        history({"event": "resumed", "version": core.version})
        log.info("resumed at exchange %d from %s", core.version, found.path)

    def keep(version: int) -> None:
        if version % config.job.checkpoint_every == 0 or core.finished(config.exchanges):
            tensors, meta = core.state()
            checkpoint.save(folder, version, tensors, meta)
            history({"event": "checkpoint", "version": version})

    core.on_update(keep)
    if credentials is None:
        server = Server(core, f"{host}:{port}")
    else:
        job = credentials.identity.job
        server = Server(
            core,
            f"{host}:{port}",
            credentials=security.server_credentials(credentials),
            identify=lambda context: security.require_worker(context.auth_context(), job),
        )
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    _write_whole(run_dir / SERVER, json.dumps({"address": f"{host}:{server.port}", "pid": os.getpid()}))
    try:
        while not stopped.wait(0.05):
            if core.finished(config.exchanges) and core.all_gone():
                break
    finally:
        server.stop()
        history({"event": "stopped", "version": core.version, "received": server.traffic.received,
                 "sent": server.traffic.sent})  # fmt: skip
        tensors, meta = core.state()
        checkpoint.save(folder, core.version, tensors, meta)
        _write_whole(run_dir / SERVER, json.dumps({"done": True}))


# ----------------------------------------------------------------------------------------------------------- worker


def work(
    run_dir: Path, number: int, *, incarnation: int = 0, address: str | None = None, certs: Path | None = None
) -> None:
    """One worker of a run, from where the server says to the end."""
    from laconic.cluster import security
    from laconic.cluster.client import Client

    config = Config.load(run_dir)
    address = address or _address(run_dir)
    if address is None:
        return  # it is over: this process was started again late
    credentials = security.load_worker(certs, number) if certs is not None else None
    security.require_tls(address, credentials)
    task = config.task()
    parameters = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
    _, codec = parse(config.job.pull)
    limits = [max(max_nbytes("none", p), max_nbytes(codec, p)) for p in parameters.values()]
    client = Client(
        address,
        worker=number,
        incarnation=incarnation,
        slots=Slots.of(parameters),
        limits=limits,
        credentials=security.channel_credentials(credentials) if credentials is not None else None,
    )
    first, job = client.connect()
    shards = Shards(task.num_train, job.workers, config.batch, job.seed)
    worker = Worker(number, task, shards, job, config.rates(), client)
    worker.join()
    began = time.perf_counter()

    def tell(progress: Progress) -> None:
        line = {
            "run_dir": str(run_dir),
            "worker": number,
            "total_s": time.perf_counter() - began,
            **asdict(progress),
            **asdict(worker.times),
        }
        print(json.dumps(line), flush=True)

    worker.run(first, config.exchanges, tell)
    client.leave()
    client.close()


def _address(run_dir: Path, patience: float = 600.0) -> str | None:
    """Where the server of a run on this host listens, once it does; None when it has ended."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            told = json.loads((run_dir / SERVER).read_text(encoding="utf-8"))
            return None if told.get("done") else str(told["address"])
        except (OSError, ValueError, KeyError):
            time.sleep(0.02)
    raise FileError(f"no server of {run_dir} has told its address in {patience:.0f} s")


# --------------------------------------------------------------------------------------------------------- launcher


def launch(
    runs: Mapping[Path, Config],
    *,
    resume: bool = False,
    restarts: int = 3,
    tell: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Server and workers on this host, one run after the other in the same processes; a summary of each.

    Args:
        runs: Configurations by folder; all with as many workers.
        resume: Go on with what is in the folders.
        restarts: How often a worker that dies is started again.
        tell: Told the newest line of each worker about each run, again and again.
    """
    for run_dir, config in runs.items():
        if resume:
            if Config.load(run_dir) != config:
                raise ConfigError(f"{run_dir} is a run of another configuration: resume it with the same flags")
        else:
            if (run_dir / CONFIG).exists():
                raise FileError(f"{run_dir} holds a run already: choose another --run-dir, or --resume it")
            config.save(run_dir)
        (run_dir / SERVER).unlink(missing_ok=True)
    folders = [str(run_dir) for run_dir in runs]
    workers = next(iter(runs.values())).job.workers
    with _roles() as roles:
        roles.start("server", ["server", *folders, *(["--resume"] if resume else [])])
        for number in range(workers):
            roles.start(f"worker {number}", ["worker", *folders, "--worker", str(number)])
        reports = roles.watch(restarts, tell)
    return [
        _summary(config, run_dir, [line for line in reports if line["run_dir"] == str(run_dir)])
        for run_dir, config in runs.items()
    ]


class _Roles:
    """The processes of a run. None outlives its launcher."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._commands: dict[str, list[str]] = {}
        self._lines: dict[tuple[str, str], dict[str, Any]] = {}
        """The newest report of each worker about each run."""
        self._starts: dict[str, int] = {}
        self._readers: list[threading.Thread] = []

    def start(self, name: str, arguments: list[str]) -> None:
        self._commands[name] = arguments
        incarnation = self._starts[name] = self._starts.get(name, -1) + 1
        if name.startswith("worker"):
            arguments = [*arguments, "--incarnation", str(incarnation)]
        process = subprocess.Popen(
            [sys.executable, "-m", "laconic", *arguments], stdout=subprocess.PIPE, text=True, env=_environment()
        )
        self._processes[name] = process
        reader = threading.Thread(target=self._read, args=(name, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                try:
                    report = json.loads(line)
                    self._lines[name, report["run_dir"]] = report
                except (ValueError, KeyError, TypeError):
                    log.info("%s: %s", name, line.rstrip())

    def watch(self, restarts: int, tell: Callable[[list[dict[str, Any]]], None] | None) -> list[dict[str, Any]]:
        """Until the server has ended; a worker that died is started again, each time after a longer wait."""
        due: dict[str, float] = {}
        while (server := self._processes["server"]).poll() is None:
            time.sleep(0.05)
            if tell is not None and self._lines:
                tell(list(self._lines.values()))
            for name, process in list(self._processes.items()):
                code = process.poll()
                if name == "server" or code in (None, 0):
                    continue
                if self._starts[name] >= restarts:
                    raise LaconicError(f"{name} has died {restarts + 1} times, the last time with exit code {code}")
                if name not in due:
                    wait = 0.2 * 2 ** self._starts[name]
                    log.warning("%s has died with exit code %s: started again in %.1f s", name, code, wait)
                    due[name] = time.monotonic() + wait
                elif time.monotonic() >= due[name]:
                    del due[name]
                    self.start(name, self._commands[name])
        if server.returncode:
            raise LaconicError(f"the server has died with exit code {server.returncode}: go on with --resume")
        for process in self._processes.values():
            process.wait(10)
        self._finish_reading()
        return list(self._lines.values())

    def stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._finish_reading()

    def _finish_reading(self) -> None:
        for reader in self._readers:
            reader.join(5)


@contextmanager
def _roles() -> Iterator[_Roles]:
    roles = _Roles()
    try:
        yield roles
    finally:
        roles.stop()


def _environment() -> dict[str, str]:
    """One thread a process, as many as there are cores would fight."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


def _summary(config: Config, run_dir: Path, workers: list[dict[str, Any]]) -> dict[str, Any]:
    found = checkpoint.load_latest(run_dir / CHECKPOINTS)
    if found is None:
        raise FileError(f"{run_dir} has no checkpoint: the run did not end well")
    task = config.task()
    with torch.no_grad():
        for name, parameter in task.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(found.tensors[f"parameter/{name}"])
    wire = sum(report["bytes_sent"] + report["bytes_received"] for report in workers)
    worst: Callable[[str], float] = lambda key: max((report[key] for report in workers), default=0.0)  # noqa: E731
    summary = {
        "method": config.method,
        "model": config.model,
        "data": config.data,
        "workers": config.job.workers,
        "iterations": config.iterations,
        "codec_push": config.job.push,
        "codec_pull": config.job.pull,
        **task.evaluate(),
        "wire_bytes_per_iteration": wire / config.iterations,
        "compute_s": worst("compute"),
        "encode_s": worst("encode"),
        "communication_s": worst("communication"),
        "total_s": worst("total_s"),
    }
    _write_whole(run_dir / SUMMARY, json.dumps(summary, indent=2))
    return summary
