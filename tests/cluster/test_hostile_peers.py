"""What comes over the network and should not: sent again, too late, by somebody else, cut off, or not a push at all.

Gradients tell worker and exchange apart (each has a place of its own in the vector), so whatever is lost or counted
twice shows in the sum.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from helpers import core_of, train
from torch import Tensor

from laconic import wire
from laconic.cluster import security
from laconic.cluster.client import Client, Patience
from laconic.cluster.core import Core
from laconic.cluster.job import Job
from laconic.cluster.protocol import frame_messages, note
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.round import Contribution, OpenFrame
from laconic.cluster.server import CALLS, OPTIONS, Server
from laconic.errors import FrameError
from laconic.frames import encode
from laconic.packet import Packet, TensorSpec
from laconic.train.methods import method_options
from laconic_lab.faults.invariants import all_work_once, applied_once

SOON = 20.0
Events = list[dict[str, Any]]


def job_of(**options: Any) -> Job:
    return Job(**{"workers": 2, "lr": 1.0, "momentum": 0.0} | options)


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
        f"127.0.0.1:{server.port}",
        worker=worker,
        incarnation=incarnation,
        slots=core.slots,
        limits=core.job.pull_limits(core.parameters.values()),
        patience=Patience(total=2.0),
        **options,
    )


def begin(client: Client, attempt: int = 0) -> int:
    return client.join(attempt, Offer(client.hello().versions))[0]


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


class Peer:
    """Somebody who speaks to a server in whatever way he likes."""

    def __init__(self, port: int, credentials: Any = None) -> None:
        address = f"127.0.0.1:{port}"
        self._channel = (
            grpc.secure_channel(address, credentials, options=OPTIONS)
            if credentials is not None
            else grpc.insecure_channel(address, options=OPTIONS)
        )

    def ask(self, call: str, message: bytes) -> grpc.RpcError | None:
        """How a call was refused; None when it was answered."""
        try:
            if call == "Exchange":
                list(self._channel.stream_stream(CALLS[call])(iter([message]), timeout=5))
            elif call == "Snapshot":
                list(self._channel.unary_stream(CALLS[call])(message, timeout=5))
            else:
                self._channel.unary_unary(CALLS[call])(message, timeout=5)
        except grpc.RpcError as error:
            return error
        return None

    def push(self, head: dict[str, Any], frames: list[bytes], *, timeout: float = 5.0) -> Any:
        """The refusal of a push, or None."""
        sent = [note(head), *(m for slot, f in enumerate(frames) for m in frame_messages(slot, f)), note({"score": 0})]
        try:
            list(self._channel.stream_stream(CALLS["Exchange"])(iter(sent), timeout=timeout))
        except grpc.RpcError as error:
            return error
        return None

    def begin_push(self, head: dict[str, Any], frame: bytes) -> tuple[Any, threading.Event]:
        """A push of slot 0 that does not end: the call, and an event that ends it properly."""
        go_on = threading.Event()

        def some() -> Iterator[bytes]:
            yield note(head)
            yield from frame_messages(0, frame)
            go_on.wait(SOON)
            yield note({"score": 0})

        return self._channel.stream_stream(CALLS["Exchange"])(some(), timeout=SOON), go_on

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(port: int, credentials: Any = None) -> Peer:
        made.append(Peer(port, credentials))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


# ------------------------------------------------------------------------------------------- duplicates and replays

ROUNDS = 40


def place(worker: int, sequence: int) -> Tensor:
    """A gradient with a one at a place of its own."""
    x = torch.zeros(2 * ROUNDS)
    x[2 * sequence + worker] = 1.0
    return x


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_thousand_pushes_too_many_change_nothing(mode: str, peers: Callable[..., Peer]) -> None:
    events: Events = []
    job = job_of(mode=mode)
    core = core_of(job, {"w": torch.zeros(2 * ROUNDS)}, events, exchanges=ROUNDS)
    outcomes: set[str] = set()
    failed: list[BaseException] = []

    def pester(peer: Peer, worker: int, at: int, rng: random.Random) -> None:
        """What this worker has sent before, or will, or another life of it."""
        sequence, incarnation = rng.choice(
            [(at - 1, 1), (at - 1, 1), (max(0, at - 1 - rng.randrange(1, 9)), 1), (at + 5, 1), (at, 0), (at, 2)]
        )
        value = place(worker, min(max(0, sequence), ROUNDS - 1))
        head = {"worker": worker, "incarnation": incarnation, "sequence": max(0, sequence)}
        refused = peer.push(head, [encode(value, "none")])
        outcomes.add("answered" if refused is None else refused.details().partition('"message"')[0])

    def work(worker: int) -> None:
        try:
            rng = random.Random(worker)
            client, peer = client_of(server, worker, incarnation=1), peers(server.port)
            at = begin(client)
            ticket = client.snapshot().ticket
            for _ in range(ROUNDS):
                number = 2 * at + worker if ticket is None else ticket
                frame = encode(place(number % 2, number // 2), "none")
                reply = client.exchange(at, [(0, frame)], lambda: 0.0)
                at, ticket = reply.sequence, reply.ticket
                for _ in range(13):
                    pester(peer, worker, at, rng)
                if ticket == -1:
                    break
            while ticket not in (None, -1):  # the other one was slower
                frame = encode(place(ticket % 2, ticket // 2), "none")
                reply = client.exchange(at, [(0, frame)], lambda: 0.0)
                at, ticket = reply.sequence, reply.ticket
            client.leave()
            client.close()
        except BaseException as error:
            failed.append(error)

    with serving(core) as server:
        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads), failed
    share = 2 if mode == "sync" else 1
    assert torch.equal(core.parameters["w"], torch.full((2 * ROUNDS,), -1.0 / share))
    applied_once(events)
    if mode == "async":
        all_work_once(events, 2 * ROUNDS)
    assert {"answered", '{"reason": "stale", ', '{"reason": "ahead", ', '{"reason": "incarnation", '} <= outcomes
    assert core.in_memory == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_old_push_does_not_disturb_the_one_under_way(mode: str, peers: Callable[..., Peer]) -> None:
    core = core_of(job_of(workers=1, mode=mode), {"w": torch.zeros(4)})
    with serving(core) as server:
        client, peer, other = client_of(server), peers(server.port), peers(server.port)
        at = begin(client)
        client.snapshot()
        ones = encode(torch.ones(4), "none")
        client.exchange(at, [(0, ones)], lambda: 0.0)
        head = {"worker": 0, "incarnation": 0}
        call, go_on = peer.begin_push(head | {"sequence": 1}, ones)
        assert eventually(lambda: core.in_memory)
        other.push(head | {"sequence": 0}, [ones])
        go_on.set()
        assert len(list(call)) == 2  # a note and the weights
    assert core.version == 2 and torch.equal(core.parameters["w"], torch.full((4,), -2.0))


# ------------------------------------------------------------------------------------------- bad packets in a job


def crafted(x: Tensor, codec: str = "none") -> bytes:
    """A frame with right checksums, whatever it holds."""
    section = x.contiguous().view(-1).view(torch.uint8)
    return bytes(wire.pack(Packet(codec, TensorSpec.of(x), (section,))))


def spoil(kind: str, frame: bytes) -> bytes:
    shape = wire.unpack(frame).spec.shape
    x = torch.zeros(shape)
    if kind == "shape":
        return encode(torch.zeros(*shape[:-1], shape[-1] + 1), "none")
    if kind == "dtype":
        return encode(x.double(), "none")
    if kind == "nan":
        x.view(-1)[-1] = float("nan")
        return crafted(x)
    if kind == "infinity":
        x.view(-1)[0] = float("inf")
        return crafted(x)
    if kind == "codec":
        return crafted(x, codec="zip")
    if kind == "version":
        return frame[:4] + bytes([frame[4] + 1]) + frame[5:]
    if kind == "cut":
        return frame[:-1]
    flipped = bytearray(frame)
    flipped[-1] ^= 1
    return bytes(flipped)


KINDS = ("shape", "dtype", "nan", "infinity", "codec", "version", "cut", "flipped")


class Offending(Client):
    """Sends something wrong first, is told so in a line, and sends what is right."""

    said: dict[str, str]
    sent: set[str]

    def exchange(self, sequence: int, frames: Any, score: Callable[[], float]) -> Reply:
        kinds = KINDS if self.identity["worker"] else KINDS[::-1]
        # Both workers on end, never in the same exchange.
        turn, offends = divmod(sequence + self.identity["worker"], 2)
        if offends and turn < len(kinds) and kinds[turn] not in self.sent:
            self.sent.add(kinds[turn])
            good = list(frames)
            slot = len(good) // 2
            bad = [*good[:slot], (good[slot][0], spoil(kinds[turn], good[slot][1])), *good[slot + 1 :]]
            try:
                super().exchange(sequence, bad, score)
            except FrameError as error:
                self.said[kinds[turn]] = str(error)
            except RefusedError as error:
                if error.reason == "spoilt":  # else the other one's fault has ended the round
                    self.said[kinds[turn]] = str(error)
        return super().exchange(sequence, frames, score)


@pytest.mark.parametrize("method", ["1", "laconic"])
def test_bad_packets_in_the_middle_of_a_job_change_not_one_bit(method: str) -> None:
    job = Job(**{"workers": 2, "lr": 0.05} | method_options(method))
    exchanges = 2 * len(KINDS) + 2
    clean, _ = train(job, exchanges)
    servers: list[Server] = []
    said: list[dict[str, str]] = [{}, {}]
    events: Events = []

    def link(core: Core, worker: int) -> Client:
        if not servers:
            servers.append(Server(core, "127.0.0.1:0"))
        client: Offending = client_of(servers[0], worker, kind=Offending)
        client.said, client.sent = said[worker], set()
        return client

    core, _ = train(job, exchanges, link=link, events=events)
    servers[0].stop(0)
    for name, x in clean.parameters.items():
        assert torch.equal(core.parameters[name], x), name
    applied_once(events)
    assert core.in_memory == 0
    for worker in range(2):
        assert set(said[worker]) >= set(KINDS) - {"nan", "infinity"}
        assert all("\n" not in line and len(line) < 300 for line in said[worker].values()), said
    assert "nan" in said[0] | said[1] and [e for e in events if e["event"] == "spoilt"]


@pytest.mark.parametrize("options", [{"mode": "async"}, {"workers": 3, "backup": 1}], ids=["async", "backup"])
@pytest.mark.parametrize("kind", ["nan", "infinity", "shape", "codec"])
def test_bad_packets_change_nothing_where_nobody_waits(
    options: dict[str, Any], kind: str, peers: Callable[..., Peer]
) -> None:
    core = core_of(job_of(**options), {"w": torch.zeros(4)})
    with serving(core) as server:
        client = client_of(server)
        begin(client)
        client.snapshot()
        good = encode(torch.ones(4), "none")
        refused = peers(server.port).push({"worker": 0, "incarnation": 0, "sequence": 0}, [spoil(kind, good)])
        assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT and "\n" not in refused.details()
        assert core.version == 0 == core.in_memory and not core.parameters["w"].any()


def test_a_push_that_is_still_being_summed_does_not_leak_into_the_round_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adding takes long; meanwhile a worker comes anew and everybody begins the round again."""
    core = core_of(job_of(), {"w": torch.zeros(4), "b": torch.zeros(4)})

    def join(worker: int, incarnation: int) -> None:
        told = core.welcome(worker, incarnation, core.slots.fingerprint)
        core.offer(worker, incarnation, incarnation, Offer(frozenset(told["versions"])))

    def push(worker: int, incarnation: int, value: float) -> None:
        frames = [encode(torch.full((4,), value), "none")] * 2
        with contextlib.suppress(RefusedError):
            core.exchange(Contribution(worker, incarnation, 0, frames), deadline=time.monotonic() + SOON)

    for worker in range(2):
        join(worker, 0)
    slow, go_on, add_to = threading.Event(), threading.Event(), OpenFrame.add_to

    def halting(self: OpenFrame, out: Tensor, weight: float) -> None:
        if self.slot == "b" and threading.current_thread().name == "old":
            slow.set()
            go_on.wait(SOON)
        add_to(self, out, weight)

    monkeypatch.setattr(OpenFrame, "add_to", halting)
    old = threading.Thread(target=push, args=(0, 0, 64.0), name="old")
    old.start()
    assert slow.wait(SOON)
    join(1, 1)
    core.offer(0, 0, 1, Offer(frozenset({0})))
    new = threading.Thread(target=push, args=(0, 0, 2.0))
    new.start()
    assert eventually(lambda: core.current_round.turn == 1)
    go_on.set()
    old.join(SOON)
    push(1, 1, 4.0)
    new.join(SOON)
    assert core.version == 1 and core.in_memory == 0
    for name in ("w", "b"):
        assert torch.equal(core.parameters[name], torch.full((4,), -3.0)), name


