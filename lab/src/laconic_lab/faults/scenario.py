"""A small job with a real server and real sockets, into which faults are put by step number.

Each push writes a 1 into a place of its own of a vector, the ledger: at the end every place holds exactly what one
application of every push makes of it, or something was lost, doubled or forged.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from laconic.cluster import checkpoint, security
from laconic.cluster.client import Client, Patience
from laconic.cluster.core import Core
from laconic.cluster.job import Job, Slots
from laconic.cluster.protocol import NOTHING_LEFT
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.server import Server
from laconic.errors import FileError, LaconicError
from laconic.frames import encode
from laconic.optim import SGD
from laconic_lab.faults.invariants import InvariantError, all_work_once, applied_once, lost_at_most, staleness
from laconic_lab.network.paced_proxy import PacedProxy

__all__ = ["Action", "Died", "Life", "Scene"]

BALLAST = 1 << 17
"""Bytes of a second slot, so that a push takes a while and can be cut in the middle."""

Action = Callable[["Life"], None]


class Died(Exception):  # noqa: N818 - not an error: the end of a worker's life
    """A worker ends here, and is started again."""


class _Vault(checkpoint.Folder):
    """A folder of checkpoints on a disk that can be full."""

    full = False

    def save(self, step: int, tensors: Any, meta: dict[str, Any]) -> None:
        if self.full:
            raise FileError(f"cannot write the checkpoint of step {step}: No space left on device")
        super().save(step, tensors, meta)


class Scene:
    """One job, from its first exchange to its last.

    Args:
        folder: For checkpoints and certificates; empty.
        mode: Of the job.
        workers: How many.
        exchanges: Of each worker.
        cable: Have worker 1 talk over a cable that can be cut, slowed and disturbed.
        rate: Of that cable.
        tls: Talk over TLS, with certificates.
        computing: Seconds that a worker takes for a gradient, so that others have their share of the work.
        patience: Seconds after which the scene counts as hung, those not counted that faults take to be done (but
            three times as many in all): peers that pester a server starve on a busy machine, and that is not the job's.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        *,
        workers: int = 2,
        exchanges: int = 12,
        cable: bool = False,
        rate: str | None = None,
        tls: bool = False,
        computing: float = 0.01,
        patience: float = 60.0,
    ) -> None:
        self.folder, self.exchanges = folder, exchanges
        self.computing, self._patience = computing, patience
        self.job = Job(workers=workers, mode=mode, lr=1.0, momentum=0.0, checkpoint_every=4)
        self.events: list[dict[str, Any]] = []
        self.told: list[str] = []
        """What scenes say of themselves, for the record."""
        self.checkpoint_store = _Vault(folder / "checkpoints")
        self._cable = PacedProxy(rate=rate) if cable or rate else None
        self._certs = self._certificates(folder) if tls else None
        self._actions: dict[tuple[int, int], list[Action]] = defaultdict(list)
        self._lives = itertools.count(1)
        self._server_lives = 0
        self._failed: list[BaseException] = []
        self._suffering = 0
        self._lock = threading.RLock()
        self._all_here = threading.Barrier(workers)

    def _certificates(self, folder: Path) -> Path:
        security.new_job(folder / "certs", name="faults", hosts=["localhost"], workers=self.job.workers)
        return folder / "certs"

    # -------------------------------------------------------------------------------------------------------- server

    def _parameters(self) -> dict[str, torch.Tensor]:
        places = self.job.workers * self.exchanges
        return {"ledger": torch.zeros(1, places), "ballast": torch.zeros(BALLAST // 4)}

    def start_server(self, port: int = 0) -> None:
        self._server_lives += 1
        life = self._server_lives

        def record(event: dict[str, Any]) -> None:
            if life == self._server_lives:
                self._record(event)

        self.core = Core(
            self.job,
            self._parameters(),
            SGD(),
            lambda _: 1.0,
            record,
            exchanges=self.exchanges,
            checkpoint_store=self.checkpoint_store,
        )
        found = checkpoint.load_latest(self.checkpoint_store.path)
        if found is None:
            self.checkpoint_store.save(0, *self.core.state())
        else:
            self.core.load(found.tensors, found.meta)
            self._record({"event": "resumed", "version": self.core.version})
        self.core.on_update(lambda version: self._keep(version, life))
        address = f"127.0.0.1:{port}"
        if self._certs is None:
            self.server = Server(self.core, address)
        else:
            mine = security.load_server(self._certs)
            self.server = Server(
                self.core,
                address,
                credentials=security.server_credentials(mine),
                identify=lambda context: security.require_worker(context.auth_context(), mine.identity.job),
            )

    def crash_server(self) -> None:
        """Gone without a word, and started again from what is on the disk."""
        with self._lock:
            port = self.server.port
            self._server_lives += 1  # what an old handler still does is neither written nor told
            self.server.stop(0)
            self.start_server(port)

    def _keep(self, version: int, life: int) -> None:
        if life != self._server_lives:
            raise RefusedError("waiting", "the server is gone")
        every = self.job.exchanges_per_checkpoint * self.job.updates_per_exchange
        if version % every:
            return
        try:
            self.checkpoint_store.save(version, *self.core.state())
        except FileError:
            self._record({"event": "checkpoint_failed", "version": version})
        else:
            self._record({"event": "checkpoint", "version": version})

    def _record(self, event: dict[str, Any]) -> None:
        self.events.append({"at": time.monotonic(), **event})

    # ------------------------------------------------------------------------------------------------------- workers

    def at(self, worker: int, step: int, action: Action) -> None:
        """Have a worker do something right before its push of that exchange, once."""
        self._actions[worker, step].append(action)

    def address(self, worker: int) -> str:
        if worker == 1 and self._cable is not None:
            host, port = self._cable.address_of(("127.0.0.1", self.server.port))
            return f"{host}:{port}"
        return f"{'localhost' if self._certs else '127.0.0.1'}:{self.server.port}"

    @property
    def cable(self) -> PacedProxy:
        assert self._cable is not None
        return self._cable

    def client(self, worker: int, incarnation: int) -> Client:
        credentials = None
        if self._certs is not None:
            credentials = security.channel_credentials(security.load_worker(self._certs, worker))
        parameters = self._parameters()
        return Client(
            self.address(worker),
            worker=worker,
            incarnation=incarnation,
            slots=Slots.of(parameters),
            limits=self.job.pull_limits(parameters.values()),
            credentials=credentials,
            timeout=20.0,
            patience=Patience(total=20.0, first=0.05, longest=0.3),
        )

    def frames(self, place: int) -> list[bytes]:
        """A push that marks its place in the ledger."""
        parameters = self._parameters()
        parameters["ledger"][0, place] = 1.0
        parameters["ballast"][::7] = 1.0  # not all zero, which would travel in a header
        return [encode(x, "none") for x in parameters.values()]

    def _live(self, worker: int) -> None:
        try:
            while True:
                life = Life(self, worker, next(self._lives))
                try:
                    life.run()
                    return
                except Died:
                    continue
                finally:
                    life.client.close()
        except BaseException as error:
            self._failed.append(error)

    def wait_for_all(self, incarnation: int) -> None:
        """Nobody begins alone: without rounds there might be no work left for the others."""
        if incarnation <= self.job.workers:  # in its first life
            self._all_here.wait(self._patience)

    def suffer(self, life: Life) -> None:
        """Do to a worker what is due before its push."""
        for action in self._actions.pop((life.worker, life.sequence), []):
            with self._lock:
                self._suffering += 1
            try:
                action(life)
            finally:
                with self._lock:
                    self._suffering -= 1

    # ----------------------------------------------------------------------------------------------------------- run

    def run(self) -> None:
        """To the end, and check every promise."""
        with self._set_up():
            threads = [
                threading.Thread(target=self._live, args=(worker,), daemon=True) for worker in range(self.job.workers)
            ]
            for thread in threads:
                thread.start()
            self._wait(threads)
            if self._failed:
                raise InvariantError(f"a worker gave up: {self._failed[0]}") from self._failed[0]
            if any(thread.is_alive() for thread in threads):
                raise InvariantError(f"the job hangs at exchange {self.core.version} of {self.exchanges}")
            if self._actions:
                raise LaconicError(f"faults that never happened: {sorted(self._actions)}")
            self.check()

    def _wait(self, threads: list[threading.Thread]) -> None:
        """Until they have ended, or had their time."""
        left, in_all = self._patience, 3 * self._patience
        for thread in threads:
            while thread.is_alive() and min(left, in_all) > 0:
                began = time.monotonic()
                thread.join(0.1)
                took = time.monotonic() - began
                in_all -= took
                left -= 0 if self._suffering else took

    @contextmanager
    def _set_up(self) -> Iterator[None]:
        if self._cable is not None:
            self._cable.__enter__()
        try:
            self.start_server()
            yield
        finally:
            with self._lock:
                self.server.stop(0)
            if self._cable is not None:
                self._cable.__exit__(None, None, None)

    def check(self) -> None:
        share = 1.0 / self.job.workers if self.job.update_mode.in_rounds else 1.0
        ledger = self.core.parameters["ledger"][0]
        wrong = torch.nonzero(ledger != -share).flatten().tolist()
        if wrong:
            raise InvariantError(
                f"P1, P4, P5: places {wrong} of the ledger hold {ledger[wrong].tolist()}, not {-share}"
            )
        if not self.core.finished(self.exchanges):
            raise InvariantError(f"the job ended at exchange {self.core.version}")
        if self.job.update_mode.in_rounds:
            applied_once(self.events)
            lost_at_most(self.events, 2 * self.job.exchanges_per_checkpoint)
        else:
            all_work_once(self.events, self.job.workers * self.exchanges)
            bound = self.job.update_mode.staleness_bound
            if bound is not None and (found := self._staleness()) > bound:
                raise InvariantError(f"P3: a gradient missed {found} updates, {bound} are allowed")
        found_latest = checkpoint.load_latest(self.checkpoint_store.path)
        if found_latest is None:
            raise InvariantError("P6: there is no checkpoint to load")

    def _staleness(self) -> int:
        """Of each life of the server: after a crash nobody holds what it had given out."""
        most, part = 0, list[dict[str, Any]]()
        for event in [*self.events, {"event": "resumed"}]:
            if event["event"] == "resumed":
                most, part = max(most, staleness(part)), []
            else:
                part.append(event)
        return most


class Life:
    """One life of a worker."""

    def __init__(self, scene: Scene, worker: int, incarnation: int) -> None:
        self.scene, self.worker, self.incarnation = scene, worker, incarnation
        self.client = scene.client(worker, incarnation)
        self._attempt = 0
        self.sequence = 0
        self.place = 0

    @property
    def identity(self) -> dict[str, int]:
        return {"worker": self.worker, "incarnation": self.incarnation, "sequence": self.sequence}

    def run(self) -> None:
        at = self._join()
        self.scene.wait_for_all(self.incarnation)
        while at is not None:
            time.sleep(self.scene.computing)
            self.sequence = at.sequence
            self.place = self._place(at)
            self.scene.suffer(self)
            at = self._exchange(at)
        self.client.leave()

    def _place(self, at: Reply) -> int:
        if at.ticket is not None:
            return at.ticket
        return self.worker * self.scene.exchanges + at.sequence

    def _join(self) -> Reply | None:
        standing = self.client.hello()
        if standing.over:
            return None
        self._attempt += 1
        self.client.join(self._attempt, Offer(standing.versions))
        return self._open(self.client.snapshot())

    def _exchange(self, at: Reply) -> Reply | None:
        frames = list(enumerate(self.scene.frames(self.place)))
        try:
            return self._open(self.client.exchange(at.sequence, frames, lambda: 0.0))
        except RefusedError as error:
            if error.reason not in ("regather", "stale", "ahead"):
                raise
            return self._join()

    def _open(self, reply: Reply) -> Reply | None:
        """What to do next, or nothing."""
        if reply.ticket == NOTHING_LEFT or (reply.ticket is None and reply.sequence >= self.scene.exchanges):
            return None
        return reply
