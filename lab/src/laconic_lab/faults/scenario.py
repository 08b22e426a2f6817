"""A small job with a real server and real sockets, in which faults happen at given steps.

Each push adds 1 at its own position of a vector, the ledger. At the end every position holds exactly one application
of its push; anything else means that a push was lost, applied twice or forged.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from laconic.cluster import certificates, checkpoint, security
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
from laconic.train.methods import method_options
from laconic_lab.faults.event_log import EventLog
from laconic_lab.faults.invariants import InvariantError, all_work_once, applied_once, lost_at_most, staleness
from laconic_lab.network.paced_proxy import PacedProxy

__all__ = ["LEDGER_METHODS", "Action", "Scenario", "WorkerDied", "WorkerLife"]

LEDGER_METHODS = ("1", "2", "2w", "3", "4", "5", "laconic", "laconic-min")
"""Methods in which each push counts and the small ledger is sent as it is, or in bf16. ``recovery`` has all methods."""

BALLAST = 1 << 17
"""Bytes of a second slot that makes a push long enough to be cut in the middle."""

Action = Callable[["WorkerLife"], None]


class WorkerDied(Exception):  # noqa: N818 - not an error: the end of a worker's process
    """Raised by an action: the worker ends here and is started again."""


class _CheckpointFolder(checkpoint.Folder):
    """A checkpoint folder on a disk that can be full."""

    full = False

    def save(self, step: int, tensors: Any, meta: dict[str, Any]) -> None:
        if self.full:
            raise FileError(f"cannot write the checkpoint of step {step}: No space left on device")
        super().save(step, tensors, meta)


class Scenario:
    """One job, from its first exchange to its last.

    Args:
        folder: Empty folder for checkpoints and certificates.
        method: Sets the job's options. The ledger's arithmetic is exact with the methods of ``LEDGER_METHODS``.
        link: Whether worker 1 is connected through a proxy that can be cut, slowed and disturbed.
        patience_s: Seconds for which a worker tries to reach the server.
        compute_s: Seconds that a worker takes for a gradient, so that the others get their share of the work.
        timeout_s: Seconds after which the scenario counts as hung. The time that actions take is not counted (but
            three times as many seconds end it in any case): a flood may starve on a busy machine.
    """

    def __init__(
        self, folder: Path, mode: str, *, method: str = "1", workers: int = 2, exchanges: int = 12, link: bool = False,
        rate: str | None = None, tls: bool = False, compute_s: float = 0.01, timeout_s: float = 60.0,
        patience_s: float = 20.0,
    ) -> None:  # fmt: skip
        self.folder, self.exchanges = folder, exchanges
        self.compute_s, self._timeout_s, self._patience_s = compute_s, timeout_s, patience_s
        self.job = Job(
            workers=workers, mode=mode, lr=1.0, momentum=0.0, checkpoint_every=4, **method_options(method, mode)
        )  # fmt: skip
        self._codecs = self._push_codecs()
        self.events = EventLog(folder / "events.jsonl")
        self.notes: list[str] = []
        """What actions observed, for the record."""
        self.checkpoint_store = _CheckpointFolder(folder / "checkpoints")
        self._link = PacedProxy(rate=rate) if link or rate else None
        self._certs = self._certificates(folder) if tls else None
        self._actions: dict[tuple[int, int], list[Action]] = defaultdict(list)
        self._at_end = ExitStack()
        self._lives = itertools.count(1)
        self._server_lives = 0
        self._failed: list[BaseException] = []
        self._actions_running = 0
        self._lock = threading.RLock()
        self._all_here = threading.Barrier(workers)

    def _certificates(self, folder: Path) -> Path:
        certificates.new_job(folder / "certs", name="faults", hosts=["localhost"], workers=self.job.workers)
        return folder / "certs"

    def _parameters(self) -> dict[str, torch.Tensor]:
        places = self.job.workers * self.exchanges
        return {"ledger": torch.zeros(1, places), "ballast": torch.zeros(128, BALLAST // 512)}

    def _push_codecs(self) -> dict[str, str]:
        """Return the codec of each slot, without error feedback: a push has the same content whenever it is made."""
        specs = {name: self.job.push_spec(name, x) for name, x in self._parameters().items()}
        return {name: "|".join(stage for stage in spec.split("|") if stage != "ef") for name, spec in specs.items()}

    def start_server(self, port: int = 0) -> None:
        self._server_lives += 1
        life = self._server_lives

        def record(event: dict[str, Any]) -> None:
            if life == self._server_lives:
                self._record(event)

        self.core = Core(
            self.job, self._parameters(), SGD(), lambda _: 1.0, record, exchanges=self.exchanges,
            checkpoint_store=self.checkpoint_store,
        )  # fmt: skip
        latest = checkpoint.load_latest(self.checkpoint_store.path)
        if latest is None:
            self.checkpoint_store.save(0, *self.core.state())
        else:
            self.core.load(latest.tensors, latest.meta)
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
        """Stop the server at once and start it again from its checkpoints."""
        with self._lock:
            port = self.server.port
            self._server_lives += 1  # events of old handlers are not recorded
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

    def at(self, worker: int, step: int, action: Action) -> None:
        """Run an action once, right before a worker's push of that exchange."""
        self._actions[worker, step].append(action)

    def at_end(self, call: Callable[[], None]) -> None:
        """Call a function when the job has ended and before the server stops."""
        self._at_end.callback(call)

    def address(self, worker: int) -> str:
        if worker == 1 and self._link is not None:
            host, port = self._link.address_of(("127.0.0.1", self.server.port))
            return f"{host}:{port}"
        return f"{'localhost' if self._certs else '127.0.0.1'}:{self.server.port}"

    @property
    def link(self) -> PacedProxy:
        assert self._link is not None
        return self._link

    def client(self, worker: int, incarnation: int) -> Client:
        credentials = None
        if self._certs is not None:
            credentials = security.channel_credentials(security.load_worker(self._certs, worker))
        parameters = self._parameters()
        return Client(
            self.address(worker), worker=worker, incarnation=incarnation, slots=Slots.of(parameters),
            limits=self.job.pull_limits(parameters.values()), credentials=credentials, timeout=20.0,
            patience=Patience(total=self._patience_s, first=0.05, longest=0.3),
        )  # fmt: skip

    def frames(self, place: int) -> list[bytes]:
        """Return the frames of a push that adds 1 at a position of the ledger."""
        parameters = self._parameters()
        parameters["ledger"][0, place] = 1.0
        parameters["ballast"].view(-1)[::7] = 1.0  # an all-zero tensor would be a header only
        return [encode(x, self._codecs[name], seed=place) for name, x in parameters.items()]

    def _live(self, worker: int) -> None:
        try:
            while True:
                life = WorkerLife(self, worker, next(self._lives))
                try:
                    life.run()
                    return
                except WorkerDied:
                    continue
                finally:
                    life.client.close()
        except BaseException as error:
            self._failed.append(error)

    def wait_for_all(self, incarnation: int) -> None:
        """Wait until all workers have joined; without rounds the first could do all the work."""
        if incarnation <= self.job.workers:  # its first process
            self._all_here.wait(self._timeout_s)

    def run_actions(self, life: WorkerLife) -> None:
        """Run the actions that are due before a worker's push."""
        for action in self._actions.pop((life.worker, life.sequence), []):
            with self._lock:
                self._actions_running += 1
            try:
                action(life)
            finally:
                with self._lock:
                    self._actions_running -= 1

    def violation(self) -> str | None:
        """Run the job to its end; return the invariant that it violated, or None."""
        try:
            self.run()
        except LaconicError as error:
            return str(error)
        return None

    def run(self) -> None:
        """Run the job to its end and check every invariant."""
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
        """Wait until the threads have ended or the time is over."""
        left, in_all = self._timeout_s, 3 * self._timeout_s
        for thread in threads:
            while thread.is_alive() and min(left, in_all) > 0:
                began = time.monotonic()
                thread.join(0.1)
                took = time.monotonic() - began
                in_all -= took
                left -= 0 if self._actions_running else took

    @contextmanager
    def _set_up(self) -> Iterator[None]:
        if self._link is not None:
            self._link.__enter__()
        try:
            self.start_server()
            with self._at_end:
                yield
        finally:
            with self._lock:
                self.server.stop(0)
            if self._link is not None:
                self._link.__exit__(None, None, None)

    def check(self) -> None:
        # A round applies the mean of all pushes; changes count for their share of one without rounds, too.
        whole = self.job.sends_gradients and not self.job.update_mode.in_rounds
        applied = 1.0 if whole else 1.0 / self.job.workers
        if self.job.sends_gradients:
            applied = -applied
        ledger = self.core.parameters["ledger"][0]
        wrong = torch.nonzero(ledger != applied).flatten().tolist()
        if wrong:
            raise InvariantError(
                f"P1, P4, P5: places {wrong} of the ledger hold {ledger[wrong].tolist()}, not {applied}"
            )
        if not self.core.finished(self.exchanges):
            raise InvariantError(f"the job ended at exchange {self.core.version}")
        if self.job.update_mode.in_rounds:
            applied_once(self.events)
            lost_at_most(self.events, 2 * self.job.exchanges_per_checkpoint)
        else:
            all_work_once(self.events, self.job.workers * self.exchanges)
            bound = self.job.update_mode.staleness_bound
            if bound is not None and (staleness := self._staleness()) > bound:
                raise InvariantError(f"P3: a gradient missed {staleness} updates, {bound} are allowed")
        found_latest = checkpoint.load_latest(self.checkpoint_store.path)
        if found_latest is None:
            raise InvariantError("P6: there is no checkpoint to load")

    def _staleness(self) -> int:
        """Return the largest staleness, separately for each server process: a crash ends all work in progress."""
        most, part = 0, list[dict[str, Any]]()
        for event in [*self.events, {"event": "resumed"}]:
            if event["event"] == "resumed":
                most, part = max(most, staleness(part)), []
            else:
                part.append(event)
        return most