# ------------------------------------------------------------------------------------------------------ other lives


@pytest.mark.parametrize("options", [{}, {"mode": "async"}, {"workers": 3, "backup": 2}], ids=["sync", "async", "some"])
def test_a_push_of_an_older_life_counts_for_nothing_even_when_it_had_begun(
    options: dict[str, Any], peers: Callable[..., Peer]
) -> None:
    events: Events = []
    job = job_of(**{"workers": 1} | options)
    core = core_of(job, {"w": torch.zeros(4)}, events)
    with serving(core) as server:
        first = client_of(server, incarnation=3)
        begin(first)
        first.snapshot()
        call, go_on = peers(server.port).begin_push(
            {"worker": 0, "incarnation": 3, "sequence": 0}, encode(torch.full((4,), 64.0), "none")
        )
        assert eventually(lambda: core.in_memory)
        second = client_of(server, incarnation=4)
        at = begin(second, attempt=9)
        second.snapshot()
        go_on.set()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        for incarnation, reason in ((0, "incarnation"), (3, "incarnation"), (5, "regather")):  # not yet: it has to join
            refused = peers(server.port).push(
                {"worker": 0, "incarnation": incarnation, "sequence": 0}, [encode(torch.ones(4), "none")]
            )
            assert reason in refused.details()
        assert core.version == 0 == core.in_memory
        second.exchange(at, [(0, encode(torch.ones(4), "none"))], lambda: 0.0)
    assert torch.equal(core.parameters["w"], torch.full((4,), -1.0))


