"""Fuzz targets of the cluster protocol: streams of messages, and a server without its network."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import torch

import bend
import laconic
from inputs import ramp
from laconic import FrameError
from laconic.cluster import protocol
from laconic.cluster.calls import Calls
from laconic.cluster.core import Core
from laconic.cluster.job import Job
from laconic.cluster.replies import RefusedError
from laconic.cluster.server import Server
from laconic.optim import SGD, Schedule

CHUNK = 48
"""The bytes of a piece, so that a frame has few."""


def message_seeds() -> list[bytes]:
    with mock.patch.object(protocol, "CHUNK", CHUNK):
        frames = [laconic.encode(ramp(n), "none") for n in (2, 30)]
        pushed = [m for slot, frame in enumerate(frames) for m in protocol.frame_messages(slot, frame)]
    head = protocol.json_message({"worker": 0, "incarnation": 0, "sequence": 0})
    hello = protocol.json_message({"protocol": 1, "laconic": "0", "worker": 0, "incarnation": 0, "fingerprint": "0"})
    join = protocol.json_message({"worker": 0, "incarnation": 0, "attempt": 0, "versions": [0, 3], "lost": False})
    last = protocol.json_message({"score": 0.5})
    streams = [[hello], [join], [head], [last], pushed, [head, *pushed, last], [b"F" + struct.pack("<IQ", 0, 9)]]
    return [bend.join_messages(stream) for stream in streams]


def check_messages(data: bytes) -> bool:
    """JSON messages are read or rejected; assembled pieces are those that ``frame_messages`` writes."""
    with mock.patch.object(protocol, "CHUNK", CHUNK):
        assembler, taken, fed = protocol.Assembler([64, 300, 1 << 30]), False, []
        for message in bend.split_messages(data):
            if protocol.is_json(message):
                with contextlib.suppress(FrameError):
                    taken |= isinstance(protocol.read_json(message), dict)
                continue
            try:
                done = assembler.feed(message)
            except FrameError:
                return taken
            fed.append(message)
            if done is not None:
                assert fed == list(protocol.frame_messages(*done)), "pieces that no sender writes"
                assert not assembler.incomplete
                fed, taken = [], True
            # A peer must not make the receiver keep many small pieces: each costs some hundred bytes.
            assert all(len(piece) >= CHUNK for piece in fed), "a frame in small pieces"
        return taken


class Context:
    """A call on the server with an expired deadline."""

    def time_remaining(self) -> float:
        return 0.0

    def is_active(self) -> bool:
        return True

    def add_callback(self, call: Callable[[], None]) -> bool:
        return True

    def cancel(self) -> None:
        pass


class Offline(Server):
    """The calls of a server without its network."""

    def __init__(self, core: Core) -> None:
        self.core, self.traffic, self._identify = core, protocol.ByteCounter(), None
        self._deny_list = None
        self._on_stats = lambda worker, incarnation, stats: None
        self._limits = core.job.push_limits(core.parameters.values())
        self.calls = Calls(core.job.workers)


def fresh_core() -> Core:
    parameters = {"weight": torch.zeros(20, 3), "bias": torch.zeros(5)}
    return Core(Job(workers=1, push="topk:0.5|qsgd:4"), parameters, SGD(momentum=0.9, weight_decay=0.0), Schedule(0.1))


@cache
def server_seeds() -> list[bytes]:
    core = fresh_core()
    seeds = []
    for spec in ("none", "topk:0.5|qsgd:4", "qsgd:4|rans"):
        frames = [laconic.encode(ramp(60).view(20, 3), spec), laconic.encode(ramp(5), "none")]
        stream = [
            protocol.json_message({"protocol": protocol.PROTOCOL, "laconic": "0", "worker": 0, "incarnation": 1,
                           "fingerprint": core.slots.fingerprint}),
            protocol.json_message({"worker": 0, "incarnation": 1, "attempt": 0, "versions": [0], "lost": False}),
            protocol.json_message({"worker": 0, "incarnation": 1, "sequence": 0}),
            *(m for slot, frame in enumerate(frames) for m in protocol.frame_messages(slot, frame)),
            protocol.json_message({"score": 0.5}),
        ]  # fmt: skip
        seeds.append(bend.join_messages(stream))
    return seeds


def bend_server(data: bytes, rng: Any, scramble: bend.Scramble, room: int) -> bytes:
    """Change JSON messages, other messages, or the frame in a message."""
    messages = bend.split_messages(data)
    framed = [i for i, message in enumerate(messages) if message[:1] == b"F" and len(message) > 40]
    if not framed or rng.random() < 0.5:
        return bend.messages(data, rng, scramble, room)
    at = rng.choice(framed)
    frame = bend.frame(messages[at][13:], rng, scramble, room)
    messages[at] = messages[at][:5] + struct.pack("<Q", len(frame)) + frame
    return bend.join_messages(messages)


def check_server(data: bytes) -> bool:
    """Hello, join, push and leave with any content are rejected with a message, or applied once with finite values."""
    stream = [*bend.split_messages(data), b"", b""]
    core = fresh_core()
    server: Any = Offline(core)
    methods = {
        "Hello": (server.hello, stream[:1]), "Join": (server.join, stream[1:2]),
        "Snapshot": (server.snapshot, stream[1:2]), "Exchange": (server.exchange, stream[2:-2]),
        "Leave": (server.leave, stream[1:2]),
    }  # fmt: skip
    answers: list[list[bytes] | None] = []
    for name, (method, messages) in methods.items():
        try:
            with server.calls.open(name, Context()) as call:
                answers.append(list(call.send(method(iter(messages), call))))
        except (FrameError, RefusedError):
            answers.append(None)
    changed = any(bool(x.any()) for x in core.parameters.values())
    assert core.version <= 1 and (core.version == 1 or not changed), "changed without an update"
    assert answers[3] is None or core.version == 1, "acknowledged, not applied"
    assert all(bool(torch.isfinite(x).all()) for x in core.parameters.values())
    return answers[3] is not None
