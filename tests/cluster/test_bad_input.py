"""Bad input to the commands of a run: one line, an exit code, and no process left behind.

Commands are forks of a process that has imported torch already, because the import takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
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
from waiting import eventually, in_threads

FORKS = """
import json, os, sys, time
import torch, laconic.train.launch
from laconic.cli import main

def run(arguments, folder):
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = ["laconic", *arguments]
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
for arguments, folder in commands:
    os.makedirs(folder)
    pid = os.fork()
    if not pid:
        try:
            run(arguments, folder)
        finally:
            os._exit(99)  # with a traceback
    children[pid] = folder
while children:
    pid, status = os.wait()
    with open(os.path.join(children.pop(pid), "code"), "w") as out:
        out.write(str(os.waitstatus_to_exitcode(status)))
"""


class Result:
    """Exit code and output of a command."""

    def __init__(self, folder: Path) -> None:
        self.code = int((folder / "code").read_text())
        self.out, self.err = ((folder / name).read_text() for name in ("out", "err"))

    def check_one_line(self, code: int, *words: str) -> None:
        assert self.code == code, self.err
        *before, line = self.err.strip().splitlines()
        assert line.startswith("laconic: ") and not self.out
        assert all("trying again in" in other for other in before), self.err
        for word in words:
            assert word in line, line


def mlp(**options: Any) -> Config:
    job = {"workers": 1, "lr": 0.05} | options.pop("job", {})
    return Config(**{"batch": BATCH, "iterations": 5, "job": Job(**job)} | options)


class OtherProtocolServer(Server):
    """A server to which every worker seems to use another protocol."""

    def hello(self, messages: Iterator[bytes], call: Any) -> Iterator[bytes]:
        return super().hello((json_message(read_json(message) | {"protocol": 99}) for message in messages), call)


@contextlib.contextmanager
def serving(config: Config, kind: type[Server] = Server) -> Iterator[int]:
    server = kind(core_of(config.job, trainable(config.task().model), exchanges=config.exchanges), "127.0.0.1:0")
    try:
        yield server.port
    finally:
        server.stop(0)


def save_checkpoint_of_another_model(run_dir: Path) -> None:
    core = core_of(Job(workers=1), {"other": torch.zeros(3)})
    checkpoint.save(run_dir / CHECKPOINTS, 0, *core.state())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Run all commands at once, some against servers of this process."""
    folder = tmp_path_factory.mktemp("bad")
    runs = {name: folder / name for name in ("plain", "lenet", "resumed", "stranger")}
    for name, run_dir in runs.items():
        mlp(model="lenet5" if name in ("lenet", "resumed") else "mlp").save(run_dir)
    save_checkpoint_of_another_model(runs["stranger"])
    (folder / "empty").mkdir()
    (folder / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as free:
        unused_port = free.getsockname()[1]
    new = ("train", "--iterations", "5", "--batch", BATCH)
    worker = ("worker", "--worker", "0", "--patience", "1", "--server")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        serving(mlp()) as mlp_port,
        serving(mlp(), OtherProtocolServer) as older_port,
    ):
        commands: dict[str, tuple[Any, ...]] = {
            "busy port": ("server", runs["plain"], "--port", taken.getsockname()[1]),
            "no server": (*worker, f"127.0.0.1:{unused_port}", runs["plain"]),
            "other model": (*worker, f"127.0.0.1:{mlp_port}", runs["lenet"]),
            "other version": (*worker, f"127.0.0.1:{older_port}", runs["plain"]),
            "no data": (*new, "--data", "mnist", "--data-dir", folder / "empty", "--run-dir", folder / "new-1"),
            "no workers": (*new, "--workers", "0", "--run-dir", folder / "new-2"),
            "resume of another": (*new, "--workers", "1", "--resume", "--run-dir", runs["resumed"]),
            "checkpoint of another": ("server", runs["stranger"], "--resume"),
            "below a file": (*new, "--run-dir", folder / "file" / "run"),
            "not writable": (*new, "--run-dir", "/proc/laconic/run"),
        }
        outputs = folder / "outputs"
        requests = [([str(word) for word in words], str(outputs / name)) for name, words in commands.items()]
        subprocess.run([sys.executable, "-c", FORKS], input=json.dumps(requests), text=True, timeout=120, check=True)
        results = {name: Result(outputs / name) for name in commands}
    assert not (folder / "new-1").exists() and not (folder / "new-2").exists()
    for role in ("server", "worker", "train"):
        assert not [pid for run_dir in runs.values() for pid in pids(role, run_dir)]
    return results