def test_work_is_not_lost_by_a_push_that_nobody_asked_for(peers: Callable[..., Peer]) -> None:
    """A worker that comes anew has its old ticket; a push before it has fetched weights must not use it up."""
    events: Events = []
    core = core_of(job_of(workers=1, mode="async"), {"w": torch.zeros(4)}, events, exchanges=3)
    with serving(core) as server:
        first = client_of(server)
        begin(first)
        assert first.snapshot().ticket == 0
        second = client_of(server, incarnation=1)
        begin(second)
        ones = encode(torch.ones(4), "none")
        refused = peers(server.port).push({"worker": 0, "incarnation": 1, "sequence": 0}, [ones])
        assert "no work to push" in refused.details()
        reply = second.snapshot()
        while reply.ticket != -1:
            reply = second.exchange(reply.sequence, [(0, ones)], lambda: 0.0)
    all_work_once(events, 3)


# ------------------------------------------------------------------------------------------------------------ notes

WHO: dict[str, Any] = {"worker": 0, "incarnation": 0}
HELLO = WHO | {"protocol": 1, "laconic": "x", "fingerprint": "f"}
JOIN = WHO | {"attempt": 5, "versions": [0], "lost": False}
PUSH = WHO | {"sequence": 0}
LONG = "x" * 60_000
WRONG: list[Any] = [None, True, -1, 1.5, 1 << 62, "0", "two\nlines", LONG, [], {}, [[0]]]


