"""Small jobs for tests: a core or server with a few parameters, threads as workers, peers that send anything."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import torch
from torch import Tensor

from laconic.cluster.client import Client, Patience
from laconic.cluster.core import Core
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job
from laconic.cluster.protocol import GRPC_OPTIONS, RPC_PATHS, frame_messages, json_message
from laconic.cluster.rejoin import Offer
from laconic.cluster.server import Server
from laconic.frames import encode
from laconic.optim import SGD, Schedule
from laconic.train import Shards, build_task
from laconic.train.in_process import run_in_threads
from laconic.train.worker import Worker

BATCH = 32
TIMEOUT = 20.0
ONES = encode(torch.ones(4), "none")

Events = list[dict[str, Any]]


def job_of(**options: Any) -> Job:
    """Return a job whose updates subtract the gradient: learning rate 1, no momentum."""
    return Job(**{"workers": 2, "lr": 1.0, "momentum": 0.0} | options)


def core_of(job: Job, parameters: dict[str, Tensor], events: Events | None = None, **options: Any) -> Core:
    optimizer = SGD(momentum=job.momentum, weight_decay=job.weight_decay)
    event_log = events.append if events is not None else None
    return Core(job, parameters, optimizer, Schedule(job.lr), event_log, **options)


def small_core(events: Events | None = None, *, slots: dict[str, int] | None = None, **options: Any) -> Core:
    """Return a core with zeros as parameters; ``options`` are those of a job."""
    exchanges = options.pop("exchanges", None)
    parameters = {name: torch.zeros(numel) for name, numel in (slots or {"w": 4}).items()}
    return core_of(job_of(**options), parameters, events, exchanges=exchanges)


def open_session(
    core: Core, worker: int, incarnation: int = 0, *, attempt: int = 0, versions: set[int] | None = None
) -> None:
    """Welcome a worker that can resume from any version, or from some only, and take its offer."""
    answer = core.welcome(worker, incarnation, core.slots.fingerprint)
    core.offer(worker, incarnation, attempt, Offer(frozenset(answer["versions"] if versions is None else versions)))


def train(
    job: Job,
    exchanges: int,
    *,
    model: str = "mlp",
    link: Callable[[Core, int], Any] = InProcessConnection,
    events: Events | None = None,
) -> tuple[Core, list[Worker]]:
    """Run a whole job in threads; return the core and the workers at its end."""
    first = build_task(model, "digits", seed=job.seed)
    core = core_of(
        job, {name: p.detach().clone() for name, p in first.model.named_parameters()}, events, exchanges=exchanges
    )
    workers = []
    for number in range(job.workers):
        task = build_task(model, "digits", seed=job.seed)
        shards = Shards(task.num_train, job.workers, BATCH, job.seed)
        workers.append(Worker(number, task, shards, job, Schedule(job.lr), link(core, number)))
    failures = run_in_threads(workers, exchanges)
    assert not failures, failures
    return core, workers


def in_threads(*calls: Callable[[], Any], timeout: float = 60.0) -> list[Any]:
    """Call all functions at once; return their results, or raise the first error."""
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return [results[number] for number in range(len(calls))]


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    """Wait for a condition; return whether it became true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


# ------------------------------------------------------------------------------------------------------- over sockets


@contextlib.contextmanager
def serving(core: Core, **options: Any) -> Iterator[Server]:
    server = Server(core, "127.0.0.1:0", **options)
    try:
        yield server
    finally:
        server.stop(0)


def client_of(server: Server, worker: int = 0, incarnation: int = 0, kind: Any = Client, **options: Any) -> Any:
    core = server.core
    return kind(
        f"127.0.0.1:{server.port}",
        worker=worker,
        incarnation=incarnation,
        slots=core.slots,
        limits=core.job.pull_limits(core.parameters.values()),
        **{"patience": Patience(total=2.0)} | options,
    )


def begin(client: Client, attempt: int = 0) -> int:
    """Join with all versions that the server has; return the exchange at which the worker continues."""
    return client.join(attempt, Offer(client.hello().versions))[0]


def exchange(client: Any, sequence: int, *frames: bytes) -> Any:
    return client.exchange(sequence, list(enumerate(frames)), lambda: 0.0)


def head_of(worker: int = 0, incarnation: int = 0, sequence: int = 0) -> dict[str, Any]:
    """Return the first message of a push."""
    return {"worker": worker, "incarnation": incarnation, "sequence": sequence}


class Peer:
    """Sends arbitrary messages to a server."""

    def __init__(self, port: int, credentials: Any = None) -> None:
        address = f"127.0.0.1:{port}"
        self._channel = (
            grpc.secure_channel(address, credentials, options=GRPC_OPTIONS)
            if credentials is not None
            else grpc.insecure_channel(address, options=GRPC_OPTIONS)
        )

    def call(self, name: str, *messages: bytes, timeout: float = 5.0) -> grpc.RpcError | None:
        """Return the refusal of a call, or None if it was answered."""
        try:
            list(self._channel.stream_stream(RPC_PATHS[name])(iter(messages), timeout=timeout))
        except grpc.RpcError as error:
            return error
        return None

    def push(self, head: dict[str, Any], *frames: bytes) -> Any:
        """Return the refusal of a push, or None."""
        pieces = [message for slot, frame in enumerate(frames) for message in frame_messages(slot, frame)]
        return self.call("Exchange", json_message(head), *pieces, json_message({"score": 0}))

    def begin_push(self, head: dict[str, Any], frame: bytes) -> tuple[Any, threading.Event]:
        """Start a push of slot 0 that does not end: return the call, and an event that completes it."""
        complete = threading.Event()

        def messages() -> Iterator[bytes]:
            yield json_message(head)
            yield from frame_messages(0, frame)
            complete.wait(TIMEOUT)
            yield json_message({"score": 0})

        return self._channel.stream_stream(RPC_PATHS["Exchange"])(messages(), timeout=TIMEOUT), complete

    def close(self) -> None:
        self._channel.close()
