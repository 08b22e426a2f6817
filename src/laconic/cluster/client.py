"""A worker's end of the line: connect, push, pull, and come again after a fault."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from laconic._version import __version__
from laconic.cluster.core import RefusedError, Reply
from laconic.cluster.job import Job, Slots
from laconic.cluster.messages import PROTOCOL, Assembler, frame_messages, note, read_note
from laconic.cluster.server import CALLS, OPTIONS, Traffic
from laconic.errors import FileError, FrameError

__all__ = ["Client", "UnreachableError"]

log = logging.getLogger("laconic")
T = TypeVar("T")


class UnreachableError(FileError):
    """No server answers at that address, or none has for too long."""


@dataclass
class Patience:
    """How long a worker keeps trying, and how long it waits in between."""

    total: float = 60.0
    first: float = 0.1
    longest: float = 2.0


class Client:
    """One worker's connection. Calls are made from one thread.

    Args:
        address: ``host:port`` of the server.
        worker: This worker's number.
        incarnation: Grows with each start of this worker: the server refuses an older one.
        slots: What is exchanged.
        limits: The most bytes that a frame of each slot can have.
        credentials: gRPC channel credentials; None for plaintext.
        timeout: Seconds that one call may take.
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
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float = 120.0,
        patience: Patience | None = None,
    ) -> None:
        self.address = address
        self.identity = {"worker": worker, "incarnation": incarnation}
        self.slots = slots
        self.limits = limits
        self.timeout = timeout
        self.patience = patience or Patience()
        self.traffic = Traffic()
        self.retries = 0
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=OPTIONS)
        self._hello = self._channel.unary_unary(CALLS["Hello"])
        self._leave = self._channel.unary_unary(CALLS["Leave"])
        self._snapshot = self._channel.unary_stream(CALLS["Snapshot"])
        self._exchange = self._channel.stream_stream(CALLS["Exchange"])

    def connect(self) -> tuple[int, Job]:
        """Say hello; the number of the next exchange, and the job. Only now is there a connection."""
        asked = note(
            self.identity | {"protocol": PROTOCOL, "laconic": __version__, "fingerprint": self.slots.fingerprint}
        )
        answer = self._again(lambda: read_note(self._hello(asked, timeout=min(10.0, self.timeout))), "say hello")
        return int(answer["sequence"]), Job.from_json(answer["job"])

    def snapshot(self) -> Reply:
        """All weights, as they are, and the optimizer's memory where workers take the steps."""
        return self._again(
            lambda: self._receive(self._snapshot(note(self.identity), timeout=self.timeout), parts=2),
            "fetch the weights",
        )

    def exchange(self, sequence: int, frames: Iterable[tuple[int, bytes]], score: Callable[[], float]) -> Reply:
        """Push a frame per slot, as they become ready, and wait for what comes back.

        A push that broke off is sent again from what was kept; the server knows whether it had arrived.
        """
        kept: list[tuple[int, bytes]] = []
        source = iter(frames)

        def outgoing() -> Iterator[bytes]:
            yield note(self.identity | {"sequence": sequence})
            for slot, frame in list(kept):
                yield from frame_messages(slot, frame)
            for slot, frame in source:
                kept.append((slot, frame))
                yield from frame_messages(slot, frame)
            yield note({"score": score()})

        def attempt() -> Reply:
            reply = self._receive(self._exchange(outgoing(), timeout=self.timeout))
            self.traffic.count(sent=sum(len(frame) for _, frame in kept))
            return reply

        return self._again(attempt, f"exchange {sequence}")

    def leave(self) -> None:
        """Tell the server that nobody need wait for this worker."""
        try:
            self._leave(note(self.identity), timeout=2.0)
        except grpc.RpcError:
            log.info("the server did not hear this worker leave")

    def close(self) -> None:
        self._channel.close()

    def _receive(self, messages: Iterator[bytes], parts: int = 1) -> Reply:
        """A frame per slot, or up to ``parts`` of each."""
        head = read_note(next(messages, b""))
        assembler, frames = Assembler(parts * self.limits), {}
        for message in messages:
            done = assembler.feed(message)
            if done is not None:
                frames[done[0]] = done[1]
        if not frames or len(frames) % len(self.slots) or assembler.in_pieces:
            raise FrameError(f"the server sent {len(frames)} frames for {len(self.slots)} slots")
        self.traffic.count(received=assembler.total)
        return Reply(int(head["sequence"]), tuple(frames[slot] for slot in range(len(frames))))

    def _again(self, attempt: Callable[[], T], what: str) -> T:
        """Try until it works, the server refuses, or patience ends."""
        end, wait = time.monotonic() + self.patience.total, self.patience.first
        while True:
            try:
                return attempt()
            except grpc.RpcError as error:
                code, details = error.code(), error.details() or ""
                if code == grpc.StatusCode.FAILED_PRECONDITION:
                    raise _refused(details) from None
                if code == grpc.StatusCode.INVALID_ARGUMENT:
                    raise FrameError(details) from None
                if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise UnreachableError(f"server {self.address} failed to {what}: {code.name}: {details}") from None
                if time.monotonic() + wait > end:
                    raise UnreachableError(
                        f"no server at {self.address} for {self.patience.total:.0f} s ({details}): is it running, and "
                        "is the address right?"
                    ) from None
                self.retries += 1
                log.warning("server %s is not there (%s): trying again in %.1f s", self.address, code.name, wait)
                time.sleep(wait * random.uniform(0.8, 1.2))  # many workers must not come at once
                wait = min(2 * wait, self.patience.longest)


def _refused(details: str) -> RefusedError:
    try:
        told: dict[str, Any] = json.loads(details)
        return RefusedError(str(told["reason"]), str(told["message"]), resume_at=told["resume_at"])
    except (ValueError, KeyError, TypeError):
        return RefusedError("refused", details)
