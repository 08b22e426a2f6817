"""What a server has to outlive: strangers at its door, its own death under load, a disk that fails.

Servers that are killed are processes of their own, forked from one that has imported torch already.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from helpers import core_of
from test_faults import pids

from laconic.cluster import checkpoint, security
from laconic.cluster import server as server_module
from laconic.cluster.client import Client, Patience
from laconic.cluster.core import Core
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job, Slots
from laconic.cluster.protocol import GRPC_OPTIONS, RPC_PATHS, frame_messages, json_message
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError
from laconic.cluster.server import Server
from laconic.frames import encode
from laconic.train.run import CHECKPOINTS, EVENTS, SERVER, Config
from laconic.watch.events import read_events
from laconic_lab.faults import flood_client
from laconic_lab.faults.flood_process import FloodProcess
from laconic_lab.faults.invariants import applied_once, lost_at_most
from laconic_lab.faults.soak import usage

SOON = 30.0
ONES = encode(torch.ones(64), "none")


@contextlib.contextmanager
def serving(core: Core, **options: Any) -> Iterator[Server]:
    server = Server(core, "127.0.0.1:0", **options)
    try:
        yield server
    finally:
        server.stop(0)


def small_core(workers: int = 1, **options: Any) -> Core:
    return core_of(Job(workers=workers, lr=1.0, momentum=0.0), {"w": torch.zeros(64)}, **options)


def client_of(core: Core, address: str, worker: int = 0, incarnation: int = 0, **options: Any) -> Client:
    return Client(
        address,
        worker=worker,
        incarnation=incarnation,
        slots=core.slots,
        limits=core.job.pull_limits(core.parameters.values()),
        **{"patience": Patience(total=SOON)} | options,
    )


def begin(client: Client, attempt: int = 0) -> int:
    return client.join(attempt, Offer(client.hello().versions))[0]


def eventually(condition: Callable[[], object], seconds: float = SOON) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


# --------------------------------------------------------------------------------------------------------- strangers


def hung_up(line: socket.socket, until: float) -> bool:
    """Whether the other end lets go of a connection in time."""
    try:
        while True:
            line.settimeout(max(0.01, until - time.monotonic()))
            if not line.recv(4096):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True


def test_who_does_not_come_to_the_point_is_hung_up_on(tmp_path: Path) -> None:
    """Silent, in the middle of TLS, of HTTP/2's first words, or after them: none holds a connection for long."""
    security.new_job(tmp_path, name="ours", hosts=["localhost"], workers=1)
    mine = security.server_credentials(security.load_server(tmp_path))
    hello = flood_client.client_hello()
    said = [
        b"",
        hello[:50],
        hello,
        flood_client.PREFACE[:10],
        flood_client.PREFACE,
        flood_client.PREFACE + flood_client.SETTINGS,
    ]
    with serving(small_core()) as plain, serving(small_core(), credentials=mine) as secure:
        before = usage()[1]
        lines = []
        for server in (plain, secure):
            for words in 10 * said:
                line = socket.create_connection(("127.0.0.1", server.port), 5)
                line.sendall(words)
                lines.append(line)
        until = time.monotonic() + 15
        assert [hung_up(line, until) for line in lines] == len(lines) * [True]
        for line in lines:
            line.close()
        assert eventually(lambda: usage()[1] <= before, 5), (usage(), before)


def silent() -> Iterator[bytes]:
    threading.Event().wait(10 * SOON)
    yield b""


def test_calls_that_say_nothing_do_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FIRST_WORDS", 10 * SOON)  # until all are there
    core = small_core()
    with serving(core) as server, contextlib.ExitStack() as channels:
        address = f"127.0.0.1:{server.port}"
        calls = []
        for name in ("Hello", "Exchange"):
            options = (*GRPC_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
            channel = channels.enter_context(grpc.insecure_channel(address, options=options))
            calls += [channel.stream_stream(RPC_PATHS[name])(silent(), timeout=10 * SOON) for _ in range(11)]
        assert eventually(lambda: len(server._calls) == 11)  # as many as there are threads; the others come later
        monkeypatch.setattr(server_module, "FIRST_WORDS", 0.5)
        client = client_of(core, address, timeout=SOON)
        at = begin(client)
        assert client.exchange(at, [(0, ONES)], lambda: 0.0).sequence == at + 1
        client.close()
        for one in calls:
            with pytest.raises(grpc.RpcError):
                list(one)
            assert one.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN), one
        assert eventually(lambda: not server._calls)
    assert core.version == 1