@pytest.mark.parametrize("case, code, words", [
    ("busy port", 2, ["cannot listen on 127.0.0.1:", "in use", "--port"]),
    ("no server", 1, ["no server at 127.0.0.1:", "is it running"]), ("other model", 1, ["another model", "--model"]),
    ("other version", 1, ["protocol 99", "the server 1", "install the same version"]), ("no data", 1, ["train-images"]),
    ("no workers", 2, ["workers must be an integer of at least 1, got 0"]),
    ("resume of another", 2, ["another configuration", "same flags"]), ("checkpoint of another", 1, ["another model"]),
    ("below a file", 1, ["is a file", "--run-dir"]), ("not writable", 1, ["/proc"]),
])  # fmt: skip
def test_bad_input_is_reported_in_one_line(results: dict[str, Result], case: str, code: int, words: list[str]) -> None:
    results[case].check_one_line(code, *words)


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
    """Write a file until the disk is full."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while True:
            out.write(b"\0" * 4096)
    return filler


def test_full_disk_stops_checkpoints_but_not_training_and_ends_in_an_error(small_disk: Path) -> None:
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
        address = json.loads((run_dir / SERVER).read_text())["address"]
        task = config.task()
        client = Client(
            address, worker=0, incarnation=0, slots=Slots.of(trainable(task.model)),
            limits=config.job.pull_limits(trainable(task.model).values()), patience=Patience(total=5),
        )  # fmt: skip
        shards = Shards(task.num_train, 1, BATCH, 0)
        worker = Worker(0, task, shards, config.job, Schedule(0.05), client)
        filler: list[Path] = []
        worker.run(12, lambda progress: filler.append(fill(small_disk)) if progress.iteration == 6 else None)
        client.leave()
        client.close()
        _, stderr = server.communicate(timeout=30)
    finally:
        server.kill()
        server.communicate()
    assert server.returncode == 1 and "Traceback" not in stderr
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("laconic: cannot write the checkpoint of step 12") and "No space left" in last
    newest = checkpoint.load_latest(run_dir / CHECKPOINTS)
    assert newest is not None and newest.meta["version"] == 4
    failed = [e["version"] for e in events_of(run_dir) if e["event"] == "checkpoint_failed"]
    assert failed[:1] in ([8], []) and "checkpoint of step 8" in stderr  # the event log is on the same disk
    filler[0].unlink()
    assert checkpoint.save(run_dir / CHECKPOINTS, 12, newest.tensors, newest.meta).exists()
    assert not pids("server", run_dir)


STUB = """#!{python}
import pathlib, sys, time
role, folder = sys.argv[3], pathlib.Path(sys.argv[4])
starts = len(list(folder.glob(role + "-*")))
(folder / f"{{role}}-{{starts}}").touch()
if role == "server":
    end = time.monotonic() + 10
    while not (folder / f"worker-{{starts}}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)
    sys.exit({codes}[starts])
"""


@pytest.mark.parametrize(
    "codes, message",
    [([3, 0], None), ([3, 3, 3], "server 0 has died 3 times"), ([1], "see its message above")],
    ids=["once", "always", "with a message"],
)
def test_server_that_fails_after_its_workers_have_ended_gets_them_again(
    codes: list[int], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last checkpoint may be older than the end: without workers it would wait for ever."""
    stub, run_dir = tmp_path / "stub", tmp_path / "run"
    stub.write_text(STUB.format(python=sys.executable, codes=codes))
    stub.chmod(0o755)
    run_dir.mkdir()
    (run_dir / CONFIG).touch()
    monkeypatch.setattr(launch, "sys", SimpleNamespace(executable=str(stub)))

    def supervise() -> None:
        with launch._running([run_dir], "cpu", None) as processes:
            processes.start("server 0")
            processes.start("worker 0")
            processes.supervise(2, None, None)

    if message is None:
        in_threads(supervise, timeout=30)
    else:
        with pytest.raises(LaconicError, match=message):
            in_threads(supervise, timeout=30)
    assert len(list(run_dir.glob("worker-*"))) == len(codes) == len(list(run_dir.glob("server-*")))
    assert not [*pids("server", run_dir), *pids("worker", run_dir)]
