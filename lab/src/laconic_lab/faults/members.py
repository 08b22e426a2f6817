"""Members that send well-formed, harmful messages: overflowing and poisoned pushes, foreign uploads, a stolen key.

Each scenario is a small job with a real server and real sockets, like those of ``scenario``, but its pushes are not
those of a ledger.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from laconic.cluster import certificates, checkpoint, security
from laconic.cluster.client import Client, Patience
from laconic.cluster.core import Core
from laconic.cluster.deny_list import DENIED_FILE, DenyList, deny
from laconic.cluster.job import Job, Slots
from laconic.cluster.protocol import NOTHING_LEFT, frame_messages, json_message
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError
from laconic.cluster.server import Server
from laconic.errors import LaconicError
from laconic.frames import encode
from laconic.optim import SGD
from laconic.train.methods import method_options
from laconic_lab.faults.idle_calls import CALLS, IdleCalls
from laconic_lab.faults.invariants import InvariantError

__all__ = ["MEMBERS", "check_member"]

SHAPES = {"w": (40, 30), "b": (7,)}
EXCHANGES = 9
SECONDS = 20.0
"""Seconds for which a worker waits for an answer."""
SOON = 6.0
"""Seconds within which an honest worker's Hello must be answered."""
RETURNS: Sequence[Mapping[str, Any]] = (
    {}, {"pull": "qsgd:4"}, {"returns": "delta", "pull": "qsgd:4"}, {"returns": "gradients"},
    {"returns": "gradients", "pull": "topk:0.5"},
)  # fmt: skip
UPLOAD = 1 << 20
"""Values of the model whose uploads are left open."""

Push = Callable[[int, int], float]
"""Worker and exchange -> the value of all gradients that it pushes."""


def _require(holds: object, what: str) -> None:
    if not holds:
        raise InvariantError(what)


