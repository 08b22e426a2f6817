"""Servers on sockets, their clients, and peers that send anything."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from helpers import TIMEOUT

from laconic.cluster.client import Client, Patience
from laconic.cluster.core import Core
from laconic.cluster.protocol import GRPC_OPTIONS, RPC_PATHS, frame_messages, json_message
from laconic.cluster.rejoin import Offer
from laconic.cluster.server import Server


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
        f"127.0.0.1:{server.port}", worker=worker, incarnation=incarnation, slots=core.slots,
        limits=core.job.pull_limits(core.parameters.values()), **{"patience": Patience(total=2.0)} | options,
    )  # fmt: skip


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
