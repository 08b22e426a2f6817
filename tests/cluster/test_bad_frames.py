"""Frames with a wrong shape, codec, checksum or content change nothing, and the sender gets one line of text."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from grpc_peers import Peer, begin, client_of, head_of, serving
from helpers import ONES, TIMEOUT, Events, open_session, small_core, train
from torch import Tensor

from laconic import wire
from laconic.aggregate import OpenedFrame
from laconic.cluster.client import Client
from laconic.cluster.core import Core
from laconic.cluster.job import Job
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.server import Server
from laconic.errors import FrameError
from laconic.frames import encode
from laconic.packet import Packet, TensorSpec
from laconic.train.methods import method_options
from laconic_lab.faults.invariants import applied_once
from waiting import eventually

FAULTS = ("shape", "dtype", "nan", "infinity", "codec", "version", "truncated", "flipped")


def with_valid_checksum(x: Tensor, codec: str = "none") -> bytes:
    section = x.contiguous().view(-1).view(torch.uint8)
    return bytes(wire.pack(Packet(codec, TensorSpec.of(x), (section,))))


def damage(fault: str, frame: bytes) -> bytes:
    shape = wire.unpack(frame).spec.shape
    x = torch.zeros(shape)
    if fault == "shape":
        return encode(torch.zeros(*shape[:-1], shape[-1] + 1), "none")
    if fault == "dtype":
        return encode(x.double(), "none")
    if fault in ("nan", "infinity"):
        x.view(-1)[-1] = float("nan" if fault == "nan" else "inf")
        return with_valid_checksum(x)
    if fault == "codec":
        return with_valid_checksum(x, codec="zip")
    if fault == "version":
        return frame[:4] + bytes([frame[4] + 1]) + frame[5:]
    if fault == "truncated":
        return frame[:-1]
    return frame[:-1] + bytes([frame[-1] ^ 1])


class FaultyClient(Client):
    """Sends a damaged frame of each kind once, keeps the refusal, and then sends the right frames."""

    refusals: dict[str, str]
    sent: set[str]

    def exchange(self, sequence: int, frames: Any, score: Callable[[], float]) -> Reply:
        faults = FAULTS if self.identity["worker"] else FAULTS[::-1]
        turn, is_faulty = divmod(sequence + self.identity["worker"], 2)  # never both workers in one exchange
        if is_faulty and turn < len(faults) and faults[turn] not in self.sent:
            fault = faults[turn]
            self.sent.add(fault)
            good = list(frames)
            middle = len(good) // 2
            bad = [*good[:middle], (good[middle][0], damage(fault, good[middle][1])), *good[middle + 1 :]]
            try:
                super().exchange(sequence, bad, score)
            except FrameError as error:
                self.refusals[fault] = str(error)
            except RefusedError as error:
                if error.reason == "spoilt":  # otherwise the other worker's fault has ended the round
                    self.refusals[fault] = str(error)
        return super().exchange(sequence, frames, score)


@pytest.mark.parametrize("method", ["1", "laconic"])
def test_bad_frames_during_a_job_change_no_bit(method: str) -> None:
    job = Job(**{"workers": 2, "lr": 0.05} | method_options(method))
    exchanges = 2 * len(FAULTS) + 2
    clean, _ = train(job, exchanges)
    servers: list[Server] = []
    refusals: list[dict[str, str]] = [{}, {}]
    events: Events = []

    def link(core: Core, worker: int) -> Client:
        if not servers:
            servers.append(Server(core, "127.0.0.1:0"))
        client: FaultyClient = client_of(servers[0], worker, kind=FaultyClient)
        client.refusals, client.sent = refusals[worker], set()
        return client

    core, _ = train(job, exchanges, link=link, events=events)
    servers[0].stop(0)
    for name, x in clean.parameters.items():
        assert torch.equal(core.parameters[name], x), name
    applied_once(events)
    assert core.queued_nbytes == 0
    for worker in range(2):
        assert set(refusals[worker]) >= set(FAULTS) - {"nan", "infinity"}
        assert all("\n" not in line and len(line) < 300 for line in refusals[worker].values()), refusals
    assert "nan" in refusals[0] | refusals[1] and [e for e in events if e["event"] == "spoilt"]


@pytest.mark.parametrize("options", [{"mode": "async"}, {"workers": 3, "backup": 1}], ids=["async", "backup"])
def test_bad_frames_change_nothing_without_a_full_round(options: dict[str, Any], peers: Callable[..., Peer]) -> None:
    core = small_core(**options)
    with serving(core) as server:
        client, peer = client_of(server), peers(server.port)
        begin(client)
        client.snapshot()
        for fault in ("nan", "infinity", "shape", "codec"):
            refusal = peer.push(head_of(), damage(fault, ONES))
            assert refusal.code() == grpc.StatusCode.INVALID_ARGUMENT and "\n" not in refusal.details()
            assert core.version == 0 == core.queued_nbytes and not core.parameters["w"].any()


def test_push_that_is_still_being_added_does_not_leak_into_the_restarted_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a push is being added a worker restarts, and all begin the round again."""
    core = small_core(slots={"w": 4, "b": 4})

    def push(worker: int, incarnation: int, value: float) -> None:
        frames = [encode(torch.full((4,), value), "none")] * 2
        with contextlib.suppress(RefusedError):
            core.exchange(worker, incarnation, 0, frames, deadline=time.monotonic() + TIMEOUT)

    for worker in range(2):
        open_session(core, worker)
    adding, proceed, add_to = threading.Event(), threading.Event(), OpenedFrame.add_to

    def slow_add_to(self: OpenedFrame, out: Tensor, weight: float) -> None:
        if self.slot == "b" and threading.current_thread().name == "old":
            adding.set()
            proceed.wait(TIMEOUT)
        add_to(self, out, weight)

    monkeypatch.setattr(OpenedFrame, "add_to", slow_add_to)
    old = threading.Thread(target=push, args=(0, 0, 64.0), name="old")
    old.start()
    assert adding.wait(TIMEOUT)
    open_session(core, 1, 1, attempt=1)
    core.offer(0, 0, 1, Offer(frozenset({0})))
    new = threading.Thread(target=push, args=(0, 0, 2.0))
    new.start()
    assert eventually(lambda: core._mode.current_round.added == 1)  # type: ignore[union-attr]
    proceed.set()
    old.join(TIMEOUT)
    push(1, 1, 4.0)
    new.join(TIMEOUT)
    assert core.version == 1 and core.queued_nbytes == 0
    for name in ("w", "b"):
        assert torch.equal(core.parameters[name], torch.full((4,), -3.0)), name