def nonsense() -> Iterator[tuple[str, dict[str, Any]]]:
    for call, good in (("Hello", HELLO), ("Join", JOIN), ("Snapshot", WHO), ("Exchange", PUSH), ("Leave", WHO)):
        for name in good:
            if name in ("lost", "laconic"):
                continue  # anything will do
            for value in WRONG:
                if not (name == "versions" and value == []):
                    yield call, good | {name: value}
            yield call, {other: value for other, value in good.items() if other != name}
        yield call, good | {"worker": 7}
        yield call, good | {"worker": 1 << 61}
    yield "Hello", HELLO | {"protocol": 2, "laconic": LONG}
    yield "Hello", HELLO | {"protocol": {"a": LONG[:50_000]}}
    yield "Join", JOIN | {"versions": list(range(2000))}
    yield "Join", JOIN | {"versions": [0, -1]}


def test_notes_that_make_no_sense_are_refused_in_a_line(
    peers: Callable[..., Peer], caplog: pytest.LogCaptureFixture
) -> None:
    events: Events = []
    core = core_of(job_of(), {"w": torch.zeros(4)}, events)
    with serving(core) as server:
        for worker in range(2):
            core.welcome(worker, 0, core.slots.fingerprint)
            core.offer(worker, 0, 0, Offer(frozenset({0})))
        before, peer = list(events), peers(server.port)
        for call, values in nonsense():
            refused = peer.ask(call, note(values))
            assert refused is not None, (call, str(values)[:100])
            assert refused.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION), refused
            assert "\n" not in refused.details() and len(refused.details()) < 400, refused
        assert events == before and core.version == 0 and not core.parameters["w"].any()
    assert not caplog.records, caplog.text