class _Members:
    """A server with a job, and workers that push one value each."""

    def __init__(
        self, job: Job, folder: Path, *, certs: Path | None = None, shapes: Mapping[str, tuple[int, ...]] = SHAPES
    ) -> None:
        self.job, self.certs = job, certs
        self.parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.store = checkpoint.Folder(folder)
        self.events: list[dict[str, Any]] = []
        self.core = Core(job, self.parameters, SGD(), lambda _: job.lr, self.events.append, exchanges=EXCHANGES)
        latest = checkpoint.load_latest(folder)
        if latest is None:
            self.store.save(0, *self.core.state())
        else:
            self.core.load(latest.tensors, latest.meta)
        self.core.on_update(lambda version: self.store.save(version, *self.core.state()))
        self._lives = itertools.count(1)

    @contextmanager
    def serving(self) -> Iterator[Server]:
        options: dict[str, Any] = {}
        if self.certs is not None:
            mine = security.load_server(self.certs)
            options = {
                "credentials": security.server_credentials(mine), "deny_list": DenyList(self.certs / DENIED_FILE),
                "identify": lambda context: security.require_worker(context.auth_context(), mine.identity.job),
            }  # fmt: skip
        server = Server(self.core, "127.0.0.1:0", **options)
        try:
            yield server
        finally:
            server.stop(0)

    def client(self, server: Server, worker: int) -> Client:
        credentials = None
        if self.certs is not None:
            credentials = security.channel_credentials(security.load_worker(self.certs, worker))
        return Client(
            f"{'localhost' if self.certs else '127.0.0.1'}:{server.port}", worker=worker, incarnation=next(self._lives),
            slots=Slots.of(self.parameters), limits=self.job.pull_limits(self.parameters.values()),
            credentials=credentials, timeout=SECONDS, patience=Patience(total=SECONDS, first=0.05, longest=0.3),
        )  # fmt: skip

    def train(self, server: Server, push: Push) -> dict[int, str]:
        """Let all workers train to the end; return the reasons for which some were refused."""
        refused: dict[int, str] = {}
        threads = [
            threading.Thread(target=self._train, args=(server, worker, push, refused), daemon=True)
            for worker in range(self.job.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
        _require(not any(thread.is_alive() for thread in threads), f"the job hangs at version {self.core.version}")
        return refused

    def _train(self, server: Server, worker: int, push: Push, refused: dict[int, str]) -> None:
        client = self.client(server, worker)
        try:
            standing = client.hello()
            client.join(1, Offer(standing.versions))
            at = client.snapshot()
            while at.ticket != NOTHING_LEFT and (at.ticket is not None or at.sequence < EXCHANGES):
                value = push(worker, at.sequence)
                frames = [encode(torch.full(x.shape, value), "none") for x in self.parameters.values()]
                at = client.exchange(at.sequence, list(enumerate(frames)), lambda: 0.0)
        except RefusedError as error:
            refused[worker] = error.reason
        except LaconicError as error:
            refused[worker] = str(error)
        finally:
            client.close()


def _overflow(mode: str, rng: random.Random, folder: Path) -> None:
    """A member pushes values with which the weights overflow; the job ends, and resumes from finite weights."""
    returns = rng.choice(RETURNS if mode == "sync" else RETURNS[:3])
    job = Job(workers=2, mode=mode, lr=10.0, momentum=0.0, checkpoint_every=1, **returns)
    step, poisoner = rng.randrange(1, 4), rng.randrange(2)
    members = _Members(job, folder)
    with members.serving() as server:
        refused = members.train(
            server, lambda worker, at: 3e38 if worker == poisoner and at >= step else 0.01 * (worker + 1)
        )
    _require("diverged" in refused.values(), f"weights overflowed and no worker received the error: {refused}")
    failure = members.core.failure or ""
    _require("--lr" in failure and "\n" not in failure, f"the job should end with one line, got {failure!r}")
    newest = checkpoint.load_latest(folder)
    _require(newest is not None, "P6: there is no checkpoint to load")
    assert newest is not None
    _require(all(bool(x.isfinite().all()) for x in newest.tensors.values()), "overflowed weights became a checkpoint")
    resumed = _Members(job, folder)
    with resumed.serving() as server:
        refused = resumed.train(server, lambda worker, at: 0.01)
    _require(not refused and resumed.core.finished(EXCHANGES), f"the job does not resume: {refused}")


def _poison(mode: str, rng: random.Random, folder: Path) -> None:
    """One of five workers pushes harmful gradients in every round of a robust mean."""
    after = rng.choice(("clipped", "median", "trimmed:1"))
    returns = rng.choice(("weights", "delta"))
    job = Job(workers=5, mode=mode, lr=1.0, momentum=0.0, after=after, checkpoint_every=4, returns=returns)
    poisoner, poison = rng.randrange(5), rng.choice((-1.0, 1.0)) * 10.0 ** rng.randrange(2, 37)
    members = _Members(job, folder)
    with members.serving() as server:
        refused = members.train(server, lambda worker, at: poison if worker == poisoner else 1.0 + worker / 8)
    _require(not refused and members.core.finished(EXCHANGES), f"poison ended the job: {refused}")
    for name, x in members.core.parameters.items():
        lowest, highest = -float(x.max()) / EXCHANGES, -float(x.min()) / EXCHANGES
        # A clipped push can turn one of five against the others.
        least = (4 * 1.0 - 1.5) / 5 if after == "clipped" else 1.0
        _require(least - 1e-3 <= lowest <= highest <= 1.5 + 1e-3, f"{after}: {name} moved by {lowest} to {highest}")


def _foreign_upload(mode: str, rng: random.Random, folder: Path) -> None:
    """With ``returns=sum`` a worker that is not asked uploads weights, and leaves uploads open."""
    job = Job(workers=3, mode=mode, lr=0.05, **method_options("homomorphic"))
    members = _Members(job, folder, shapes={"w": (UPLOAD,)})
    idle = IdleCalls()
    with members.serving() as server:
        try:
            stranger = rng.randrange(1, 3)
            clients = [members.client(server, worker) for worker in range(3)]
            for client in clients:
                client.hello()
            frames = [encode(torch.full((UPLOAD,), 7.0), "none")] * 2
            try:
                clients[stranger].upload_weights(0, frames)
            except LaconicError as error:
                _require("worker 0 uploads" in str(error), f"another refusal than expected: {error}")
            else:
                raise InvariantError("weights of a worker that was not asked were taken")
            head = {"worker": 0, "incarnation": 1, "sequence": 0, "version": 0}
            for _ in range(CALLS):
                messages = [json_message(head), *frame_messages(0, frames[0])]
                idle.open(f"127.0.0.1:{server.port}", "Deposit", *messages[:-1])
            time.sleep(0.5)
            began = time.monotonic()
            members.client(server, stranger).hello()
            _require(time.monotonic() - began < SOON, "open uploads keep an honest worker from being answered")
            held = members.core.queued_nbytes
            _require(held <= 4 * len(frames[0]), f"open uploads hold {held} bytes")
        finally:
            idle.release()
            for client in clients:
                client.close()
    _require(not members.core.parameters["w"].any(), "the weights have changed without a round")


def _stolen_key(mode: str, rng: random.Random, folder: Path) -> None:
    """The certificate of a worker is denied while it computes; the others finish the job."""
    certs = folder / "certs"
    certificates.new_job(certs, name="faults", hosts=["localhost"], workers=2)
    job = Job(workers=2, mode=mode, lr=0.1, momentum=0.0, checkpoint_every=4)
    members = _Members(job, folder / "saved", certs=certs)
    step, denied = rng.randrange(1, 4), threading.Event()

    def push(worker: int, at: int) -> float:
        if worker == 1 and at >= step and not denied.is_set():
            deny(certs, ["worker-1"])
            denied.set()
        if worker == 1 and denied.is_set():
            time.sleep(1.5)  # until the server has read the list
        else:
            time.sleep(0.05)
        return 0.01

    with members.serving() as server:
        refused = members.train(server, push)
        _require(denied.is_set() and "denied" in refused.get(1, ""), f"a denied worker went on: {refused}")
        try:
            members.client(server, 1).hello()
        except LaconicError as error:
            _require("denies the certificate" in str(error), f"another refusal than expected: {error}")
        else:
            raise InvariantError("the Hello of a denied worker was answered")
    _require(0 not in refused, f"the honest worker was refused: {refused}")
    _require(members.core.finished(EXCHANGES), f"the job ended at version {members.core.version}")


class Member(NamedTuple):
    """A kind of harmful member.

    Args:
        check: Function of mode, random numbers and an empty folder that raises ``InvariantError``.
        modes: The modes in which it can do harm.
    """

    check: Callable[[str, random.Random, Path], None]
    modes: tuple[str, ...]

    @property
    def what(self) -> str:
        return (self.check.__doc__ or "").partition("\n")[0].rstrip(".")


MEMBERS: Mapping[str, Member] = {
    "overflow": Member(_overflow, ("sync", "async", "bounded:2")),
    "poison": Member(_poison, ("sync",)),  # without rounds there is no robust mean
    "foreign-upload": Member(_foreign_upload, ("sync",)),
    "stolen-key": Member(_stolen_key, ("async", "bounded:2")),  # rounds wait for all workers
}
"""All kinds by name."""


def check_member(name: str, mode: str, folder: Path, seed: int) -> None:
    """Run a scenario and check what must hold.

    Args:
        seed: Chooses the steps, the misbehaving worker and the job's options.
    """
    MEMBERS[name].check(mode, random.Random(seed), folder)
