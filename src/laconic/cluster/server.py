"""The server on the network: gRPC calls in, ``Core`` behind them.

gRPC brings flow control, keepalive, deadlines and TLS; payloads are our own bytes, so that sizes are checked before
anything is allocated and are counted as they leave. Seven calls:

- ``Hello``: who is there, what the job is, and which versions the server has. Nothing is believed of a worker before.
- ``Join``: from which version a worker can go on, and from which all do.
- ``Snapshot``: all weights, for a worker that begins or begins again.
- ``Exchange``: a stream of frames up, a stream of frames down.
- ``Agree``: with returns=sum, before the first exchange: scales of all slots up, what all agreed on down.
- ``Deposit``: the same: the weights that workers hold, for a checkpoint, for the end, or for one that has lost them.
- ``Leave``: a worker has done its part.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

# gRPC writes a line for each connection that is not TLS: anybody could fill the disk. It looks here when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
import grpc

from laconic._version import __version__
from laconic.cluster import malloc
from laconic.cluster.core import Core
from laconic.cluster.protocol import (
    MAX_MESSAGE,
    PROTOCOL,
    TOLD,
    Assembler,
    Frame,
    frame_messages,
    is_note,
    note,
    read_note,
)
from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.reply_stream import ReplyStream
from laconic.errors import ConfigError, FrameError

__all__ = ["CALLS", "OPTIONS", "Server", "Traffic"]

log = logging.getLogger("laconic")
Method = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]

SERVICE = "laconic.ParameterServer"
CALLS = {name: f"/{SERVICE}/{name}" for name in ("Hello", "Join", "Snapshot", "Exchange", "Agree", "Deposit", "Leave")}

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    # A peer that is stopped or cut off is noticed within seconds; by default never.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),  # what counts in newer gRPC, where it is a minute by default
    ("grpc.http2.max_pings_without_data", 0),  # a worker that computes for long sends nothing meanwhile
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.enable_http_proxy", 0),  # what is for this host stays on it
    ("grpc.so_reuseport", 0),  # a busy port is an error, not a second server
)

AGAINST_STRANGERS = (
    # Who connects has to come to the point: TLS, and HTTP/2's first words. By default that may take two minutes.
    ("grpc.server_handshake_timeout_ms", 5_000),
    # Who answers pings and asks nothing; a worker that computes for longer connects again and does not notice.
    ("grpc.max_connection_idle_ms", 300_000),
    # A worker has one call under way, or two after a fault.
    ("grpc.max_concurrent_streams", 16),
)
MOST_CONNECTIONS = 4096
FIRST_WORDS = 5.0
"""Seconds within which a call must say whose it is: until then it holds a thread for nobody."""

LONGEST = 600.0
"""Seconds that a call without a deadline of its own may take."""
MARGIN = 1.0
"""Seconds before a call's deadline at which the server says what it waits for, rather than nothing."""
MOST_VERSIONS = 1024
SERVER_FAILED = "the server failed"
TRIM_EVERY = 5.0
"""Seconds after which memory that is not used is given back to the system."""


@dataclass
class Traffic:
    """Bytes of frames that came in and went out, counted where they do."""

    received: int = 0
    sent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, *, received: int = 0, sent: int = 0) -> None:
        with self._lock:
            self.received += received
            self.sent += sent


class _Threads:
    """Calls that hold a thread for nobody: as many of them as there are threads, and nobody would be answered."""

    def __init__(self) -> None:
        self._idle: dict[grpc.ServicerContext, float] = {}
        """Since when: it is not known whose they are, or their worker has begun its push again."""
        self._pushes: dict[int, tuple[grpc.ServicerContext, PushReceiver]] = {}
        """The newest of each worker."""
        self._lock = threading.Lock()

    @contextmanager
    def waiting(self, context: grpc.ServicerContext) -> Iterator[None]:
        """For a first message."""
        with self._lock:
            self._idle[context] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._idle.pop(context, None)

    @contextmanager
    def pushing(self, context: grpc.ServicerContext, receiver: PushReceiver) -> Iterator[None]:
        """Somebody whom we know."""
        worker = receiver.worker
        with self._lock:
            before = self._pushes.get(worker)
            self._pushes[worker] = context, receiver
            if before is not None and before[1].replaced:
                self._idle[before[0]] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._idle.pop(context, None)
                if self._pushes.get(worker) == (context, receiver):
                    del self._pushes[worker]

    def free(self, before: float) -> None:
        """Hang up on who has held one for nobody since then."""
        with self._lock:
            late = [context for context, since in self._idle.items() if since < before]
        for context in late:
            context.cancel()

    def __len__(self) -> int:
        return len(self._idle) + len(self._pushes)


