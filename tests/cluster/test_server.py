"""The server behind gRPC: the same results as its core, counted bytes, and one line of text for every bad request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch
from grpc_peers import Peer, begin, client_of, exchange, head_of, serving
from helpers import Events, core_of, job_of, open_session, small_core, train

from laconic._version import __version__
from laconic.cluster import calls, protocol
from laconic.cluster.client import Client, Patience, UnreachableError
from laconic.cluster.core import Core
from laconic.cluster.job import Job, Slots
from laconic.cluster.protocol import CHUNK, Assembler, CutFrame, frame_messages, json_message, read_json
from laconic.cluster.replies import RefusedError
from laconic.cluster.server import Server
from laconic.errors import ConfigError, FrameError
from laconic.frames import encode
from laconic.train.methods import method_options


@pytest.fixture
def server() -> Iterator[Server]:
    core = core_of(Job(workers=1, momentum=0.0), {"w": torch.zeros(8, 8), "b": torch.zeros(3)})
    with serving(core) as running:
        yield running


@pytest.mark.parametrize("method", ["1", "4", "5", "laconic"])
def test_job_over_sockets_equals_the_job_in_one_process(method: str) -> None:
    job = Job(**{"workers": 2, "lr": 0.05} | method_options(method))
    in_process, _ = train(job, 6)
    servers: list[Server] = []

    def link(core: Core, worker: int) -> Client:
        if not servers:
            servers.append(Server(core, "127.0.0.1:0"))
        client: Client = client_of(servers[0], worker)
        return client

    core, workers = train(job, 6, link=link)
    for name, x in in_process.parameters.items():
        assert torch.equal(core.parameters[name], x)
    kinds = 2 if job.reply_kind.workers_step else 1  # weights, optimizer state
    snapshots = 2 * kinds * sum(len(encode(x, "none")) for x in core.parameters.values())
    assert servers[0].traffic.received == sum(worker.bytes_sent for worker in workers)
    assert servers[0].traffic.sent == sum(worker.bytes_received for worker in workers) + snapshots
    servers[0].stop(0)


def test_large_frame_is_sent_in_pieces() -> None:
    x = torch.randn(1300, 1000)
    core = core_of(job_of(workers=1), {"w": torch.zeros_like(x)})
    with serving(core) as server:
        client = client_of(server)
        frame = encode(x, "none")
        assert len(frame) > 2 * CHUNK
        exchange(client, begin(client), frame)
    assert torch.equal(core.parameters["w"], -x)


def test_hello_with_another_protocol_names_both_versions(server: Server, peers: Callable[..., Peer]) -> None:
    request = head_of() | {"protocol": 99, "laconic": "9.9", "fingerprint": ""}
    refusal = peers(server.port).call("Hello", json_message(request))
    assert refusal is not None and "9.9" in refusal.details() and __version__ in refusal.details()


def test_hello_with_another_model_is_refused(server: Server) -> None:
    client = client_of(server)
    client.slots = Slots(("other",), ((2,),))
    with pytest.raises(RefusedError, match="another model"):
        client.hello()
    client.close()


def test_port_in_use_is_a_config_error(server: Server) -> None:
    with pytest.raises(ConfigError, match="is the port taken"):
        Server(server.core, f"127.0.0.1:{server.port}")


def test_missing_server_is_reported_after_the_patience(server: Server) -> None:
    client = client_of(server, patience=Patience(total=0.5, first=0.01))
    server.stop(0)
    drawn_before = random.getstate()
    with pytest.raises(UnreachableError, match="is it running"):
        client.hello()
    assert client.retries > 0
    assert random.getstate() == drawn_before  # a training script that seeded it draws what it would have drawn
    client.close()


def first_piece(slot: int, nbytes: int, data: bytes = b"abcd") -> bytes:
    return protocol.FRAME + protocol._HEAD.pack(slot, nbytes) + data


ONES = encode(torch.ones(8, 8), "none")
BAD_HEADS: dict[str, list[bytes]] = {
    "no message": [], "garbage": [b"\x00\xff garbage"], "no JSON message": [protocol.FRAME + b"\x00" * 20],
    "not JSON": [b"N{"], "deep JSON": [b"N" + b"[" * 60_000], "not an object": [b"N[1, 2]"],
}  # fmt: skip
BAD_BODIES: dict[str, list[bytes]] = {
    "no frames": [], "slot out of range": [first_piece(9, 4)], "too large": [first_piece(0, 1 << 40)],
    "longer than declared": [first_piece(0, 2)], "shorter than declared": [first_piece(0, 300)],
    "empty pieces": [first_piece(0, 300, b""), protocol.MORE, protocol.MORE],
    "piece without a frame": [protocol.MORE + b"abcd"], "not a frame": [first_piece(0, 4), *frame_messages(1, b"efgh")],
    "slot twice": [*frame_messages(0, ONES), *frame_messages(0, ONES)], "slot missing": [*frame_messages(0, ONES)],
    "another shape": [*frame_messages(0, encode(torch.ones(4, 16), "none")), *frame_messages(1, ONES)],
}  # fmt: skip


def test_malformed_pushes_are_refused_and_change_nothing(server: Server, peers: Callable[..., Peer]) -> None:
    client, peer = client_of(server), peers(server.port)
    sequence = begin(client)
    head = json_message(head_of())
    for name, messages in {**BAD_HEADS, **{k: [head, *body] for k, body in BAD_BODIES.items()}}.items():
        refusal = peer.call("Exchange", *messages)
        assert refusal is not None and refusal.code() == grpc.StatusCode.INVALID_ARGUMENT, name
        assert "\n" not in refusal.details()
        assert server.core.version == 0 and not server.core.parameters["w"].any()
    assert exchange(client, sequence, ONES, encode(torch.ones(3), "none")).sequence == 1
    client.close()


WORKER: dict[str, Any] = {"worker": 0, "incarnation": 0}
LONG = "x" * 60_000
WRONG_VALUES: list[Any] = [None, True, -1, 1.5, 1 << 62, "0", "two\nlines", LONG, [], {}, [[0]]]
REQUESTS: dict[str, dict[str, Any]] = {
    "Hello": WORKER | {"protocol": 1, "laconic": "x", "fingerprint": "f"},
    "Join": WORKER | {"attempt": 5, "versions": [0], "lost": False},
    "Snapshot": WORKER,
    "Exchange": WORKER | {"sequence": 0},
    "Leave": WORKER,
}


def bad_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    for call, good in REQUESTS.items():
        for name in good.keys() - {"lost", "laconic"}:  # these may have any value
            for value in WRONG_VALUES:
                if not (name == "versions" and value == []):
                    yield call, good | {name: value}
            yield call, {other: value for other, value in good.items() if other != name}
        yield call, good | {"worker": 7}
        yield call, good | {"worker": 1 << 61}
    yield "Hello", REQUESTS["Hello"] | {"protocol": 2, "laconic": LONG}
    yield "Hello", REQUESTS["Hello"] | {"protocol": {"a": LONG[:50_000]}}
    yield "Join", REQUESTS["Join"] | {"versions": list(range(2000))}
    yield "Join", REQUESTS["Join"] | {"versions": [0, -1]}


def test_bad_request_values_are_refused_in_one_line(
    peers: Callable[..., Peer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "REPEATS", 1000)  # none of them has to wait
    events: Events = []
    core = small_core(events)
    with serving(core) as server:
        for worker in range(2):
            open_session(core, worker)
        before, peer = list(events), peers(server.port)
        for call, values in bad_requests():
            refusal = peer.call(call, json_message(values))
            assert refusal is not None, (call, str(values)[:100])
            assert refusal.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION), refusal
            assert "\n" not in refusal.details() and len(refusal.details()) < 400, refusal
        assert events == before and core.version == 0 and not core.parameters["w"].any()
    assert not caplog.records, caplog.text


def test_assembler_joins_the_pieces_of_frames() -> None:
    frames = {0: b"a" * (3 * CHUNK + 5), 1: b"b", 2: b"c" * CHUNK}
    assembler = Assembler([4 * CHUNK] * 3)
    result = {}
    for slot, frame in frames.items():
        for message in frame_messages(slot, frame):
            assert len(message) <= protocol.MAX_MESSAGE
            complete = assembler.feed(message)
            if complete is not None:
                result[complete[0]] = complete[1]
    assert result == frames and assembler.total == sum(map(len, frames.values()))


@pytest.mark.parametrize("sizes", [(0, 7), (48, CHUNK), (48, CHUNK - 48), (CHUNK, 1), (5, 2 * CHUNK, 9)], ids=str)
def test_frame_in_parts_gives_the_messages_of_the_whole_frame(sizes: tuple[int, ...]) -> None:
    parts = [bytes([65 + number]) * nbytes for number, nbytes in enumerate(sizes)]
    whole, cut = b"".join(parts), CutFrame.of(3, *parts)
    assert cut.messages == tuple(frame_messages(3, whole))
    assert cut.nbytes == len(whole) and cut.joined() == whole


def test_too_long_json_message_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="at most 65536 bytes"):
        read_json(b"N" + b" " * protocol.MAX_JSON)
