"""Whatever is wrong from outside ends in one clear line and an exit code, and leaves no process behind.

Commands run in processes of their own, forked from one that has imported torch already: that alone takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import BATCH, core_of
from test_faults import events_of, pids

from laconic.cluster import checkpoint
from laconic.cluster.client import Client, Patience
from laconic.cluster.job import Job, Slots
from laconic.cluster.protocol import json_message, read_json
from laconic.cluster.server import Server
from laconic.errors import LaconicError
from laconic.optim import Schedule
from laconic.train import Shards, launch
from laconic.train.run import CHECKPOINTS, CONFIG, SERVER, Config, trainable
from laconic.train.worker import Worker

FORKS = """
import json, os, sys, time
import torch, laconic.train.launch
from laconic.cli import main

def run(words, folder):
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = ["laconic", *words]
    try:
        main()
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)

commands = json.load(sys.stdin)
children = {}
for words, folder in commands:
    os.makedirs(folder)
    pid = os.fork()
    if not pid:
        try:
            run(words, folder)
        finally:
            os._exit(99)  # with a traceback
    children[pid] = folder
while children:
    pid, status = os.wait()
    with open(os.path.join(children.pop(pid), "code"), "w") as out:
        out.write(str(os.waitstatus_to_exitcode(status)))
"""


class Said:
    """How a command ended."""

    def __init__(self, folder: Path) -> None:
        self.code = int((folder / "code").read_text())
        self.out, self.err = ((folder / name).read_text() for name in ("out", "err"))

    def one_line(self, code: int, *words: str) -> None:
        assert self.code == code, self.err
        *before, line = self.err.strip().splitlines()
        assert line.startswith("laconic: ") and not self.out
        assert all("trying again in" in other for other in before), self.err
        for word in words:
            assert word in line, line


def mlp(**options: Any) -> Config:
    job = {"workers": 1, "lr": 0.05} | options.pop("job", {})
    return Config(**{"batch": BATCH, "iterations": 5, "job": Job(**job)} | options)


class Older(Server):
    """Hears every worker speak another protocol."""

    def hello(self, request: bytes, context: Any) -> bytes:
        return super().hello(json_message(read_json(request) | {"protocol": 99}), context)


@contextlib.contextmanager
def serving(config: Config, kind: type[Server] = Server) -> Iterator[int]:
    core = core_of(config.job, trainable(config.task().model), exchanges=config.exchanges)
    server = kind(core, "127.0.0.1:0")
    try:
        yield server.port
    finally:
        server.stop(0)


def stranger_checkpoint(run_dir: Path) -> None:
    """A checkpoint of another model, where the run's own should be."""
    core = core_of(Job(workers=1), {"other": torch.zeros(3)})
    checkpoint.save(run_dir / CHECKPOINTS, 0, *core.state())


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    """All commands at once; the servers that some of them meet are of this process."""
    folder = tmp_path_factory.mktemp("bad")
    runs = {name: folder / name for name in ("plain", "lenet", "resumed", "stranger")}
    for name, run_dir in runs.items():
        mlp(model="lenet5" if name in ("lenet", "resumed") else "mlp").save(run_dir)
    stranger_checkpoint(runs["stranger"])
    (folder / "empty").mkdir()
    (folder / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()[1]
    new = ("train", "--iterations", "5", "--batch", BATCH)
    worker = ("worker", "--worker", "0", "--patience", "1", "--server")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        serving(mlp()) as mlp_port,
        serving(mlp(), Older) as older_port,
    ):
        commands: dict[str, tuple[Any, ...]] = {
            "busy port": ("server", runs["plain"], "--port", taken.getsockname()[1]),
            "nobody": (*worker, f"127.0.0.1:{nobody}", runs["plain"]),
            "other model": (*worker, f"127.0.0.1:{mlp_port}", runs["lenet"]),
            "other version": (*worker, f"127.0.0.1:{older_port}", runs["plain"]),
            "no data": (*new, "--data", "mnist", "--data-dir", folder / "empty", "--run-dir", folder / "new-1"),
            "no workers": (*new, "--workers", "0", "--run-dir", folder / "new-2"),
            "resume of another": (*new, "--workers", "1", "--resume", "--run-dir", runs["resumed"]),
            "checkpoint of another": ("server", runs["stranger"], "--resume"),
            "below a file": (*new, "--run-dir", folder / "file" / "run"),
            "not writable": (*new, "--run-dir", "/proc/laconic/run"),
        }
        outputs = folder / "said"
        asked = [([str(word) for word in words], str(outputs / name)) for name, words in commands.items()]
        subprocess.run([sys.executable, "-c", FORKS], input=json.dumps(asked), text=True, timeout=120, check=True)
        found = {name: Said(outputs / name) for name in commands}
    assert not (folder / "new-1").exists() and not (folder / "new-2").exists()
    for role in ("server", "worker", "train"):
        assert not [pid for run_dir in runs.values() for pid in pids(role, run_dir)]
    return found


