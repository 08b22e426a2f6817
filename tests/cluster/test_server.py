"""The server behind gRPC: the same answers as its core, bytes counted as they are, and a line for whatever is wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from helpers import core_of, train

from laconic._version import __version__
from laconic.cluster import protocol
from laconic.cluster.client import Client, Patience, UnreachableError
from laconic.cluster.core import Core
from laconic.cluster.job import Job, Slots
from laconic.cluster.protocol import CHUNK, Assembler, frame_messages, note, read_note
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError
from laconic.cluster.server import CALLS, OPTIONS, Server
from laconic.errors import ConfigError, FrameError
from laconic.frames import encode, max_nbytes
from laconic.train.methods import method_options

LOOPBACK = "127.0.0.1:0"


@pytest.fixture
def served() -> Iterator[Server]:
    core = core_of(Job(workers=1, momentum=0.0), {"w": torch.zeros(8, 8), "b": torch.zeros(3)})
    server = Server(core, LOOPBACK)
    yield server
    server.stop(0)


def client_of(core: Core, port: int, worker: int = 0, **options: Any) -> Client:
    limits = [max_nbytes("none", x) + 1024 for x in core.parameters.values()]
    return Client(
        f"127.0.0.1:{port}",
        worker=worker,
        incarnation=options.pop("incarnation", 0),
        slots=options.pop("slots", core.slots),
        limits=limits,
        patience=Patience(total=0.5),
        **options,
    )


def joined(client: Client) -> int:
    return client.join(0, Offer(client.hello().versions))[0]


@pytest.mark.parametrize("method", ["1", "4", "5", "laconic"])
def test_a_job_over_sockets_is_the_job_in_one_process(method: str) -> None:
    job = Job(**{"workers": 2, "lr": 0.05} | method_options(method))
    alone, _ = train(job, 8)
    servers: list[Server] = []
    lock = threading.Lock()

    def link(core: Core, worker: int) -> Client:
        with lock:
            if not servers:
                servers.append(Server(core, LOOPBACK))
        return client_of(core, servers[0].port, worker)

    core, workers = train(job, 8, link=link)
    for name, x in alone.parameters.items():
        assert torch.equal(core.parameters[name], x)
    # Counted at both ends, and what the workers know they have sent.
    parts = 2 if job.returns == "gradients" else 1  # the optimizer's memory
    snapshots = 2 * parts * sum(len(encode(x, "none")) for x in core.parameters.values())
    assert servers[0].traffic.received == sum(worker.bytes_sent for worker in workers)
    assert servers[0].traffic.sent == sum(worker.bytes_received for worker in workers) + snapshots
    servers[0].stop(0)


def test_a_large_frame_travels_in_pieces() -> None:
    big = torch.randn(1300, 1000)
    core = core_of(Job(workers=1, momentum=0.0, lr=1.0), {"w": torch.zeros_like(big)})
    server = Server(core, LOOPBACK)
    client = client_of(core, server.port)
    sequence = joined(client)
    frame = encode(big, "none")
    assert len(frame) > 2 * CHUNK
    client.exchange(sequence, [(0, frame)], lambda: 0.0)
    assert torch.equal(core.parameters["w"], -big)
    server.stop(0)


def test_hello_of_another_version_names_both(served: Server) -> None:
    channel = grpc.insecure_channel(f"127.0.0.1:{served.port}", options=OPTIONS)
    asked = {"protocol": 99, "laconic": "9.9", "worker": 0, "incarnation": 0, "fingerprint": ""}
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(CALLS["Hello"])(note(asked), timeout=5)
    assert "9.9" in caught.value.details() and __version__ in caught.value.details()
    channel.close()


def test_another_model_is_told_so(served: Server) -> None:
    client = client_of(served.core, served.port, slots=Slots(("other",), ((2,),)))
    with pytest.raises(RefusedError, match="another model"):
        client.hello()
    client.close()


HOSTILE: dict[str, list[bytes]] = {
    "nothing": [],
    "garbage": [b"\x00\xff garbage"],
    "no note": [protocol.FRAME + b"\x00" * 20],
    "not json": [b"N{"],
    "deep json": [b"N" + b"[" * 60_000],
    "not an object": [b"N[1, 2]"],
    "no worker": [note({"incarnation": 0, "sequence": 0})],
    "worker as text": [note({"worker": "0", "incarnation": 0, "sequence": 0})],
    "negative": [note({"worker": 0, "incarnation": 0, "sequence": -1})],
}
ONES = encode(torch.ones(8, 8), "none")
HEAD = note({"worker": 0, "incarnation": 0, "sequence": 0})
BODY: dict[str, list[bytes]] = {
    "no frames": [],
    "slot beyond": [protocol.FRAME + protocol._HEAD.pack(9, 4) + b"abcd"],
    "too large": [protocol.FRAME + protocol._HEAD.pack(0, 1 << 40) + b"abcd"],
    "more than said": [protocol.FRAME + protocol._HEAD.pack(0, 2) + b"abcd"],
    "less than said": [protocol.FRAME + protocol._HEAD.pack(0, 300) + b"abcd"],
    "empty pieces": [protocol.FRAME + protocol._HEAD.pack(0, 300), protocol.MORE, protocol.MORE],
    "a piece of nothing": [protocol.MORE + b"abcd"],
    "no frame inside": [protocol.FRAME + protocol._HEAD.pack(0, 4) + b"abcd", *frame_messages(1, b"efgh")],
    "twice": [*frame_messages(0, ONES), *frame_messages(0, ONES)],
    "one missing": [*frame_messages(0, ONES)],
    "another shape": [
        *frame_messages(0, encode(torch.ones(4, 16), "none")), *frame_messages(1, encode(torch.ones(3), "none")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("sent", [*HOSTILE.values(), *([HEAD, *body] for body in BODY.values())], ids=[*HOSTILE, *BODY])
def test_what_makes_no_sense_is_refused_and_changes_nothing(served: Server, sent: list[bytes]) -> None:
    client = client_of(served.core, served.port)
    sequence = joined(client)
    channel = grpc.insecure_channel(f"127.0.0.1:{served.port}", options=OPTIONS)
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(CALLS["Exchange"])(iter(sent), timeout=5))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value
    assert "\n" not in caught.value.details()
    assert served.core.version == 0 and not served.core.parameters["w"].any()
    good = [(0, encode(torch.ones(8, 8), "none")), (1, encode(torch.ones(3), "none"))]
    assert client.exchange(sequence, good, lambda: 0.0).sequence == 1
    channel.close()
    client.close()


def test_a_busy_port_is_one_line(served: Server) -> None:
    with pytest.raises(ConfigError, match="port"):
        Server(served.core, f"127.0.0.1:{served.port}")


def test_no_server_is_one_line_after_some_patience() -> None:
    core = core_of(Job(workers=1), {"w": torch.zeros(2)})
    client = client_of(core, 1)
    with pytest.raises(UnreachableError, match="is it running"):
        client.hello()
    client.close()


def test_pieces_come_together_again() -> None:
    frames = {0: b"a" * (3 * CHUNK + 5), 1: b"b", 2: b"c" * CHUNK}
    assembler = Assembler([4 * CHUNK] * 3)
    found = {}
    for slot, frame in frames.items():
        for message in frame_messages(slot, frame):
            assert len(message) <= protocol.MAX_MESSAGE
            done = assembler.feed(message)
            if done is not None:
                found[done[0]] = done[1]
    assert found == frames and assembler.total == sum(map(len, frames.values()))
    with pytest.raises(FrameError):
        read_note(b"N" + b" " * protocol.MAX_NOTE)