# ---------------------------------------------------------------------------------------------------- broken off


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_memory_of_a_push_that_stops_half_way_is_given_back(
    mode: str, peers: Callable[..., Peer], caplog: pytest.LogCaptureFixture
) -> None:
    events: Events = []
    core = core_of(job_of(workers=1, mode=mode), {"w": torch.zeros(256), "b": torch.zeros(4)}, events)
    half, rest = encode(torch.ones(256), "none"), encode(torch.ones(4), "none")
    with serving(core) as server:
        client = client_of(server)
        begin(client)
        client.snapshot()
        for times in range(3):
            call, _ = peers(server.port).begin_push(PUSH, half)
            assert eventually(lambda: core.in_memory == len(half))
            call.cancel()
            assert eventually(lambda: core.in_memory == 0)
            assert eventually(lambda times=times: [e["event"] for e in events].count("lost") == times + 1)
        # Again before the server has noticed: the first attempt is replaced, and gives back what it held.
        calls = []
        for held in (len(half), 2 * len(half)):
            calls.append(peers(server.port).begin_push(PUSH, half)[0])
            assert eventually(lambda held=held: core.in_memory == held)
        for call in calls:
            call.cancel()
        assert eventually(lambda: core.in_memory == 0)
        assert client.exchange(0, [(0, half), (1, rest)], lambda: 0.0).sequence == 1
    assert core.version == 1 and core.in_memory == 0
    assert torch.equal(core.parameters["w"], torch.full((256,), -1.0))
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