def test_pushes_that_were_replaced_do_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that begins its push again and again; nobody hears the first ones out."""
    monkeypatch.setattr(server_module, "FIRST_WORDS", 10 * SOON)  # until all are there
    core = core_of(Job(workers=1, lr=1.0, momentum=0.0), {"w": torch.zeros(64), "b": torch.zeros(64)})

    def half() -> Iterator[bytes]:
        yield json_message({"worker": 0, "incarnation": 0, "sequence": 0})
        yield from frame_messages(0, ONES)
        yield from silent()

    with serving(core) as server, contextlib.ExitStack() as channels:
        address = f"127.0.0.1:{server.port}"
        client, calls = client_of(core, address, timeout=SOON), []
        at = begin(client)
        channel = channels.enter_context(grpc.insecure_channel(address, options=GRPC_OPTIONS))
        for _ in range(11):  # one for each thread
            before = server._calls._pushes.get(0)
            calls.append(channel.stream_stream(RPC_PATHS["Exchange"])(half(), timeout=10 * SOON))
            assert eventually(lambda before=before: server._calls._pushes.get(0) not in (None, before))
        monkeypatch.setattr(server_module, "FIRST_WORDS", 0.5)
        assert client.exchange(at, [(0, ONES), (1, ONES)], lambda: 0.0).sequence == at + 1
        assert eventually(lambda: not server._calls and not core.queued_nbytes)
        client.close()
    assert core.version == 1


def test_a_worker_may_compute_for_longer_than_a_connection_may_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = [(name, 1000 if name == "grpc.max_connection_idle_ms" else value) for name, value in
               server_module.AGAINST_STRANGERS]  # fmt: skip
    monkeypatch.setattr(server_module, "AGAINST_STRANGERS", shorter)
    core = small_core()
    with serving(core) as server:
        before = usage()[1]
        client = client_of(core, f"127.0.0.1:{server.port}")
        at = begin(client)
        assert eventually(lambda: usage()[1] <= before, 10)  # the server has hung up
        at = client.exchange(at, [(0, ONES)], lambda: 0.0).sequence
        client.close()
    assert at == 1 and client.retries == 0


def test_strangers_leave_files_for_checkpoints(tmp_path: Path) -> None:
    """Of the files that a process may have open a crowd gets half; who is inside already stays there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        core = small_core()
        with serving(core) as server:
            address = f"127.0.0.1:{server.port}"
            client = client_of(core, address)
            at = begin(client)
            process = FloodProcess(address)
            try:
                process.request(hold=400, seed=0)
                process.report()
                assert eventually(lambda: usage()[1] > 150, 10) and usage()[1] < 200
                checkpoint.save(tmp_path, 1, {"w": torch.ones(3)}, {})
                assert client.exchange(at, [(0, ONES)], lambda: 0.0).sequence == at + 1
                process.request(release=True)
                process.report()
            finally:
                process.close()
            client.close()
            late = client_of(core, address, incarnation=1)
            assert begin(late, 1) == at + 1
            late.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ------------------------------------------------------------------------------------------------ a server is killed

FORKS = """
import json, os, resource, signal, sys
import torch, laconic.train.roles, laconic.cluster.server, laconic.cluster.core
from laconic.cli import main

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["laconic", *json.loads(line)]
        try:
            main()
        finally:
            sys.stderr.flush()
            os._exit(0)
    print(pid, flush=True)
"""

CROWD, ROUNDS, EVERY = 8, 24, 4
BUILD = """
import torch

def build():
    torch.manual_seed(0)
    pairs = torch.zeros(8, 256), torch.zeros(8, dtype=torch.long)
    return torch.nn.Linear(256, 256, bias=False), pairs, pairs, torch.nn.functional.cross_entropy
"""


class Forks:
    """Commands of laconic as processes that begin at once."""

    def __init__(self, said: Path) -> None:
        self.said = said
        with said.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True
            )

    def start(self, *words: object) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(word) for word in words]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
        self._process.wait(SOON)


def gradient(worker: int, sequence: int) -> bytes:
    g = torch.Generator().manual_seed(1000 * sequence + worker)
    return encode(torch.randn(256, 256, generator=g), "none")


