"""Members that open calls and leave them: other workers go on, threads and memory stay bounded."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from grpc_peers import begin, client_of, exchange, head_of, serving
from helpers import ONES, TIMEOUT, Events, core_of, job_of, small_core
from summing_jobs import sum_job

from laconic import counters
from laconic.cluster import calls as calls_module
from laconic.cluster.calls import CALLS_PER_WORKER
from laconic.cluster.core import Core
from laconic.cluster.protocol import GRPC_OPTIONS, RPC_PATHS, frame_messages, json_message
from laconic.cluster.rejoin import Offer
from laconic.cluster.server import Server
from laconic.cluster.weight_uploads import digest_frames
from laconic.errors import LaconicError
from laconic.frames import encode
from waiting import eventually

IDLE = 14
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14))
SOON = 4.0
"""Seconds within which an honest worker's calls must be answered; an idle call is cancelled after 5 s at the least."""


@pytest.fixture
def bad_member() -> Iterator[Any]:
    """Return a function that opens a call which sends some messages and then nothing, and is not read."""
    release, channels, calls = threading.Event(), contextlib.ExitStack(), list[Any]()

    def open_call(server: Server, name: str, *messages: bytes, complete: bool = False, channel: Any = None) -> Any:
        channel = channel or new_channel(server)

        def stream() -> Iterator[bytes]:
            yield from messages
            if not complete:
                release.wait(10 * TIMEOUT)

        calls.append(channel.stream_stream(RPC_PATHS[name])(stream(), timeout=10 * TIMEOUT))
        return calls[-1]  # gRPC cancels a call without references

    def new_channel(server: Server) -> Any:
        options = (*GRPC_OPTIONS, *SMALL_WINDOW, ("grpc.use_local_subchannel_pool", 1))
        return channels.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.port}", options=options))

    open_call.new_channel = new_channel  # type: ignore[attr-defined]
    with channels:
        yield open_call
        release.set()


def answers_soon(server: Server, worker: int, frame: bytes, pushes: int = 5) -> None:
    """Join as a worker of a job without rounds and push; each call must be answered soon."""
    client = client_of(server, worker, incarnation=1, timeout=TIMEOUT)
    began = time.monotonic()
    client.hello()
    client.join(1, Offer(frozenset({0})))
    reply = client.snapshot()
    for _ in range(pushes):
        reply = exchange(client, reply.sequence, frame)
    took = time.monotonic() - began
    client.close()
    assert took < SOON, took


def all_but_a_few_end(calls: list[Any]) -> bool:
    """Whether the server ends all calls of one worker but those that it may have, soon."""
    return eventually(lambda: sum(call.done() for call in calls) >= len(calls) - CALLS_PER_WORKER, SOON)


def applied_push(core: Core, server: Server, worker: int, frame: bytes) -> None:
    client = client_of(server, worker)
    client.hello()
    client.join(1, Offer(frozenset({0})))
    exchange(client, client.snapshot().sequence, frame)
    client.close()


def test_idle_repetitions_of_an_applied_push_do_not_stall_others(bad_member: Any) -> None:
    core = small_core(mode="async")
    with serving(core) as server:
        applied_push(core, server, 1, ONES)
        idle = [bad_member(server, "Exchange", json_message(head_of(1))) for _ in range(IDLE)]
        assert all_but_a_few_end(idle)
        answers_soon(server, 0, ONES)
        client = client_of(server, 1)  # nor does the worker lock itself out
        assert exchange(client, 1, ONES).sequence == 2
        client.close()
    assert core.version == 7


