"""Members that misbehave without a malformed byte: calls left unfinished, answers left unread, silent streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from laconic.cluster.protocol import GRPC_OPTIONS, RPC_PATHS, frame_messages, json_message
from laconic_lab.faults.scenario import WorkerLife

__all__ = ["IDLE_KINDS", "IdleCalls"]

CALLS = 14
"""Calls of one worker: with two workers as many as the server once had threads."""
STREAMS, CONNECTIONS = 16, 20
"""Silent streams on each connection, as many as a server allows, and connections."""
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14))
CONNECT_SECONDS = 30.0
MAX_SECONDS = 600.0


class IdleCalls:
    """Calls that stay open until they are released, or until the server ends them."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._channels: list[grpc.Channel] = []
        self._calls: list[Any] = []  # gRPC cancels a call without references

    def open(self, address: str, name: str, *messages: bytes, calls: int = 1, ends: bool = False) -> None:
        """Open calls on one connection. They send these messages and then nothing, and their answers are not read.

        Args:
            ends: Whether the stream of messages ends; otherwise the call stays unfinished.
        """

        def stream() -> Iterator[bytes]:
            yield from messages
            if not ends:
                self._released.wait(MAX_SECONDS)

        options = (*GRPC_OPTIONS, *SMALL_WINDOW, ("grpc.use_local_subchannel_pool", 1))
        channel = grpc.insecure_channel(address, options=options)
        self._channels.append(channel)
        grpc.channel_ready_future(channel).result(CONNECT_SECONDS)
        method = channel.stream_stream(RPC_PATHS[name])
        self._calls += [method(stream(), timeout=MAX_SECONDS) for _ in range(calls)]

    def release(self) -> None:
        """End all calls and close their connections."""
        self._released.set()
        for channel in self._channels:
            channel.close()
        self._calls, self._channels, self._released = [], [], threading.Event()


def _unfinished(life: WorkerLife, idle: IdleCalls) -> None:
    """Repeat the last applied push and do not finish."""
    head = json_message(life.identity | {"sequence": life.sequence - 1})
    for _ in range(CALLS):
        idle.open(life.scenario.address(0), "Exchange", head)


def _unread(life: WorkerLife, idle: IdleCalls) -> None:
    """Repeat the last applied push and do not read the answer."""
    messages = [json_message(life.identity | {"sequence": life.sequence - 1})]
    for slot, frame in enumerate(life.scenario.frames(life.place)):
        messages += frame_messages(slot, frame)
    for _ in range(CALLS):
        idle.open(life.scenario.address(0), "Exchange", *messages, json_message({"score": 0.0}), ends=True)


def _snapshots(life: WorkerLife, idle: IdleCalls) -> None:
    """Ask for the weights and do not read them."""
    for _ in range(CALLS):
        idle.open(life.scenario.address(0), "Snapshot", json_message(life.identity), ends=True)


def _silent(life: WorkerLife, idle: IdleCalls) -> None:
    """Open streams that send nothing at all."""
    for _ in range(CONNECTIONS):
        idle.open(life.scenario.address(0), "Exchange", calls=STREAMS)


IDLE_KINDS: Mapping[str, Callable[[WorkerLife, IdleCalls], None]] = {
    "unfinished": _unfinished, "unread": _unread, "snapshots": _snapshots, "silent": _silent,
}  # fmt: skip
"""What a member leaves open, by name."""