class Server:
    """Serves a ``Core`` until it is stopped.

    Args:
        core: What it serves.
        address: ``host:port``; port 0 takes a free one (see ``port``).
        credentials: gRPC server credentials; None for plaintext, which the caller allows on loopback only.
        identify: With credentials: gives the worker number of a call's peer certificate, or raises ``FrameError``.
        hear: Given a worker's number, its incarnation and what it tells of itself, which decides nothing.
    """

    def __init__(
        self,
        core: Core,
        address: str,
        *,
        credentials: grpc.ServerCredentials | None = None,
        identify: Callable[[grpc.ServicerContext], int] | None = None,
        hear: Callable[[int, int, dict[str, float]], None] | None = None,
    ) -> None:
        self.core = core
        self.traffic = Traffic()
        self._identify = identify
        self._hear = hear or (lambda worker, incarnation, told: None)
        self._limits = core.job.push_limits(core.parameters.values())
        self._stopped = threading.Event()
        options = (*OPTIONS, *AGAINST_STRANGERS, ("grpc.max_allowed_incoming_connections", _most_connections()))
        # Every worker may wait in a call of its own, and come again before the server knows that it was cut off.
        pool = futures.ThreadPoolExecutor(max_workers=3 * core.job.workers + 8, thread_name_prefix="laconic-server")
        self._readers = futures.ThreadPoolExecutor(3 * core.job.workers + 8, thread_name_prefix="laconic-reader")
        self._server = grpc.server(pool, handlers=(_Calls(self),), options=options)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: is the port taken? Choose another with --port") from error
        self._server.start()
        for name, task in (("trim", self._give_memory_back), ("threads", self._free_threads)):
            threading.Thread(target=task, name=f"laconic-{name}", daemon=True).start()

    def stop(self, grace: float = 1.0) -> None:
        self._stopped.set()
        self._server.stop(grace).wait()
        self._readers.shutdown(wait=False)

    def _give_memory_back(self) -> None:
        """Large blocks of many workers come and go all the time: what was freed may add up to gigabytes."""
        while not self._stopped.wait(TRIM_EVERY):
            malloc.trim()

    @cached_property
    def _threads(self) -> _Threads:
        """Which calls hold one."""
        return _Threads()

    def _free_threads(self) -> None:
        while not self._stopped.wait(1.0):
            self._threads.free(time.monotonic() - FIRST_WORDS)

    def begin(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """The first message of a call, which must come soon."""
        with self._threads.waiting(context):
            return next(messages, b"")

    # ------------------------------------------------------------------------------------------------------- calls

    def hello(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        asked = read_note(request)
        if asked.get("protocol") != PROTOCOL:
            raise RefusedError(
                "version",
                f"the worker speaks protocol {_short(asked.get('protocol'))} (laconic "
                f"{_short(asked.get('laconic'))}), the server "
                f"{PROTOCOL} (laconic {__version__}): install the same version on both",
            )
        worker = self._worker(asked, context)
        answer = self.core.welcome(worker, _whole(asked, "incarnation"), _short(asked.get("fingerprint")))
        return note(answer | {"protocol": PROTOCOL, "laconic": __version__})

    def join(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        asked = read_note(request)
        worker = self._worker(asked, context)
        versions = asked.get("versions")
        if not isinstance(versions, list) or len(versions) > MOST_VERSIONS or not all(map(_is_whole, versions)):
            raise FrameError(f"a note needs a list of at most {MOST_VERSIONS} whole numbers 'versions'")
        context.add_callback(self.core.wake)
        sequence, lost = self.core.join(
            worker,
            _whole(asked, "incarnation"),
            _whole(asked, "attempt"),
            Offer(frozenset(versions), bool(asked.get("lost"))),
            deadline=_deadline(context),
            alive=context.is_active,
        )
        return note({"sequence": sequence, "lost": lost})

    def snapshot(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        asked = read_note(request)
        worker, incarnation = self._worker(asked, context), _whole(asked, "incarnation")
        context.add_callback(self.core.wake)
        yield from self._send(
            self.core.snapshot(worker, incarnation, deadline=_deadline(context), alive=context.is_active)
        )

    def exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        asked = read_note(self.begin(messages, context))
        worker, incarnation = self._worker(asked, context), _whole(asked, "incarnation")
        over = threading.Event()

        def ended() -> None:
            if not over.is_set():
                over.set()
                self.core.lost(worker, incarnation)

        receiver = self.core.receive(worker, incarnation, _whole(asked, "sequence"), alive=context.is_active)
        context.add_callback(ended)
        try:
            with self._threads.pushing(context, receiver), receiver:
                if receiver.answer is not None:
                    yield from self._both_ways(messages, receiver, receiver.answer, _deadline(context))
                    return
                reply = self._answer(messages, receiver, _deadline(context))
            yield from self._send(reply)
        except _BrokenOffError:
            ended()
            raise
        finally:
            if context.is_active():
                over.set()

    def _both_ways(
        self, messages: Iterator[bytes], receiver: PushReceiver, answer: ReplyStream, deadline: float
    ) -> Iterator[bytes]:
        """Read a push in a thread of its own, and meanwhile send what is ready of the answer."""
        reading = self._readers.submit(self._answer, messages, receiver, deadline)
        reading.add_done_callback(lambda _: answer.wake())
        yield note({"sequence": receiver.sequence + 1, "ticket": None})
        for slot, frame in answer.as_they_come(lambda: reading.done() and reading.exception() is not None):
            self.traffic.count(sent=len(frame))
            yield from frame_messages(slot, frame)
        reading.result()

    def _answer(self, messages: Iterator[bytes], receiver: PushReceiver, deadline: float) -> Reply:
        assembler = Assembler(self._limits)
        score: float | None = None
        for message in messages:
            if is_note(message):  # the last one, when it is known
                last = read_note(message)
                score = _number(last, "score")
                self._hear(receiver.worker, receiver.incarnation, _told(last))
                continue
            done = assembler.feed(message)
            if done is not None:
                slot, frame = done
                self.traffic.count(received=len(frame))
                receiver.add(slot, frame, deadline=deadline)
        if score is None:  # a connection that breaks may look like a stream that ends
            raise _BrokenOffError("the push ended before its last note")
        if assembler.in_pieces:
            raise FrameError("the push ended in the middle of a frame")
        return receiver.finish(score, deadline=deadline)

    def agree(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        asked = read_note(self.begin(messages, context))
        worker, incarnation = self._worker(asked, context), _whole(asked, "incarnation")
        sequence = _whole(asked, "sequence")
        context.add_callback(self.core.wake)
        scales = self.core.agree(
            worker,
            incarnation,
            sequence,
            self._all_frames(messages, self._limits),
            deadline=_deadline(context),
            alive=context.is_active,
        )
        yield from self._send(Reply(sequence, scales))

    def deposit(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        asked = read_note(self.begin(messages, context))
        worker, incarnation = self._worker(asked, context), _whole(asked, "incarnation")
        with self.core.depositing():
            frames = self._all_frames(messages, self.core.deposit_limits)
            self.core.deposit(worker, incarnation, _whole(asked, "version"), frames)
        yield note({})

    def _all_frames(self, messages: Iterator[bytes], limits: Sequence[int]) -> list[Frame]:
        """A frame of every slot, or several of each, up to as many as there are limits."""
        if self.core.job.returns != "sum":
            raise FrameError("this call is for jobs with returns=sum")
        assembler, frames = Assembler(limits), dict[int, Frame]()
        ended = False
        for message in messages:
            if is_note(message):
                ended = True
                continue
            done = assembler.feed(message)
            if done is not None:
                self.traffic.count(received=len(done[1]))
                if done[0] in frames:
                    raise FrameError(f"slot {done[0]} came twice")
                frames[done[0]] = done[1]
        if not ended or assembler.in_pieces:
            raise _BrokenOffError("the frames ended before the last note")
        if sorted(frames) != list(range(len(frames))):
            raise FrameError("frames of some slots are missing")
        return [frames[slot] for slot in range(len(frames))]

    def leave(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        asked = read_note(request)
        worker, incarnation, told = self._worker(asked, context), _whole(asked, "incarnation"), _told(asked)
        self.core.leave(worker, incarnation)
        self._hear(worker, incarnation, told)
        return note({})

    def _send(self, reply: Reply) -> Iterator[bytes]:
        yield note({"sequence": reply.sequence, "ticket": reply.ticket})
        for slot, frame in enumerate(reply.frames):
            self.traffic.count(sent=len(frame))
            yield from frame_messages(slot, frame)

    def _worker(self, asked: dict[str, Any], context: grpc.ServicerContext) -> int:
        """The worker that calls: what it says, and what its certificate says, must agree."""
        worker = _whole(asked, "worker")
        if self._identify is not None and self._identify(context) != worker:
            raise RefusedError("certificate", f"the certificate is not that of worker {worker}")
        return worker


def _most_connections() -> int:
    """Of the files that this process may have open half are for strangers at most: checkpoints need some, too."""
    try:
        import resource
    except ImportError:  # not on this system
        return MOST_CONNECTIONS
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if most == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, most // 2))


class _BrokenOffError(FrameError):
    """A push that is not all there."""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _whole(asked: dict[str, Any], name: str) -> int:
    value = asked.get(name)
    if not _is_whole(value):
        raise FrameError(f"a note needs a whole number {name!r}, got {_short(value)}")
    return int(value)  # type: ignore[arg-type]


def _number(asked: dict[str, Any], name: str) -> float:
    value = asked.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        raise FrameError(f"a note needs a finite number {name!r}, got {_short(value)}")
    return float(value)


def _told(asked: dict[str, Any]) -> dict[str, float]:
    """What a worker tells of itself; nothing if it does not."""
    told = asked.get("told", {})
    if not isinstance(told, dict):
        raise FrameError(f"a note tells numbers by their names, got {_short(told)}")
    return {name: _number(told, name) for name in TOLD if name in told}


def _short(value: object) -> str:
    """What a peer wrote, as far as it fits a line."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text[:40]


def _deadline(context: grpc.ServicerContext) -> float:
    remaining = context.time_remaining()
    return time.monotonic() + min(LONGEST, LONGEST if remaining is None else max(0.0, remaining - MARGIN))


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """From gRPC's names to methods; what goes wrong becomes a status with a line of text."""

    def __init__(self, server: Server) -> None:
        # A call with one message is a stream of one: only of a stream does the server see that nothing comes.
        once = {"Hello": server.hello, "Join": server.join, "Leave": server.leave}
        methods = {name: _once(server, method) for name, method in once.items()}
        methods |= {"Snapshot": _asked(server, server.snapshot), "Exchange": server.exchange}
        methods |= {"Agree": server.agree, "Deposit": server.deposit}
        self._handlers = {
            CALLS[name]: grpc.stream_stream_rpc_method_handler(_guarded(method)) for name, method in methods.items()
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(details.method)


def _abort(context: grpc.ServicerContext, error: Exception) -> None:
    if isinstance(error, RefusedError):
        text = json.dumps({"reason": error.reason, "message": str(error), "resume_at": error.resume_at})
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
    if isinstance(error, FrameError):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if isinstance(error, grpc.RpcError):  # what is left of a stream that broke off
        context.abort(grpc.StatusCode.CANCELLED, "the worker has hung up")
    log.exception("the server failed on a call")
    context.abort(grpc.StatusCode.INTERNAL, f"{SERVER_FAILED}: {type(error).__name__}: {error}")


def _once(server: Server, method: Callable[[bytes, grpc.ServicerContext], bytes]) -> Method:
    def call(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield method(server.begin(messages, context), context)

    return call


def _asked(server: Server, method: Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]) -> Method:
    def call(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from method(server.begin(messages, context), context)

    return call


def _guarded(method: Method) -> Method:
    def call(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from method(messages, context)
        except Exception as error:  # a call must not take the server down, nor end without a word
            _abort(context, error)
            raise

    return call