def test_unread_answers_do_not_stall_others(bad_member: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MESSAGE_TIMEOUT", 1.0)
    x = torch.ones(1 << 20)
    frame = encode(x, "none")
    core = core_of(job_of(mode="async"), {"w": torch.zeros_like(x)})
    with serving(core) as server:
        applied_push(core, server, 1, frame)
        push = [json_message(head_of(1)), *frame_messages(0, frame), json_message({"score": 0})]
        for _ in range(IDLE):
            bad_member(server, "Exchange", *push, complete=True)
        time.sleep(0.5)  # until they have arrived: a client that does not read does not see that its call has ended
        answers_soon(server, 0, frame)
        assert eventually(lambda: not len(server.calls), TIMEOUT)  # not even one keeps its thread
    assert core.version == 6


@pytest.mark.parametrize("name", ["Agree", "Deposit"])
def test_idle_calls_of_sums_do_not_stall_others(name: str, bad_member: Any) -> None:
    core = core_of(sum_job(), {"w": torch.zeros(70, 90)})
    with serving(core) as server:
        client_of(server, 0).hello()
        idle = [bad_member(server, name, json_message(head_of(0) | {"version": 0})) for _ in range(IDLE)]
        assert all_but_a_few_end(idle)
        began = time.monotonic()
        honest = client_of(server, 1, timeout=TIMEOUT)
        honest.hello()
        assert time.monotonic() - began < SOON
        honest.close()


def test_320_silent_streams_on_20_connections_do_not_stall_workers(bad_member: Any) -> None:
    core = small_core(mode="async")
    with serving(core) as server:
        for _ in range(20):
            channel = bad_member.new_channel(server)
            for _ in range(16):
                bad_member(server, "Exchange", channel=channel)
        answers_soon(server, 0, ONES)
        assert len(server.calls) <= calls_module.max_unnamed_calls(2) + 1
    assert core.version == 5


def test_open_weight_uploads_stay_within_the_byte_budget(bad_member: Any) -> None:
    x = torch.ones(1 << 20)
    frame = encode(x, "none")
    core = core_of(sum_job(), {"w": torch.zeros_like(x), "b": torch.zeros(8)}, byte_budget=10 << 20)
    with serving(core) as server:
        client_of(server, 0).hello()
        client_of(server, 1).hello()
        open_upload = [json_message(head_of(0) | {"version": 0}), *frame_messages(0, frame), *frame_messages(2, frame)]
        most = 0
        for _ in range(IDLE):
            bad_member(server, "Deposit", *open_upload)
            bad_member(server, "Deposit", json_message(head_of(1) | {"version": 0}), *open_upload[1:])
            most = max(most, core.queued_nbytes)
        assert eventually(lambda: len(server.calls) <= CALLS_PER_WORKER)
        # One call may exceed the budget, so that a model larger than the budget can be uploaded at all.
        assert 0 < most <= (10 << 20) + 2 * len(frame)
    assert eventually(lambda: not core.queued_nbytes)


def test_frame_counts_in_the_budget_before_it_has_arrived(bad_member: Any) -> None:
    frame = encode(torch.ones(1 << 20), "none")  # several messages
    core = core_of(job_of(mode="async"), {"w": torch.zeros(1 << 20)})
    with serving(core) as server:
        begin(client_of(server, 0))
        bad_member(server, "Exchange", json_message(head_of(0)), next(iter(frame_messages(0, frame))))
        assert eventually(lambda: core.queued_nbytes == len(frame))


def test_idle_push_that_exceeds_the_budget_does_not_block_others(
    bad_member: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from laconic.cluster import shared_state

    monkeypatch.setattr(shared_state, "EXEMPTION_TIMEOUT", 0.5)
    frame = encode(torch.ones(1 << 20), "none")
    core = core_of(job_of(mode="async"), {"w": torch.zeros(1 << 20)}, byte_budget=1 << 20)
    with serving(core) as server:
        client = client_of(server, 1)
        begin(client)
        client.snapshot()
        bad_member(server, "Exchange", json_message(head_of(1)), next(iter(frame_messages(0, frame))))
        assert eventually(lambda: core.queued_nbytes)
        answers_soon(server, 0, frame, pushes=2)


def test_slow_push_that_exceeds_the_budget_does_not_block_others_for_ever(
    bad_member: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame now and then keeps the push from being idle, but not its exemption from the budget."""
    from laconic.cluster import shared_state

    monkeypatch.setattr(shared_state, "EXEMPTION_LIMIT", 0.5)
    monkeypatch.setattr(shared_state, "TURN_SECONDS", 0.2)
    names = [f"w{i}" for i in range(40)]
    frames = [(slot, encode(torch.ones(1 << 12), "none")) for slot in range(len(names))]
    core = core_of(job_of(mode="async"), {name: torch.zeros(1 << 12) for name in names}, byte_budget=1 << 12)
    with serving(core) as server:
        clients = [client_of(server, worker, incarnation=1, timeout=TIMEOUT) for worker in (0, 1)]
        replies = []
        for client in clients:
            client.hello()
            client.join(1, Offer(frozenset({0})))
            replies.append(client.snapshot())

        def slowly() -> Iterator[tuple[int, bytes]]:
            for item in frames:
                yield item
                time.sleep(0.3)

        def push_slowly() -> None:
            with contextlib.suppress(LaconicError):  # the test ends before it
                clients[1].exchange(replies[1].sequence, slowly(), lambda: 0.0)

        slow = threading.Thread(target=push_slowly, daemon=True)
        slow.start()
        assert eventually(lambda: core.queued_nbytes)
        began = time.monotonic()
        clients[0].exchange(replies[0].sequence, iter(frames), lambda: 0.0)
        assert time.monotonic() - began < SOON and slow.is_alive()  # the slow one takes 12 s
        core._shared.fail("the test ends")
        slow.join(TIMEOUT)
        for client in clients:
            client.close()


def test_worker_that_asks_for_the_weights_again_and_again_is_paced(
    bad_member: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_of(job_of(mode="async"), {"w": torch.zeros(1 << 10)})
    made: list[int] = []
    snapshot = core.snapshot
    monkeypatch.setattr(
        core, "snapshot", lambda worker, *args, **kw: made.append(worker) or snapshot(worker, *args, **kw)
    )
    with serving(core) as server:
        begin(client_of(server, 1, incarnation=0))
        channel = bad_member.new_channel(server)
        asking = channel.stream_stream(RPC_PATHS["Snapshot"])
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            call = asking(iter([json_message(head_of(1))]), timeout=TIMEOUT)
            with contextlib.suppress(grpc.RpcError):
                next(call)
        most = calls_module.REPEATS + 3 * calls_module.REPEATS_PER_SECOND
        assert calls_module.REPEATS - 5 <= made.count(1) <= most
        answers_soon(server, 0, encode(torch.ones(1 << 10), "none"))


def test_worker_without_which_rounds_end_catches_up_as_often_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup worker that is always late was taken for one that repeats calls, and waited for up to 2 s."""
    monkeypatch.setattr(calls_module, "REPEATS", 8)
    core = core_of(job_of(workers=2, backup=1), {"w": torch.zeros(4)})
    before = counters.counts().get("paced calls", 0)
    with serving(core) as server:
        fast, late = client_of(server, 0), client_of(server, 1)
        begin(fast)
        begin(late)
        frame, behind = encode(torch.ones(4), "none"), 0
        for sequence in range(40):
            exchange(fast, sequence, frame)
            with contextlib.suppress(LaconicError):
                exchange(late, behind, frame)
            behind = late.snapshot().sequence
            assert behind == sequence + 1
        assert counters.counts().get("paced calls", 0) == before
        for _ in range(2 * calls_module.REPEATS):
            late.snapshot()
        assert counters.counts()["paced calls"] > before


def test_call_that_ends_while_it_is_paced_leaves_its_thread(bad_member: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "LONGEST_PACE", 60.0)
    monkeypatch.setattr(calls_module, "REPEATS_PER_SECOND", 0.01)
    core = core_of(job_of(mode="async"), {"w": torch.zeros(4)})
    with serving(core) as server:
        begin(client_of(server, 1, incarnation=0))
        for _ in range(2 * calls_module.REPEATS):
            bad_member(server, "Snapshot", json_message(head_of(1)), complete=True)
        assert counters.counts()["paced calls"] > 0
        assert eventually(lambda: len(server.calls) <= CALLS_PER_WORKER)


@pytest.mark.parametrize("name", ["Agree", "Deposit"])
def test_call_whose_next_message_does_not_come_is_cancelled(
    name: str, bad_member: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "MESSAGE_TIMEOUT", 0.5)
    core = core_of(sum_job(), {"w": torch.zeros(70, 90)})
    with serving(core) as server:
        client_of(server, 0).hello()
        call = bad_member(server, name, json_message(head_of(0) | {"version": 0}))
        assert eventually(call.done)
        assert call.code() is grpc.StatusCode.CANCELLED and eventually(lambda: not len(server.calls))


def test_worker_that_computes_longer_than_a_message_may_take_is_not_cancelled(
    bad_member: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "MESSAGE_TIMEOUT", 0.2)
    events: Events = []
    core = small_core(events, workers=1, slots={"w": 4})
    with serving(core) as server:
        client = client_of(server, timeout=TIMEOUT)
        sequence = begin(client)

        def slowly() -> Iterator[tuple[int, bytes]]:
            time.sleep(1.5)
            yield 0, ONES

        assert client.exchange(sequence, slowly(), lambda: 0.0).sequence == 1 and client.retries == 0
        client.close()
    assert not [e for e in events if e["event"] == "lost"]


def made_while_repeating(server: Any, channel: Any, name: str, *messages: bytes, seconds: float = 2.0) -> int:
    """Make the same call again and again; return how many of these calls ended."""
    call, ended = channel.stream_stream(RPC_PATHS[name]), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(grpc.RpcError):
            list(call(iter(messages), timeout=TIMEOUT))
        ended += 1
    return ended


@pytest.mark.parametrize("kind", ["digests", "Agree", "wrong sequence", "aborted"])
def test_call_without_pace_is_paced_when_it_is_repeated(kind: str, bad_member: Any) -> None:
    sums = kind in ("digests", "Agree")
    x = torch.zeros(70, 90)
    core = core_of(sum_job() if sums else job_of(mode="async"), {"w": x})
    with serving(core) as server:
        client_of(server, 0).hello()
        begin(client_of(server, 1, incarnation=0)) if not sums else client_of(server, 1).hello()
        head = head_of(1)
        digests = [m for slot, frame in enumerate(digest_frames([x])) for m in frame_messages(slot, frame)]
        name, *messages = {
            "digests": ("Deposit", json_message(head | {"version": 0, "digests": 1}), *digests, json_message({})),
            "Agree": ("Agree", json_message(head), json_message({})),
            "wrong sequence": ("Exchange", json_message(head | {"sequence": 7})),
            "aborted": ("Exchange", json_message(head)),
        }[kind]
        made = made_while_repeating(server, bad_member.new_channel(server), name, *messages)
        assert made <= calls_module.REPEATS + 4 * calls_module.REPEATS_PER_SECOND
        assert made >= calls_module.REPEATS - 5


@pytest.mark.parametrize("name", ["Exchange", "Deposit"])
def test_second_json_message_ends_the_call(name: str, peers: Any) -> None:
    x = torch.zeros(70, 90)
    core = core_of(sum_job() if name == "Deposit" else job_of(mode="async"), {"w": x})
    with serving(core) as server:
        client = client_of(server, 0)
        client.hello() if name == "Deposit" else begin(client)
        last = json_message({"score": 0.0})
        error = peers(server.port).call(name, json_message(head_of(0) | {"version": 0}), *[last] * 50)
        assert error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "got another message behind it" in (error.details() or "")


def test_snapshots_of_a_worker_take_a_share_of_the_time_whatever_the_model(
    bad_member: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "COSTLY_SECONDS", 0.1)
    core = core_of(job_of(mode="async"), {"w": torch.zeros(4)})
    spent: list[float] = []
    snapshot = core.snapshot

    def slowly(*args: Any, **options: Any) -> Any:
        began = time.thread_time()
        while time.thread_time() < began + 0.08:  # as for a model of 64 MiB
            pass
        spent.append(time.thread_time() - began)
        return snapshot(*args, **options)

    monkeypatch.setattr(core, "snapshot", slowly)
    with serving(core) as server:
        begin(client_of(server, 1, incarnation=0))
        seconds = 4.0
        made_while_repeating(
            server, bad_member.new_channel(server), "Snapshot", json_message(head_of(1)), seconds=seconds
        )
        assert len(spent) >= 2 and sum(spent) < 0.1 + 0.08 + 2 * calls_module.COSTLY_SHARE * seconds
