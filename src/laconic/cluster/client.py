"""A worker's end of the line: connect, push, pull, and come again after a fault."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from laconic._version import __version__
from laconic.cluster.connection import Standing
from laconic.cluster.job import Job, Slots
from laconic.cluster.protocol import PROTOCOL, Assembler, Frame, frame_messages, note, read_note
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.server import CALLS, OPTIONS, SERVER_FAILED, Traffic
from laconic.errors import ConfigError, FileError, FrameError
from laconic.frames import open_packet
from laconic.wire import is_bundle, unpack_bundle

__all__ = ["Client", "UnreachableError"]

log = logging.getLogger("laconic")
T = TypeVar("T")

DAMAGED_AT_MOST = 3
"""How often in a row something may arrive damaged."""
FATAL = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
SLOWEST = 125_000
"""Bytes a second of the slowest line that a call must not be cut off on."""


class UnreachableError(FileError):
    """No server answers at that address, or none has for too long."""


@dataclass
class Patience:
    """How long a worker keeps trying, in seconds.

    Args:
        total: With a server that does not answer.
        first: Before the second try; each is twice as far from the last.
        longest: But no farther than this.
        others: For other workers, as long as the server answers.
    """

    total: float = 60.0
    first: float = 0.1
    longest: float = 2.0
    others: float = 600.0


class Client:
    """One worker's connection. Calls are made from one thread.

    Args:
        address: ``host:port`` of the server.
        worker: This worker's number.
        incarnation: Grows with each start of this worker: the server refuses an older one.
        slots: What is exchanged.
        limits: The most bytes that a frame of each slot can have.
        resident: The same of what belongs to slots and is not exchanged, which a snapshot has.
        credentials: gRPC channel credentials; None for plaintext.
        timeout: Seconds that one call may take beside its transfer; a slow line gets more by the size of the model.
        patience: How long to try again when the server is not there.
    """

    def __init__(
        self,
        address: str,
        *,
        worker: int,
        incarnation: int,
        slots: Slots,
        limits: list[int],
        resident: Sequence[int] = (),
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float = 120.0,
        patience: Patience | None = None,
    ) -> None:
        self.address = address
        self.identity = {"worker": worker, "incarnation": incarnation}
        self.slots = slots
        self.limits = limits
        self.resident = list(resident)
        self.timeout = timeout + (sum(limits) + sum(resident)) / SLOWEST
        self.patience = patience or Patience()
        self.traffic = Traffic()
        self.retries = 0
        self.about: dict[str, float] = {}
        """What to tell of this worker, now and then with a push, and on leaving; see ``TOLD``."""
        self._began = self._next_told = time.monotonic()
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=OPTIONS)
        self._join = self._channel.unary_unary(CALLS["Join"])
        self._hello = self._channel.unary_unary(CALLS["Hello"])
        self._leave = self._channel.unary_unary(CALLS["Leave"])
        self._snapshot = self._channel.unary_stream(CALLS["Snapshot"])
        self._exchange = self._channel.stream_stream(CALLS["Exchange"])
        self._agree = self._channel.stream_stream(CALLS["Agree"])
        self._deposit = self._channel.stream_unary(CALLS["Deposit"])

    def hello(self) -> Standing:
        """Say hello. Only when this is answered is there a connection."""
        asked = note(
            self.identity | {"protocol": PROTOCOL, "laconic": __version__, "fingerprint": self.slots.fingerprint}
        )
        answer = self._again(lambda: read_note(self._hello(asked, timeout=min(10.0, self.timeout))), "say hello")
        try:
            return Standing(
                Job.from_json(answer["job"]),
                frozenset(answer["versions"]),
                bool(answer["over"]),
                str(answer.get("weights", "here")),
            )
        except (KeyError, TypeError, ConfigError) as error:
            raise FrameError(f"the server's welcome makes no sense: {error}") from None

    def join(self, attempt: int, offer: Offer) -> tuple[int, bool]:
        asked = note(self.identity | {"attempt": attempt, "versions": sorted(offer.versions), "lost": offer.lost})
        answer = self._again(lambda: read_note(self._join(asked, timeout=self.timeout)), "agree where to go on")
        return int(answer["sequence"]), bool(answer["lost"])

    def snapshot(self) -> Reply:
        """All weights; the optimizer's memory where workers take the steps; and what else belongs to slots: the weights
        that subspaces move, and the scales of sums.
        """
        limits = 2 * self.limits + self.resident + self.limits
        return self._again(
            lambda: self._receive(self._snapshot(note(self.identity), timeout=self.timeout), limits),
            "fetch the weights",
        )

    def exchange(self, sequence: int, frames: Iterable[tuple[int, Frame]], score: Callable[[], float]) -> Reply:
        """See ``Link``. A push that broke off is sent again; the server knows whether it had arrived."""
        told = self._told()

        def outgoing() -> Iterator[bytes]:
            yield note(self.identity | {"sequence": sequence})
            for slot, frame in frames:
                self.traffic.count(sent=len(frame))
                yield from frame_messages(slot, frame)
            yield note({"score": score()} | ({"told": told} if told else {}))

        return self._again(
            lambda: self._receive(self._exchange(outgoing(), timeout=self.timeout), self.limits),
            f"exchange {sequence}",
        )

    def _told(self) -> dict[str, float]:
        """What to tell beside a push: not with each one, a note is no smaller than the frames of a small model."""
        now = time.monotonic()
        if now < self._next_told:
            return {}
        self._next_told = now + min(1.0, max(0.05, (now - self._began) / 1000))
        return self.about

    def agree(self, sequence: int, scales: Sequence[Frame]) -> Sequence[Frame]:
        return self._again(
            lambda: self._receive(
                self._agree(self._outgoing({"sequence": sequence}, scales), timeout=self.timeout), self.limits
            ),
            f"agree on the scales of exchange {sequence}",
        ).frames

    def deposit(self, version: int, frames: Sequence[Frame]) -> None:
        self._again(
            lambda: self._deposit(self._outgoing({"version": version}, frames), timeout=2 * self.timeout),
            f"deposit the weights of exchange {version}",
        )

    def _outgoing(self, head: dict[str, int], frames: Sequence[Frame]) -> Iterator[bytes]:
        yield note(self.identity | head)
        for slot, frame in enumerate(frames):
            self.traffic.count(sent=len(frame))
            yield from frame_messages(slot, frame)
        yield note({})

    def leave(self) -> None:
        """Tell the server that nobody need wait for this worker."""
        try:
            self._leave(note(self.identity | {"told": self.about}), timeout=2.0)
        except grpc.RpcError:
            log.info("the server did not hear this worker leave")

    def close(self) -> None:
        self._channel.close()

    def _receive(self, messages: Iterator[bytes], limits: Sequence[int]) -> Reply:
        """A frame per slot, or several of each, up to as many as there are limits."""
        head = read_note(next(messages, b""))
        assembler, frames = Assembler(limits), {}
        for message in messages:
            done = assembler.feed(message)
            if done is not None:
                frames[done[0]] = done[1]
        if not frames or len(frames) % len(self.slots) or assembler.in_pieces:
            raise FrameError(f"the server sent {len(frames)} frames for {len(self.slots)} slots")
        self.traffic.count(received=assembler.total)
        for frame in frames.values():
            _check(frame)  # checksums here, where it can be asked for again
        ticket = head.get("ticket")
        if not isinstance(head.get("sequence"), int) or not isinstance(ticket, int | None):
            raise FrameError(f"the server's answer needs whole numbers, got {head}")
        return Reply(head["sequence"], tuple(frames[slot] for slot in range(len(frames))), ticket)

    def _again(self, attempt: Callable[[], T], what: str) -> T:
        """Try until it works, the server refuses, or patience ends."""
        wait, damaged = self.patience.first, 0
        lost_since: float | None = None
        waiting_since: float | None = None
        while True:
            try:
                return attempt()
            except FrameError as error:
                code, details = grpc.StatusCode.DATA_LOSS, str(error)
            except grpc.RpcError as error:
                code, details = error.code(), error.details() or ""
            now = time.monotonic()
            if code == grpc.StatusCode.FAILED_PRECONDITION:
                refused = _refused(details)
                waiting_since = waiting_since or now
                if refused.reason != "waiting" or now - waiting_since > self.patience.others:
                    raise refused
                log.warning("the server %s", refused)
                wait, lost_since = self.patience.first, None  # it answers
                continue
            if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS):
                # A checksum that is wrong may have been right at the other end; what is wrong again was never right.
                damaged += 1
                if damaged > DAMAGED_AT_MOST:
                    raise FrameError(details)
                log.warning("something was damaged on the way (%s): trying to %s again", details, what)
                self.retries += 1
                continue
            if code in FATAL or details.startswith(SERVER_FAILED):
                raise UnreachableError(f"server {self.address} failed to {what}: {code.name}: {details}")
            lost_since = lost_since or now
            if now + wait > lost_since + self.patience.total:
                raise UnreachableError(
                    f"no server at {self.address} for {self.patience.total:.0f} s ({details}): is it running, and "
                    "is the address right?"
                )
            self.retries += 1
            log.warning("server %s is not there (%s): trying again in %.1f s", self.address, code.name, wait)
            time.sleep(wait * random.uniform(0.8, 1.2))  # many workers must not come at once
            wait = min(2 * wait, self.patience.longest)


def _check(frame: Frame) -> None:
    if not is_bundle(frame):
        open_packet(frame)
        return
    for _, one in unpack_bundle(frame):
        open_packet(one)


def _refused(details: str) -> RefusedError:
    try:
        told: dict[str, Any] = json.loads(details)
        return RefusedError(str(told["reason"]), str(told["message"]), resume_at=told["resume_at"])
    except (ValueError, KeyError, TypeError):
        return RefusedError("refused", details)
