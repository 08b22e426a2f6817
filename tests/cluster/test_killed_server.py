"""Jobs whose server is killed again and again, and a server under tens of thousands of forged pushes.

Servers that are killed are processes, forked from one that has imported torch already.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_peers import begin, client_of, exchange, serving
from helpers import ONES, TIMEOUT, core_of

from laconic.cluster import calls, certificates, checkpoint, security
from laconic.cluster.client import Client, Patience
from laconic.cluster.core import Core
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job, Slots
from laconic.cluster.protocol import GRPC_OPTIONS, RPC_PATHS, frame_messages, json_message
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError
from laconic.frames import encode
from laconic.train.run import CHECKPOINTS, EVENTS, SERVER, Config
from laconic.watch.events import read_events
from laconic_lab.faults import flood_client
from laconic_lab.faults.invariants import applied_once, lost_at_most
from waiting import eventually, in_threads

FORKS = """
import json, os, resource, signal, sys
import torch, laconic.train.server_process, laconic.train.worker_process, laconic.cluster.server, laconic.cluster.core
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

WORKERS, ROUNDS, CHECKPOINT_EVERY = 8, 24, 4
BUILD = """
import torch

def build():
    torch.manual_seed(0)
    pairs = torch.zeros(8, 256), torch.zeros(8, dtype=torch.long)
    return torch.nn.Linear(256, 256, bias=False), pairs, pairs, torch.nn.functional.cross_entropy
"""