def live(link: Any, worker: int, before_push: Callable[[int, int], None] = lambda worker, at: None) -> None:
    """One worker to the end of the job, whatever becomes of its server."""
    attempt = 0
    at: int | None = None
    while at is None or at < ROUNDS:
        if at is None:
            standing = link.hello()
            if standing.over:
                break
            attempt += 1
            at = link.join(attempt, Offer(standing.versions))[0]
            continue
        before_push(worker, at)
        try:
            at = link.exchange(at, [(0, gradient(worker, at))], lambda: 0.0).sequence
        except RefusedError as error:
            if error.reason not in ("regather", "stale", "ahead"):
                raise
            at = None
    link.leave()
    link.close()


def all_live(link: Callable[[int], Any], **options: Any) -> None:
    failed: list[BaseException] = []

    def one(worker: int) -> None:
        try:
            live(link(worker), worker, **options)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(worker,), daemon=True) for worker in range(CROWD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed and not any(thread.is_alive() for thread in threads), failed


def killed_under_load(tmp_path: Path, kill_at: list[int], *, tls: bool) -> None:
    """Eight workers push while their server dies, more than once, and is started again."""
    (tmp_path / "model.py").write_text(BUILD)
    run_dir, certs = tmp_path / "run", tmp_path / "certs"
    job = Job(workers=CROWD, lr=0.1, momentum=0.9, checkpoint_every=EVERY)
    config = Config(batch=1, iterations=ROUNDS, job=job, script=f"{tmp_path / 'model.py'}:build")
    config.save(run_dir)
    parameters = {name: p.detach().clone() for name, p in config.task().model.named_parameters()}
    slots, limits = Slots.of(parameters), job.pull_limits(parameters.values())
    clean = core_of(job, parameters, exchanges=ROUNDS)
    all_live(lambda worker: InProcessConnection(clean, worker))
    if tls:
        security.new_job(certs, name="ours", hosts=["localhost"], workers=CROWD)
    forks = Forks(tmp_path / "said")
    words = ["server", run_dir, *(["--certs", certs] if tls else [])]
    server = [forks.start(*words)]
    to_kill = list(kill_at)

    def address() -> str:
        assert eventually((run_dir / SERVER).exists, 60), forks.said.read_text()
        port = json.loads((run_dir / SERVER).read_text())["address"].rpartition(":")[2]
        return f"{'localhost' if tls else '127.0.0.1'}:{port}"

    def disturb(worker: int, at: int) -> None:
        if worker == 0 and to_kill and at == to_kill[0]:
            to_kill.pop(0)
            port = address().rpartition(":")[2]
            for words_of_strangers in (flood_client.REQUEST, flood_client.PREFACE, b"\0" * 100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), 5) as line:
                    line.sendall(words_of_strangers)
                    line.recv(1)
            os.kill(server[0], signal.SIGKILL)
            server[0] = forks.start(*words, "--port", port, "--resume")

    where = address()
    try:
        all_live(
            lambda worker: Client(
                where,
                worker=worker,
                incarnation=1,
                slots=slots,
                limits=limits,
                credentials=security.channel_credentials(security.load_worker(certs, worker)) if tls else None,
                patience=Patience(total=60, first=0.05, longest=0.5),
            ),
            before_push=disturb,
        )
        assert eventually(lambda: json.loads((run_dir / SERVER).read_text()) == {"done": True}), forks.said.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server[0], signal.SIGKILL)
        forks.close()
    assert not to_kill
    events = read_events(run_dir / EVENTS)
    assert len(applied_once(events)) == CROWD * ROUNDS  # P1
    resumed = [event["version"] for event in events if event["event"] == "resumed"]
    assert resumed == [at // EVERY * EVERY for at in kill_at]
    assert all(loss < EVERY for loss in lost_at_most(events, EVERY))  # P2
    found = checkpoint.load_latest(run_dir / CHECKPOINTS)
    assert found is not None and found.step == ROUNDS
    assert torch.equal(found.tensors["parameter/weight"], clean.parameters["weight"])  # P4
    said = forks.said.read_text()
    assert "ssl_transport" not in said and "Traceback" not in said, said


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_eight_workers_outlive_their_server_and_end_with_the_same_bits(tmp_path: Path) -> None:
    killed_under_load(tmp_path, [9, 18], tls=True)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("seed", range(10))
def test_eight_workers_outlive_their_server_whenever_it_dies(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    killed_under_load(tmp_path, sorted(rng.sample(range(ROUNDS), 4)), tls=bool(seed % 2))


# ------------------------------------------------------------------------------------------------ far too many pushes


def pester(core: Core, address: str, pushes: int, seed: int, outcomes: dict[str, int], lock: threading.Lock) -> None:
    """Copies of a job's pushes, in any order: of now, of before and after, of other lives and other workers."""
    rng = random.Random(seed)
    with grpc.insecure_channel(address, options=(*GRPC_OPTIONS, ("grpc.use_local_subchannel_pool", 1))) as channel:
        call = channel.stream_stream(RPC_PATHS["Exchange"])
        for _ in range(pushes):
            worker = rng.randrange(core.job.workers)
            at = core._members.sessions[worker].clock  # what it pushes now is its own; all else is not
            sequence = at - min(at, rng.choice([1, 1, 1, 2, 3, rng.randrange(1, 40), -1_000_000]))
            incarnation = rng.choice([1, 1, 1, 1, 0, 2])
            head = json_message({"worker": worker, "incarnation": incarnation, "sequence": sequence})
            frame = encode(torch.full((64,), float(rng.randrange(1, 100))), "none")  # forged: it would show
            try:
                list(call(iter([head, *frame_messages(0, frame), json_message({"score": 0.0})]), timeout=SOON))
                outcome = "answered"
            except grpc.RpcError as error:
                refused = error.code() == grpc.StatusCode.FAILED_PRECONDITION
                outcome = json.loads(error.details())["reason"] if refused else str(error)
            with lock:
                outcomes[outcome] = outcomes.get(outcome, 0) + 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_fifty_thousand_pushes_too_many_change_nothing(mode: str) -> None:
    total, pests, workers = 50_000, 4, 2
    events: list[dict[str, Any]] = []
    job = Job(workers=workers, lr=1.0, momentum=0.0, mode=mode)
    core = core_of(job, {"w": torch.zeros(64)}, events)
    outcomes: dict[str, int] = {}
    failed: list[BaseException] = []
    lock, over = threading.Lock(), threading.Event()
    mine = [0] * workers

    def work(worker: int, client: Client) -> None:
        at = begin(client, 1)
        if mode == "async":
            client.snapshot()
        while not over.is_set():
            at = client.exchange(at, [(0, ONES)], lambda: 0.0).sequence
            mine[worker] += 1

    def guarded(act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except BaseException as error:
            if not over.is_set():  # else a call was under way when its connection was closed
                failed.append(error)

    with serving(core) as server:
        address = f"127.0.0.1:{server.port}"
        clients = [client_of(core, address, worker, incarnation=1, timeout=10.0) for worker in range(workers)]
        workers_ = [threading.Thread(target=guarded, args=(work, *one), daemon=True) for one in enumerate(clients)]
        pests_ = [
            threading.Thread(
                target=guarded, args=(pester, core, address, total // pests, seed, outcomes, lock), daemon=True
            )
            for seed in range(pests)
        ]
        for thread in workers_:
            thread.start()
        assert eventually(lambda: all(seat.clock for seat in core._members.sessions))
        for thread in pests_:
            thread.start()
        for thread in pests_:
            thread.join(1500)
        over.set()
        for client in clients:
            client.close()
        for thread in workers_:
            thread.join(SOON)
    assert not failed, failed
    assert sum(outcomes.values()) == total and set(outcomes) == {
        "answered",
        "stale",
        "ahead",
        "incarnation",
        "regather",
    }, outcomes
    applied = [event for event in events if event["event"] == "applied"]
    assert len({(event["worker"], event["sequence"]) for event in applied}) == len(applied)
    share = workers if mode == "sync" else 1
    assert torch.equal(core.parameters["w"], torch.full((64,), -len(applied) / share)) and min(mine) > 100
    if mode == "async":
        assert len({event["ticket"] for event in applied}) == len(applied)


# ----------------------------------------------------------------------------------------------- a disk that fails

HURT = """
import errno, os, subprocess, sys
from pathlib import Path
import torch

DISK, KIND = Path({disk!r}), {kind!r}
calls = [0]

def hurt():
    if KIND == "full":
        with open(DISK / "filler", "wb", buffering=0) as out:
            try:
                while True:
                    out.write(bytes(4096))
            except OSError:
                return
    for folder in (DISK / "run").glob("checkpoints"):
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)

def loss(outputs, targets):
    calls[0] += 1
    if calls[0] == 6 and KIND in ("full", "read-only") and "worker" in sys.argv and sys.argv[-1] == "0":
        hurt()
    return torch.nn.functional.cross_entropy(outputs, targets)

def break_disk():
    sync, seen = os.fsync, [0]
    def fsync(handle):
        seen[0] += 1
        if seen[0] > {syncs}:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(handle)
    os.fsync = fsync

def build():
    torch.manual_seed(0)
    if KIND == "broken" and "server" in sys.argv:
        break_disk()
    pairs = torch.randn(64, 100), torch.randint(0, 2, (64,))
    model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2))
    return model, pairs, pairs, loss
"""
REMEMBERS = "ef|topk:0.1"
"""A channel with a memory of its own, which workers keep on the same disk."""
WORKER_STATS = {"full": "No space left on device", "read-only": "Read-only file system", "broken": "Input/output error"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no mount (needs root)")
    yield folder
    subprocess.run(["umount", "--lazy", "--recursive", folder], check=True)


def train_until_it_fails(kind: str, push: str, disk: Path, tmp_path: Path) -> list[str]:
    """Training goes on without checkpoints; that the last one fails is an error. The command that says so."""
    script, run_dir = tmp_path / "hurt.py", disk / "run"
    script.write_text(textwrap.dedent(HURT).format(disk=str(disk), kind=kind, syncs=12))
    words = [
        "train",
        "--push",
        push,
        "--workers",
        "1",
        "--iterations",
        "12",
        "--batch",
        "16",
        "--checkpoint-every",
        "4",
    ]
    command = [sys.executable, "-m", "laconic", *words, "--script", f"{script}:build", "--run-dir", str(run_dir)]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=200)
    lines = failed.stderr.strip().splitlines()
    assert failed.returncode == 1 and "Traceback" not in failed.stderr, failed.stderr
    told = [line for line in lines if line.startswith("laconic: ")]
    assert len(told) == 2 and WORKER_STATS[kind] in told[0] and "checkpoint of step 12" in told[0], failed.stderr
    assert told[1] == lines[-1] and "server 0 has died with exit code 1: what it said is above" in told[1]
    assert not [*pids("server", run_dir), *pids("worker", run_dir)]
    kept = checkpoint.load_latest(run_dir / CHECKPOINTS)
    assert kept is not None and kept.step == 4
    return command


@pytest.mark.slow
def test_a_disk_that_is_full_ends_training_in_a_line(disk: Path, tmp_path: Path) -> None:
    train_until_it_fails("full", REMEMBERS, disk, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("push", ["none", REMEMBERS])
@pytest.mark.parametrize("kind", list(WORKER_STATS))
def test_a_run_whose_disk_failed_goes_on_when_it_is_well_again(
    kind: str, push: str, disk: Path, tmp_path: Path
) -> None:
    command = train_until_it_fails(kind, push, disk, tmp_path)
    script, run_dir = tmp_path / "hurt.py", disk / "run"
    if kind == "full":
        (disk / "filler").unlink()
    elif kind == "read-only":
        subprocess.run(["umount", run_dir / CHECKPOINTS], check=True)
    script.write_text(textwrap.dedent(HURT).format(disk=str(disk), kind="well", syncs=0))
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    events = read_events(run_dir / EVENTS)
    assert [event["version"] for event in events if event["event"] == "resumed"] == [4]
    applied_once(events)
    lost_at_most(events, 12)
    found = checkpoint.load_latest(run_dir / CHECKPOINTS)
    assert found is not None and found.step == 12


def test_a_history_that_was_cut_off_can_be_read_on(tmp_path: Path) -> None:
    """A full disk ends it in the middle of a line, and the next life of the server goes on there."""
    history = tmp_path / EVENTS
    history.write_text('{"at": 1.5, "event": "push"}\n{"at": 2.5, "ev{"at": 3.5, "event": "resumed"}\n{"at": 4.5, "e')
    assert [event["event"] for event in read_events(history)] == ["push", "resumed"]
