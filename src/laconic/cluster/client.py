"""A worker's gRPC connection to one server: calls, retries and checks of what arrives."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from laconic import counters
from laconic._version import __version__
from laconic.cluster import protocol
from laconic.cluster.call_thread import CallThread, StuckCallError
from laconic.cluster.connection import ServerStatus
from laconic.cluster.job import Job, Slots
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError, Reply
from laconic.errors import ConfigError, FileError, FrameError
from laconic.frames import open_packet
from laconic.wire import is_bundle, unpack_bundle

__all__ = ["Client", "Patience", "UnreachableError"]

log = logging.getLogger("laconic")
T = TypeVar("T")

MAX_DAMAGED = 3
"""How many damaged messages in a row are retried."""
FATAL = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
STUCK_AFTER = 15.0
"""Seconds after its deadline at which a call counts as stuck."""
LEAVE_TIMEOUT = CLOSE_TIMEOUT = 2.0
SLOWEST_LINK = 125_000
"""Bytes per second of the slowest link on which a call must not time out."""


class UnreachableError(FileError):
    """No server answers at the address, or none has for too long."""


@dataclass
class Patience:
    """How long a worker keeps trying, in seconds.

    Args:
        total: With a server that does not answer.
        first: Before the second attempt; the wait doubles with each attempt.
        others: For other workers, while the server answers.
    """

    total: float = 60.0
    first: float = 0.1
    longest: float = 2.0
    others: float = 600.0


def stats_interval(elapsed: float) -> float:
    """Return the seconds between two reports of a worker's statistics: 1/1000 of the run so far, 0.05 to 1 s.

    Reports are spaced out because one is as large as the frames of a small model.
    """
    return min(1.0, max(0.05, elapsed / 1000))


class Client:
    """One worker's connection to one server. All calls come from one thread.

    Args:
        address: ``host:port`` of the server.
        incarnation: Grows with each start of this worker: the server rejects older ones.
        limits: The largest possible frame of each slot, in bytes.
        resident: The same for tensors that a snapshot holds and exchanges do not.
        credentials: gRPC channel credentials; None for plaintext.
        timeout: Seconds that one call may take, plus the time that its frames need on the slowest link.
    """

    def __init__(
        self, address: str, *, worker: int, incarnation: int, slots: Slots, limits: list[int],
        resident: Sequence[int] = (), credentials: grpc.ChannelCredentials | None = None, timeout: float = 120.0,
        patience: Patience | None = None,
    ) -> None:  # fmt: skip
        self.address = address
        self.identity = {"worker": worker, "incarnation": incarnation}
        self.slots = slots
        self.limits = limits
        self.resident = list(resident)
        self.timeout = timeout + (sum(limits) + sum(resident)) / SLOWEST_LINK
        self.patience = patience or Patience()
        self.traffic = protocol.ByteCounter()
        self.retries = 0
        self.stats: dict[str, float] = {}
        """The ``WORKER_STATS`` to report with a push now and then, and when this worker leaves."""
        self._began = self._next_report = time.monotonic()
        self._credentials = credentials
        self._jitter = random.Random()  # not the module's state, which a training script may have seeded
        self._connect()

    def _connect(self) -> None:
        options = protocol.GRPC_OPTIONS
        if self._credentials is None:
            self._channel = grpc.insecure_channel(self.address, options=options)
        else:
            self._channel = grpc.secure_channel(self.address, self._credentials, options=options)
        self._calls = CallThread()
        self._join = self._channel.unary_unary(protocol.RPC_PATHS["Join"])
        self._hello = self._channel.unary_unary(protocol.RPC_PATHS["Hello"])
        self._leave = self._channel.unary_unary(protocol.RPC_PATHS["Leave"])
        self._snapshot = self._channel.unary_stream(protocol.RPC_PATHS["Snapshot"])
        self._exchange = self._channel.stream_stream(protocol.RPC_PATHS["Exchange"])
        self._agree = self._channel.stream_stream(protocol.RPC_PATHS["Agree"])
        self._deposit = self._channel.stream_unary(protocol.RPC_PATHS["Deposit"])

    def hello(self) -> ServerStatus:
        """Introduce this worker. The connection is established only when the server has answered."""
        request = protocol.json_message(
            self.identity
            | {"protocol": protocol.PROTOCOL, "laconic": __version__, "fingerprint": self.slots.fingerprint}
        )
        answer = self._retry(
            lambda timeout: protocol.read_json(self._hello(request, timeout=timeout)),
            "say hello",
            min(10.0, self.timeout),
        )
        try:
            return ServerStatus(
                Job.from_json(answer["job"]),
                frozenset(answer["versions"]),
                bool(answer["over"]),
                str(answer.get("weights", "here")),
            )
        except (KeyError, TypeError, ConfigError) as error:
            raise FrameError(f"the server's answer to hello is invalid: {error}") from None

    def join(self, attempt: int, offer: Offer) -> tuple[int, bool]:
        request = protocol.json_message(
            self.identity | {"attempt": attempt, "versions": sorted(offer.versions), "lost": offer.lost}
        )
        answer = self._retry(lambda timeout: protocol.read_json(self._join(request, timeout=timeout)), "join")
        return int(answer["sequence"]), bool(answer["lost"])

    def snapshot(self) -> Reply:
        """Download the weights; then optimizer state, resident tensors and scales, where the job has them."""
        limits = 2 * self.limits + self.resident + self.limits
        return self._retry(
            lambda timeout: self._receive(
                self._snapshot(protocol.json_message(self.identity), timeout=timeout), limits
            ),
            "download the weights",
        )

    def exchange(
        self, sequence: int, frames: Iterable[tuple[int, protocol.Frame]], score: Callable[[], float]
    ) -> Reply:
        """See ``Connection``. An interrupted push is sent again; the server recognises one that it has applied."""
        stats = self._stats_due()

        def request() -> Iterator[bytes]:
            yield protocol.json_message(self.identity | {"sequence": sequence})
            for slot, frame in frames:
                yield from self._send(slot, frame)
            yield protocol.json_message({"score": score()} | ({"told": stats} if stats else {}))

        return self._retry(
            lambda timeout: self._receive(self._exchange(request(), timeout=timeout), self.limits),
            f"exchange {sequence}",
        )

    def _stats_due(self) -> dict[str, float]:
        now = time.monotonic()
        if now < self._next_report:
            return {}
        self._next_report = now + stats_interval(now - self._began)
        return self.stats

    def agree_scales(self, sequence: int, scales: Sequence[protocol.Frame]) -> Sequence[protocol.Frame]:
        return self._retry(
            lambda timeout: self._receive(
                self._agree(self._request({"sequence": sequence}, scales), timeout=timeout), self.limits
            ),
            f"agree on the scales of exchange {sequence}",
        ).frames

    def upload_weights(self, version: int, frames: Sequence[protocol.Frame]) -> None:
        self._retry(
            lambda timeout: self._deposit(self._request({"version": version}, frames), timeout=timeout),
            f"upload the weights of version {version}",
            2 * self.timeout,
        )

    def compare_weights(self, version: int, digests: Sequence[protocol.Frame]) -> None:
        self._retry(
            lambda timeout: self._deposit(self._request({"version": version, "digests": 1}, digests), timeout=timeout),
            f"compare the weights of version {version}",
        )

    def _request(self, head: dict[str, int], frames: Sequence[protocol.Frame]) -> Iterator[bytes]:
        yield protocol.json_message(self.identity | head)
        for slot, frame in enumerate(frames):
            yield from self._send(slot, frame)
        yield protocol.json_message({})

    def _send(self, slot: int, frame: protocol.Frame) -> Iterator[bytes]:
        self.traffic.count(sent=len(frame))
        yield from protocol.frame_messages(slot, frame)

    def leave(self) -> None:
        """Tell the server that it need not wait for this worker."""
        request = protocol.json_message(self.identity | {"told": self.stats})
        try:
            self._call(lambda timeout: self._leave(request, timeout=timeout), LEAVE_TIMEOUT)
        except (grpc.RpcError, StuckCallError):
            log.info("the server did not confirm that this worker leaves")

    def close(self) -> None:
        self._calls.close()
        closing = self._close_channel()
        closing.join(CLOSE_TIMEOUT)
        if closing.is_alive():
            counters.count("stuck calls", 1, f"gRPC keeps the connection to server {self.address} from being closed")

    def _call(self, attempt: Callable[[float], T], timeout: float) -> T:
        """Make a call with a deadline; leave one behind, and its connection, that has not ended long after it."""
        try:
            return self._calls.call(lambda: attempt(timeout), timeout + STUCK_AFTER)
        except StuckCallError:
            counters.count("stuck calls", 1, f"gRPC keeps a call to server {self.address} past its deadline")
            self._reconnect()
            raise

    def _close_channel(self) -> threading.Thread:
        """Close the connection in a thread of its own: like a call, this may never end."""
        closing = threading.Thread(target=self._channel.close, name="laconic-close", daemon=True)
        closing.start()
        return closing

    def _reconnect(self) -> None:
        """Leave a connection with a stuck call behind."""
        self._close_channel()
        self._connect()

    def _receive(self, messages: Iterator[bytes], limits: Sequence[int]) -> Reply:
        """Read one or more frames per slot, at most ``len(limits)``, and check them while they can be sent again."""
        head = protocol.read_json(next(messages, b""))
        assembler, frames = protocol.Assembler(limits), {}
        for message in messages:
            complete = assembler.feed(message)
            if complete is not None:
                slot, frame = complete
                _check(frame)  # meanwhile the next ones arrive
                frames[slot] = frame
        if not frames or len(frames) % len(self.slots) or assembler.incomplete:
            raise FrameError(f"the server sent {len(frames)} frames for {len(self.slots)} slots")
        self.traffic.count(received=assembler.total)
        ticket = head.get("ticket")
        if not isinstance(head.get("sequence"), int) or not isinstance(ticket, int | None):
            raise FrameError(f"'sequence' and 'ticket' of the server's reply must be integers, got {head}")
        return Reply(head["sequence"], tuple(frames[slot] for slot in range(len(frames))), ticket)

    def _retry(self, attempt: Callable[[float], T], action: str, timeout: float | None = None) -> T:
        """Repeat a call until it succeeds, the server refuses it, or patience ends.

        ``attempt`` makes the call with the deadline that it is given, ``self.timeout`` seconds by default.
        """
        wait, damaged = self.patience.first, 0
        lost_since: float | None = None
        waiting_since: float | None = None
        while True:
            try:
                return self._call(attempt, timeout or self.timeout)
            except StuckCallError as error:
                code, details = grpc.StatusCode.UNAVAILABLE, str(error)
            except FrameError as error:
                code, details = grpc.StatusCode.DATA_LOSS, str(error)
            except grpc.RpcError as error:
                code, details = error.code(), error.details() or ""
            now = time.monotonic()
            if code == grpc.StatusCode.FAILED_PRECONDITION:
                refusal = _parse_refusal(details)
                waiting_since = waiting_since or now
                if refusal.reason != "waiting" or now - waiting_since > self.patience.others:
                    raise refusal
                log.warning("the server %s", refusal)
                wait, lost_since = self.patience.first, None  # it answers
                continue
            if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS):
                # A frame may have been damaged on the way; one that stays damaged was sent so.
                damaged += 1
                if damaged > MAX_DAMAGED:
                    raise FrameError(details)
                log.warning("damaged data (%s): trying again to %s", details, action)
                self.retries += 1
                continue
            if code in FATAL or details.startswith(protocol.SERVER_FAILED):
                raise UnreachableError(f"server {self.address} failed to {action}: {code.name}: {details}")
            lost_since = lost_since or now
            if now + wait > lost_since + self.patience.total:
                raise UnreachableError(
                    f"no server at {self.address} for {self.patience.total:.0f} s ({details}): is it running, and "
                    "is the address right?"
                )
            self.retries += 1
            log.warning("server %s does not answer (%s): trying again in %.1f s", self.address, code.name, wait)
            time.sleep(wait * self._jitter.uniform(0.8, 1.2))  # many workers must not reconnect at once
            wait = min(2 * wait, self.patience.longest)


def _check(frame: protocol.Frame) -> None:
    for part in [part for _, part in unpack_bundle(frame)] if is_bundle(frame) else [frame]:
        open_packet(part)


def _parse_refusal(details: str) -> RefusedError:
    try:
        refusal: dict[str, Any] = json.loads(details)
        return RefusedError(str(refusal["reason"]), str(refusal["message"]), resume_at=refusal["resume_at"])
    except (ValueError, KeyError, TypeError):
        return RefusedError("refused", details)