class ForkServer:
    """Starts laconic commands as forks of a process that has imported torch."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True
            )

    def start(self, *arguments: object) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
        self._process.wait(TIMEOUT)


def gradient(worker: int, sequence: int) -> bytes:
    g = torch.Generator().manual_seed(1000 * sequence + worker)
    return encode(torch.randn(256, 256, generator=g), "none")


def live(link: Any, worker: int, before_push: Callable[[int, int], None] = lambda worker, at: None) -> None:
    """Run one worker to the end of the job; it rejoins whenever it must."""
    attempt = 0
    at: int | None = None
    while at is None or at < ROUNDS:
        if at is None:
            status = link.hello()
            if status.over:
                break
            attempt += 1
            at = link.join(attempt, Offer(status.versions))[0]
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
    in_threads(*(lambda w=w: live(link(w), w, **options) for w in range(WORKERS)), timeout=120)


def killed_under_load(tmp_path: Path, kill_at: list[int], *, tls: bool) -> None:
    """Eight workers push while their server is killed several times and restarted."""
    (tmp_path / "model.py").write_text(BUILD)
    run_dir, certs = tmp_path / "run", tmp_path / "certs"
    job = Job(workers=WORKERS, lr=0.1, momentum=0.9, checkpoint_every=CHECKPOINT_EVERY)
    config = Config(batch=1, iterations=ROUNDS, job=job, script=f"{tmp_path / 'model.py'}:build")
    config.save(run_dir)
    parameters = {name: p.detach().clone() for name, p in config.task().model.named_parameters()}
    slots, limits = Slots.of(parameters), job.pull_limits(parameters.values())
    clean = core_of(job, parameters, exchanges=ROUNDS)
    all_live(lambda worker: InProcessConnection(clean, worker))
    if tls:
        certificates.new_job(certs, name="ours", hosts=["localhost"], workers=WORKERS)
    forks = ForkServer(tmp_path / "log")
    arguments = ["server", run_dir, *(["--certs", certs] if tls else [])]
    server = [forks.start(*arguments)]
    to_kill = list(kill_at)

    def address() -> str:
        assert eventually((run_dir / SERVER).exists, 60), forks.log.read_text()
        port = json.loads((run_dir / SERVER).read_text())["address"].rpartition(":")[2]
        return f"{'localhost' if tls else '127.0.0.1'}:{port}"

    def disturb(worker: int, at: int) -> None:
        if worker == 0 and to_kill and at == to_kill[0]:
            to_kill.pop(0)
            port = address().rpartition(":")[2]
            for junk in (flood_client.REQUEST, flood_client.PREFACE, b"\0" * 100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), 5) as line:
                    line.sendall(junk)
                    line.recv(1)
            os.kill(server[0], signal.SIGKILL)
            server[0] = forks.start(*arguments, "--port", port, "--resume")

    server_address = address()
    try:
        all_live(
            lambda worker: Client(
                server_address, worker=worker, incarnation=1, slots=slots, limits=limits,
                credentials=security.channel_credentials(security.load_worker(certs, worker)) if tls else None,
                patience=Patience(total=60, first=0.05, longest=0.5),
            ),
            before_push=disturb,
        )  # fmt: skip
        assert eventually(lambda: json.loads((run_dir / SERVER).read_text()) == {"done": True}), forks.log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server[0], signal.SIGKILL)
        forks.close()
    assert not to_kill
    events = read_events(run_dir / EVENTS)
    assert len(applied_once(events)) == WORKERS * ROUNDS  # P1
    resumed = [event["version"] for event in events if event["event"] == "resumed"]
    assert resumed == [at // CHECKPOINT_EVERY * CHECKPOINT_EVERY for at in kill_at]
    assert all(loss < CHECKPOINT_EVERY for loss in lost_at_most(events, CHECKPOINT_EVERY))  # P2
    newest = checkpoint.load_latest(run_dir / CHECKPOINTS)
    assert newest is not None and newest.step == ROUNDS
    assert torch.equal(newest.tensors["parameter/weight"], clean.parameters["weight"])  # P4
    log = forks.log.read_text()
    assert "ssl_transport" not in log and "Traceback" not in log, log


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_job_ends_with_the_same_bits_although_its_server_is_killed_twice(tmp_path: Path) -> None:
    killed_under_load(tmp_path, [9, 18], tls=True)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("seed", range(10))
def test_job_ends_with_the_same_bits_whenever_its_server_is_killed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    killed_under_load(tmp_path, sorted(rng.sample(range(ROUNDS), 4)), tls=bool(seed % 2))


REFUSALS = {"answered", "stale", "ahead", "incarnation", "regather", "replaced"}


def disturb_job(
    core: Core, address: str, count: int, seed: int, outcomes: dict[str, int], lock: threading.Lock
) -> None:
    """Send forged pushes of earlier and later exchanges, other incarnations and other workers."""
    rng = random.Random(seed)
    with grpc.insecure_channel(address, options=(*GRPC_OPTIONS, ("grpc.use_local_subchannel_pool", 1))) as channel:
        call = channel.stream_stream(RPC_PATHS["Exchange"])
        for _ in range(count):
            worker = rng.randrange(core.job.workers)
            clock = core._members.sessions[worker].clock  # a push of any other exchange is forged
            sequence = clock - min(clock, rng.choice([1, 1, 1, 2, 3, rng.randrange(1, 40), -1_000_000]))
            incarnation = rng.choice([1, 1, 1, 1, 0, 2])
            head = json_message({"worker": worker, "incarnation": incarnation, "sequence": sequence})
            frame = encode(torch.full((4,), float(rng.randrange(1, 100))), "none")  # would show in the weights
            try:
                list(call(iter([head, *frame_messages(0, frame), json_message({"score": 0.0})]), timeout=TIMEOUT))
                outcome = "answered"
            except grpc.RpcError as error:
                refused = error.code() == grpc.StatusCode.FAILED_PRECONDITION
                outcome = json.loads(error.details())["reason"] if refused else error.code().name
            with lock:
                outcomes[outcome] = outcomes.get(outcome, 0) + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_fifty_thousand_forged_pushes_change_nothing(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Forged pushes share the workers' identities. Without the pace of repeated calls the server handles all of them.
    monkeypatch.setattr(calls, "REPEATS", 1_000_000)
    require_forged_pushes_change_nothing(mode, 50_000)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_forged_pushes_at_the_server_s_pace_change_nothing(mode: str) -> None:
    """A call that waits for its pace may be ended by a newer one of the same worker."""
    require_forged_pushes_change_nothing(mode, 200)


def require_forged_pushes_change_nothing(mode: str, total: int) -> None:
    attackers, workers = 4, 2
    events: list[dict[str, Any]] = []
    job = Job(workers=workers, lr=1.0, momentum=0.0, mode=mode)
    core = core_of(job, {"w": torch.zeros(4)}, events)
    outcomes: dict[str, int] = {}
    failed: list[BaseException] = []
    lock, over = threading.Lock(), threading.Event()
    exchanges = [0] * workers

    def work(worker: int, client: Client) -> None:
        at = begin(client, 1)
        if mode == "async":
            client.snapshot()
        while not over.is_set():
            at = exchange(client, at, ONES).sequence
            exchanges[worker] += 1
            over.wait(0.02)  # as if it computed: the processor is the attackers'

    def guarded(act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except BaseException as error:
            if not over.is_set():  # otherwise its connection was closed during a call
                failed.append(error)

    with serving(core) as server:
        address = f"127.0.0.1:{server.port}"
        clients = [
            client_of(server, worker, incarnation=1, timeout=10.0, patience=Patience(total=TIMEOUT))
            for worker in range(workers)
        ]
        worker_threads = [
            threading.Thread(target=guarded, args=(work, *each), daemon=True) for each in enumerate(clients)
        ]
        attacker_threads = [
            threading.Thread(
                target=guarded, args=(disturb_job, core, address, total // attackers, seed, outcomes, lock), daemon=True
            )
            for seed in range(attackers)
        ]
        for thread in worker_threads:
            thread.start()
        assert eventually(lambda: all(session.clock for session in core._members.sessions))
        for thread in attacker_threads:
            thread.start()
        for thread in attacker_threads:
            thread.join(1500)
        over.set()
        for client in clients:
            client.close()
        for thread in worker_threads:
            thread.join(TIMEOUT)
    assert not failed, failed
    # A newer call of the same worker, forged or its own, ends an earlier one: "CANCELLED" or "gone".
    ended = {"CANCELLED", "gone"}
    assert sum(outcomes.values()) == total, outcomes
    assert {"stale", "ahead", "incarnation"} <= set(outcomes) - ended <= REFUSALS, outcomes
    applied = [event for event in events if event["event"] == "applied"]
    assert len({(event["worker"], event["sequence"]) for event in applied}) == len(applied)
    share = workers if mode == "sync" else 1
    assert torch.equal(core.parameters["w"], torch.full((4,), -len(applied) / share)) and min(exchanges) > total // 500
    if mode == "async":
        assert len({event["ticket"] for event in applied}) == len(applied)