@pytest.mark.parametrize(
    "case, code, words",
    [
        ("busy port", 2, ["cannot listen on 127.0.0.1:", "in use", "--port"]),
        ("nobody", 1, ["no server at 127.0.0.1:", "is it running"]),
        ("other model", 1, ["another model", "--model"]),
        ("other version", 1, ["protocol 99", "the server 1", "install the same version"]),
        ("no data", 1, ["train-images"]),
        ("no workers", 2, ["workers must be an integer of at least 1, got 0"]),
        ("resume of another", 2, ["another configuration", "same flags"]),
        ("checkpoint of another", 1, ["another model"]),
        ("below a file", 1, ["is a file", "--run-dir"]),
        ("not writable", 1, ["/proc"]),
    ],
)
def test_a_line_says_what_is_wrong(said: dict[str, Said], case: str, code: int, words: list[str]) -> None:
    said[case].one_line(code, *words)


# --------------------------------------------------------------------------------------------------------- full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("no mount (needs root)")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no mount (needs root)")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Until nothing more fits."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while True:
            out.write(b"\0" * 4096)
    return filler


def test_a_full_disk_stops_checkpoints_and_not_the_training_and_is_told_at_the_end(small_disk: Path) -> None:
    run_dir = small_disk / "run"
    config = mlp(iterations=12, job={"checkpoint_every": 4})
    config.save(run_dir)
    server = subprocess.Popen(
        [sys.executable, "-m", "laconic", "server", str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert eventually(lambda: (run_dir / SERVER).exists() or server.poll() is not None, 60)
        told = json.loads((run_dir / SERVER).read_text())
        task = config.task()
        client = Client(
            told["address"],
            worker=0,
            incarnation=0,
            slots=Slots.of(trainable(task.model)),
            limits=config.job.pull_limits(trainable(task.model).values()),
            patience=Patience(total=5),
        )
        shards = Shards(task.num_train, 1, BATCH, 0)
        worker = Worker(0, task, shards, config.job, Schedule(0.05), client)
        filler: list[Path] = []
        worker.run(12, lambda progress: filler.append(fill(small_disk)) if progress.iteration == 6 else None)
        client.leave()
        client.close()
        _, complaint = server.communicate(timeout=30)
    finally:
        server.kill()
        server.communicate()
    assert server.returncode == 1 and "Traceback" not in complaint
    last = complaint.strip().splitlines()[-1]
    assert last.startswith("laconic: cannot write the checkpoint of step 12") and "No space left" in last
    found = checkpoint.load_latest(run_dir / CHECKPOINTS)
    assert found is not None and found.meta["version"] == 4
    failed = [e["version"] for e in events_of(run_dir) if e["event"] == "checkpoint_failed"]
    assert failed[:1] in ([8], []) and "checkpoint of step 8" in complaint  # the history is on the same disk
    filler[0].unlink()
    assert checkpoint.save(run_dir / CHECKPOINTS, 12, found.tensors, found.meta).exists()
    assert not pids("server", run_dir)


def eventually(condition: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


# --------------------------------------------------------------------------------------------------------- launcher

STUB = """#!{python}
import pathlib, sys, time
role, folder = sys.argv[3], pathlib.Path(sys.argv[4])
lives = len(list(folder.glob(role + "-*")))
(folder / f"{{role}}-{{lives}}").touch()
if role == "server":
    end = time.monotonic() + 10
    while not (folder / f"worker-{{lives}}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)
    sys.exit({codes}[lives])
"""


@pytest.mark.parametrize(
    "codes, word",
    [([3, 0], None), ([3, 3, 3], "server 0 has died 3 times"), ([1], "see its message above")],
    ids=["once", "always", "with a word"],
)
def test_a_server_that_fails_when_its_workers_are_done_gets_them_again(
    codes: list[int], word: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last checkpoint may not be the end: without workers it would wait for ever."""
    stub, run_dir = tmp_path / "stub", tmp_path / "run"
    stub.write_text(STUB.format(python=sys.executable, codes=codes))
    stub.chmod(0o755)
    run_dir.mkdir()
    (run_dir / CONFIG).touch()
    module = sys.modules[launch.__module__] if callable(launch) else launch
    monkeypatch.setattr(module, "sys", SimpleNamespace(executable=str(stub)))
    failed: list[BaseException] = []

    def watch() -> None:
        try:
            with module._running([run_dir], "cpu") as processes:
                processes.start("server 0")
                processes.start("worker 0")
                processes.supervise(2, None)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert len(list(run_dir.glob("worker-*"))) == len(codes) == len(list(run_dir.glob("server-*")))
    if word is None:
        assert not failed
    else:
        (error,) = failed
        assert isinstance(error, LaconicError) and word in str(error)
    assert not [*pids("server", run_dir), *pids("worker", run_dir)]