class WorkerLife:
    """One process of a worker, from joining to its end."""

    def __init__(self, scenario: Scenario, worker: int, incarnation: int) -> None:
        self.scenario, self.worker, self.incarnation = scenario, worker, incarnation
        self.client = scenario.client(worker, incarnation)
        self._attempt = 0
        self.sequence = 0
        self.place = 0

    @property
    def identity(self) -> dict[str, int]:
        return {"worker": self.worker, "incarnation": self.incarnation, "sequence": self.sequence}

    def run(self) -> None:
        at = self._join()
        self.scenario.wait_for_all(self.incarnation)
        while at is not None:
            time.sleep(self.scenario.compute_s)
            self.sequence = at.sequence
            self.place = self._place(at)
            self.scenario.run_actions(self)
            at = self._exchange(at)
        self.client.leave()

    def _place(self, at: Reply) -> int:
        if at.ticket is not None:
            return at.ticket
        return self.worker * self.scenario.exchanges + at.sequence

    def _join(self) -> Reply | None:
        standing = self.client.hello()
        if standing.over:
            return None
        self._attempt += 1
        self.client.join(self._attempt, Offer(standing.versions))
        return self._open(self.client.snapshot())

    def _exchange(self, at: Reply) -> Reply | None:
        frames = list(enumerate(self.scenario.frames(self.place)))
        try:
            return self._open(self.client.exchange(at.sequence, frames, lambda: 0.0))
        except RefusedError as error:
            if error.reason not in ("regather", "stale", "ahead"):
                raise
            return self._join()

    def _open(self, reply: Reply) -> Reply | None:
        """Return the reply, or None if the job is over."""
        if reply.ticket == NOTHING_LEFT or (reply.ticket is None and reply.sequence >= self.scenario.exchanges):
            return None
        return reply