def test_a_push_without_its_last_note_does_not_count(peers: Callable[..., Peer]) -> None:
    """A connection that breaks may look like a stream that ends; with after=best its score would be the best."""
    job = job_of(workers=1, after="best", every=2, sends="changes")
    core = core_of(job, {"w": torch.zeros(4)})
    with serving(core) as server:
        begin(client_of(server))
        messages = [note(PUSH), *frame_messages(0, encode(torch.ones(4), "none"))]
        with (
            grpc.insecure_channel(f"127.0.0.1:{server.port}", options=OPTIONS) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            list(channel.stream_stream(CALLS["Exchange"])(iter(messages), timeout=5))
        assert "last note" in caught.value.details()
    assert core.version == 0 and not core.parameters["w"].any()


# ----------------------------------------------------------------------------------------------------- flow control

CROWD = 8
HALF = 1 << 17
"""Values of a slot: two of them make a push of 1 MiB."""
JOBS = {
    "sync": {},
    "best": {"after": "best", "every": 2, "sends": "changes"},
    "async": {"mode": "async"},
    "backup": {"backup": 2},
}


@pytest.mark.parametrize("kind", list(JOBS))
def test_memory_of_waiting_pushes_is_bounded_and_nobody_waits_forever(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(workers=CROWD, **JOBS[kind])
    memory = 5 << 18  # of 8 MiB that come
    events: Events = []
    core = core_of(job, {"a": torch.zeros(HALF), "b": torch.zeros(HALF)}, events, memory=memory)
    peak, reserve = [0], Core.reserve

    def watched(self: Core, *args: Any) -> None:
        reserve(self, *args)
        peak[0] = max(peak[0], self.in_memory)

    monkeypatch.setattr(Core, "reserve", watched)
    failed: list[BaseException] = []
    frames = [[(slot, encode(torch.full((HALF,), worker + 1.0), "none")) for slot in (0, 1)] for worker in range(CROWD)]

    def work(worker: int, client: Client) -> None:
        try:
            client.exchange(0, frames[worker], lambda: float(worker))
        except RefusedError as error:
            if kind != "backup" or error.reason != "stale":
                failed.append(error)
        except BaseException as error:
            failed.append(error)

    with serving(core) as server:
        clients = [client_of(server, worker) for worker in range(CROWD)]
        joining = [threading.Thread(target=begin, args=(client,)) for client in clients]
        for thread in joining:
            thread.start()
        for thread in joining:
            thread.join(SOON)
        if job.mode == "async":
            for client in clients:
                client.snapshot()
        threads = [
            threading.Thread(target=work, args=(worker, client), daemon=True) for worker, client in enumerate(clients)
        ]
        for thread in threads[1:]:
            thread.start()
        if job.exact:  # nothing can be summed before the first: what fits has come, the others are held up
            assert eventually(lambda: core.in_memory + len(frames[0][0][1]) > memory)
            time.sleep(0.2)
            assert core.in_memory <= memory and not failed
        threads[0].start()
        for thread in threads:
            thread.join(SOON)
        assert not failed and not any(thread.is_alive() for thread in threads), failed
        for client in clients:
            client.close()
    assert core.in_memory == 0 and core._room.first is None
    one_frame = len(frames[0][0][1])
    assert peak[0] <= memory + 2 * one_frame  # the one that must not wait
    pushed = sorted(e["worker"] for e in events if e["event"] == "applied")
    total = sum(worker + 1.0 for worker in pushed)
    wanted = {"sync": -total / CROWD, "async": -total, "best": 1.0, "backup": -total / (CROWD - 2)}[kind]
    assert len(pushed) == (CROWD - 2 if kind == "backup" else CROWD)
    for x in core.parameters.values():
        torch.testing.assert_close(x, torch.full((HALF,), wanted))


# ------------------------------------------------------------------------------------------------------ strangers


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    for job in ("ours", "theirs"):
        security.new_job(folder / job, name=job, hosts=[], workers=2)
    return folder


def test_strangers_change_nothing_and_disturb_nobody(certs: Path, peers: Callable[..., Peer]) -> None:
    events: Events = []
    core = core_of(job_of(), {"w": torch.zeros(2 * ROUNDS)}, events, exchanges=ROUNDS)
    ours, theirs = security.load_server(certs / "ours"), security.load_worker(certs / "theirs", 0)
    mine = [security.load_worker(certs / "ours", worker) for worker in range(2)]
    failed: list[BaseException] = []
    done = threading.Event()

    def work(worker: int) -> None:
        try:
            client = client_of(server, worker, credentials=security.channel_credentials(mine[worker]))
            at = begin(client)
            while at < ROUNDS:
                at = client.exchange(at, [(0, encode(place(worker, at), "none"))], lambda: 0.0).sequence
                time.sleep(0.01)
            client.leave()
            client.close()
        except BaseException as error:
            failed.append(error)

    seen: dict[str, Any] = {}

    def pester() -> None:
        strangers = {
            "no certificate": grpc.ssl_channel_credentials(mine[0].ca),
            "of another job": security.channel_credentials(replace(theirs, ca=mine[0].ca)),
            "another job altogether": security.channel_credentials(theirs),
            "plaintext": None,
            "another worker's": security.channel_credentials(mine[1]),
        }
        pushed = [encode(torch.full((2 * ROUNDS,), 64.0), "none")]
        while not done.is_set():
            for who, credentials in strangers.items():
                peer = Peer(server.port, credentials)
                refusals = [peer.ask(call, note(PUSH | JOIN | HELLO)) for call in CALLS]
                refusals.append(peer.push(PUSH | {"sequence": core.version}, pushed))
                seen.setdefault(who, set()).update(one.code() if one else None for one in refusals)
                peer.close()
            for junk in (b"", b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", os.urandom(4096)):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 5) as line:
                    line.sendall(junk)

    identify = lambda context: security.require_worker(context.auth_context(), "ours")  # noqa: E731
    with serving(core, credentials=security.server_credentials(ours), identify=identify) as server:
        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(2)]
        pest = threading.Thread(target=pester, daemon=True)
        for thread in (pest, *threads):
            thread.start()
        for thread in threads:
            thread.join(60)
        done.set()
        pest.join(30)
    assert not failed and not any(thread.is_alive() for thread in (*threads, pest)), failed
    assert torch.equal(core.parameters["w"], torch.full((2 * ROUNDS,), -0.5))
    applied_once(events)
    assert [e["worker"] for e in events if e["event"] == "welcome"] in ([0, 1], [1, 0])
    assert not [e for e in events if e["event"] in ("gather", "lost", "duplicate")]
    assert seen.pop("another worker's") == {grpc.StatusCode.FAILED_PRECONDITION}
    assert all(codes == {grpc.StatusCode.UNAVAILABLE} for codes in seen.values()) and len(seen) == 4, seen


def test_garbage_on_the_port_disturbs_nobody() -> None:
    core = core_of(job_of(workers=1), {"w": torch.zeros(4)})
    rng = random.Random(0)
    with serving(core) as server:
        client = client_of(server)
        at = begin(client)
        lines = []
        for number in range(40):
            line = socket.create_connection(("127.0.0.1", server.port), 5)
            lines.append(line)  # and stays
            with contextlib.suppress(OSError):
                line.sendall((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if number % 2 else b"") + rng.randbytes(2000))
            at = client.exchange(at, [(0, encode(torch.ones(4), "none"))], lambda: 0.0).sequence
        for line in lines:
            line.close()
    assert core.version == 40 and torch.equal(core.parameters["w"], torch.full((4,), -40.0))


# ------------------------------------------------------------------------------------------------------- dead peers


def test_dead_and_stopped_peers_are_found_in_time(tmp_path: Path) -> None:
    """P7, in the middle of a push and after one, with clients that know nothing but the bytes."""
    found: dict[int, float] = {}
    kinds: list[str] = []

    def history(event: dict[str, Any]) -> None:
        kinds.append(event["event"])
        if event["event"] == "lost":
            found.setdefault(event["worker"], time.monotonic())

    shapes = {"a": torch.zeros(1 << 20), "b": torch.zeros(3)}  # the first travels in pieces
    core = Core(job_of(workers=5), shapes, core_of(job_of(), shapes)._weights._optimizer, lambda _: 1.0, history)
    frames = tmp_path / "frames"
    with frames.open("wb") as out:
        for x in shapes.values():
            frame = encode(torch.ones_like(x), "none")
            out.write(struct.pack("<Q", len(frame)) + frame)
    script = Path(__file__).with_name("bare_client.py")
    with serving(core) as server:
        clients = [
            subprocess.Popen(
                [sys.executable, script, f"127.0.0.1:{server.port}", str(worker), core.slots.fingerprint, frames, stop],
                stdout=subprocess.PIPE,
                text=True,
            )
            for worker, stop in enumerate(["whole", "half", "whole", "half", "half"])
        ]
        try:
            for worker, client in enumerate(clients):
                assert client.stdout is not None
                assert client.stdout.readline() == "hello\n"
                assert client.stdout.readline() in ("half\n", "whole\n"), worker
            assert eventually(lambda: kinds.count("push") == 2)
            at = time.monotonic()
            for worker, how in enumerate((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGSTOP)):
                clients[worker].send_signal(how)
            assert eventually(lambda: len(found) == 4, 10)
        finally:
            for client in clients:
                client.kill()
                client.communicate()
        assert eventually(lambda: 4 in found)
    assert set(found) == {0, 1, 2, 3, 4}
    assert max(found[0], found[1]) - at < 1.0
    assert max(found[2], found[3]) - at < 5.0
