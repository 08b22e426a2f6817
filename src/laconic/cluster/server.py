"""The server on the network: gRPC calls to a ``Core``.

gRPC brings flow control, keepalive, deadlines and TLS. Payloads are bytes of our own format, so that sizes are checked
before anything is allocated and bytes are counted where they leave. The calls:

- ``Hello``: a worker introduces itself; returns the job and the versions that the server has.
- ``Join``: the versions a worker can restore up, the exchange at which it continues down.
- ``Snapshot``: all weights, for a worker that starts or restarts.
- ``Exchange``: a stream of frames up, a stream of frames down.
- ``Agree``: with returns=sum, before the first exchange: scales of all slots up, the agreed scales down.
- ``Deposit``: with returns=sum: a weight upload, for a checkpoint, for the end, or for a worker that lost its weights.
- ``Leave``: a worker has finished.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from laconic._version import __version__
from laconic.cluster import malloc
from laconic.cluster.core import Core
from laconic.cluster.protocol import (
    GRPC_OPTIONS,
    PROTOCOL,
    RPC_PATHS,
    SERVER_FAILED,
    Assembler,
    ByteCounter,
    Frame,
    frame_messages,
    is_integer,
    is_json,
    json_message,
    read_finite,
    read_integer,
    read_json,
    read_worker_stats,
    shorten,
)
from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError, Reply, ReplyStream
from laconic.errors import ConfigError, FrameError

__all__ = ["Server"]

log = logging.getLogger("laconic")
Method = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]

STRANGER_OPTIONS = (
    # TLS and HTTP/2 handshakes must end within this time; by default they may take two minutes.
    ("grpc.server_handshake_timeout_ms", 5_000),
    # For peers that answer pings and send no request; a worker that computes for longer reconnects without notice.
    ("grpc.max_connection_idle_ms", 300_000),
    # A worker has one call in progress, or two after a fault.
    ("grpc.max_concurrent_streams", 16),
)
MAX_CONNECTIONS = 4096
FIRST_MESSAGE_TIMEOUT = 5.0
"""Seconds within which a call must name its worker: until then it occupies a thread for an unknown peer."""

MAX_CALL_SECONDS = 600.0
"""The deadline of a call that has none."""
DEADLINE_MARGIN = 1.0
"""Seconds before a call's deadline at which the server answers what it waits for, instead of nothing."""
MAX_VERSIONS = 1024
TRIM_INTERVAL = 5.0
"""Seconds after which unused memory is returned to the system."""


class _IdleCalls:
    """Finds calls that occupy a thread without a known worker behind them, so that they cannot exhaust the pool."""

    def __init__(self) -> None:
        self._idle_since: dict[grpc.ServicerContext, float] = {}
        """Calls that have not named their worker, or whose worker has started its push again."""
        self._pushes: dict[int, tuple[grpc.ServicerContext, PushReceiver]] = {}
        """The newest push of each worker."""
        self._lock = threading.Lock()

    @contextmanager
    def awaiting_first_message(self, context: grpc.ServicerContext) -> Iterator[None]:
        with self._lock:
            self._idle_since[context] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._idle_since.pop(context, None)

    @contextmanager
    def pushing(self, context: grpc.ServicerContext, receiver: PushReceiver) -> Iterator[None]:
        worker = receiver.worker
        with self._lock:
            earlier = self._pushes.get(worker)
            self._pushes[worker] = context, receiver
            if earlier is not None and earlier[1].replaced:
                self._idle_since[earlier[0]] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._idle_since.pop(context, None)
                if self._pushes.get(worker) == (context, receiver):
                    del self._pushes[worker]

    def cancel_since(self, before: float) -> None:
        """Cancel the calls that have been idle since before that time."""
        with self._lock:
            overdue = [context for context, since in self._idle_since.items() if since < before]
        for context in overdue:
            context.cancel()

    def __len__(self) -> int:
        return len(self._idle_since) + len(self._pushes)


class Server:
    """Serves a ``Core`` until it is stopped.

    Args:
        address: ``host:port``; port 0 takes a free one (see ``port``).
        credentials: gRPC server credentials; None for plaintext, which the caller allows on loopback only.
        identify: With credentials: returns the worker number of a call's peer certificate, or raises ``FrameError``.
        on_stats: Receives a worker's number, its incarnation and the statistics it reports.
    """

    def __init__(
        self, core: Core, address: str, *, credentials: grpc.ServerCredentials | None = None,
        identify: Callable[[grpc.ServicerContext], int] | None = None,
        on_stats: Callable[[int, int, dict[str, float]], None] | None = None,
    ) -> None:  # fmt: skip
        self.core = core
        self.traffic = ByteCounter()
        self._identify = identify
        self._on_stats = on_stats or (lambda worker, incarnation, stats: None)
        self._limits = core.job.push_limits(core.parameters.values())
        self._calls = _IdleCalls()
        self._stopped = threading.Event()
        options = (*GRPC_OPTIONS, *STRANGER_OPTIONS, ("grpc.max_allowed_incoming_connections", _max_connections()))
        # Each worker may wait in one call, and come again before the server notices that it was disconnected.
        threads = 3 * core.job.workers + 8
        pool = futures.ThreadPoolExecutor(threads, thread_name_prefix="laconic-server")
        self._readers = futures.ThreadPoolExecutor(threads, thread_name_prefix="laconic-reader")
        self._server = grpc.server(pool, handlers=(_Handlers(self),), options=options)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: is the port taken? Choose another with --port") from error
        self._server.start()
        for name, task in (("trim", self._trim_memory), ("threads", self._cancel_idle_calls)):
            threading.Thread(target=task, name=f"laconic-{name}", daemon=True).start()

    def stop(self, grace: float = 1.0) -> None:
        self._stopped.set()
        self._server.stop(grace).wait()
        self._readers.shutdown(wait=False)

    def _trim_memory(self) -> None:
        """Return freed memory to the system: the large blocks of many workers could add up to gigabytes."""
        while not self._stopped.wait(TRIM_INTERVAL):
            malloc.trim()

    def _cancel_idle_calls(self) -> None:
        while not self._stopped.wait(1.0):
            self._calls.cancel_since(time.monotonic() - FIRST_MESSAGE_TIMEOUT)

    def first_message(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Return the first message of a call; the call is cancelled if it does not come soon."""
        with self._calls.awaiting_first_message(context):
            return next(messages, b"")

    # ------------------------------------------------------------------------------------------------------- calls

    def hello(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        values = read_json(request)
        if values.get("protocol") != PROTOCOL:
            raise RefusedError(
                "version",
                f"the worker uses protocol {shorten(values.get('protocol'))} (laconic "
                f"{shorten(values.get('laconic'))}), the server {PROTOCOL} (laconic {__version__}): install the same "
                "version on both",
            )
        worker = self._worker(values, context)
        answer = self.core.welcome(worker, read_integer(values, "incarnation"), shorten(values.get("fingerprint")))
        return json_message(answer | {"protocol": PROTOCOL, "laconic": __version__})

    def join(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        values = read_json(request)
        worker = self._worker(values, context)
        versions = values.get("versions")
        if not isinstance(versions, list) or len(versions) > MAX_VERSIONS or not all(map(is_integer, versions)):
            raise FrameError(f"'versions' must be a list of at most {MAX_VERSIONS} integers, got {shorten(versions)}")
        context.add_callback(self.core.wake)
        sequence, lost = self.core.join(
            worker, read_integer(values, "incarnation"), read_integer(values, "attempt"),
            Offer(frozenset(versions), bool(values.get("lost"))), deadline=_deadline(context), alive=context.is_active,
        )  # fmt: skip
        return json_message({"sequence": sequence, "lost": lost})

    def snapshot(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        worker, incarnation, _ = self._caller(request, context)
        context.add_callback(self.core.wake)
        yield from self._send(
            self.core.snapshot(worker, incarnation, deadline=_deadline(context), alive=context.is_active)
        )

    def exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        worker, incarnation, values = self._caller(self.first_message(messages, context), context)
        ended = threading.Event()

        def disconnected() -> None:
            if not ended.is_set():
                ended.set()
                self.core.disconnected(worker, incarnation)

        sequence = read_integer(values, "sequence")
        receiver = self.core.receive(worker, incarnation, sequence, alive=context.is_active)
        context.add_callback(disconnected)
        try:
            with self._calls.pushing(context, receiver), receiver:
                if receiver.reply is not None:
                    yield from self._send_while_receiving(messages, receiver, receiver.reply, _deadline(context))
                    return
                reply = self._receive_push(messages, receiver, _deadline(context))
            yield from self._send(reply)
        except _InterruptedError:
            disconnected()
            raise
        finally:
            if context.is_active():
                ended.set()

    def _send_while_receiving(
        self, messages: Iterator[bytes], receiver: PushReceiver, reply: ReplyStream, deadline: float
    ) -> Iterator[bytes]:
        """Receive a push in another thread and meanwhile send the frames of the reply that are ready."""
        receiving = self._readers.submit(self._receive_push, messages, receiver, deadline)
        receiving.add_done_callback(lambda _: reply.wake())
        yield json_message({"sequence": receiver.sequence + 1, "ticket": None})
        for slot, frame in reply.by_arrival(lambda: receiving.done() and receiving.exception() is not None):
            yield from self._frame_messages(slot, frame)
        receiving.result()

    def _receive_push(self, messages: Iterator[bytes], receiver: PushReceiver, deadline: float) -> Reply:
        assembler = Assembler(self._limits)
        score: float | None = None
        for message in messages:
            if is_json(message):  # the last message: a worker knows its score only then
                values = read_json(message)
                score = read_finite(values, "score")
                self._on_stats(receiver.worker, receiver.incarnation, read_worker_stats(values))
                continue
            complete = assembler.feed(message)
            if complete is not None:
                slot, frame = complete
                self.traffic.count(received=len(frame))
                receiver.add(slot, frame, deadline=deadline)
        if score is None:  # an interrupted connection may look like the end of the stream
            raise _InterruptedError("the push ended before its last message")
        if assembler.incomplete:
            raise FrameError("the push ended inside a frame")
        return receiver.finish(score, deadline=deadline)

    def agree(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        worker, incarnation, values = self._caller(self.first_message(messages, context), context)
        sequence = read_integer(values, "sequence")
        context.add_callback(self.core.wake)
        scales = self.core.agree_scales(
            worker, incarnation, sequence, self._receive_frames(messages, self._limits), deadline=_deadline(context),
            alive=context.is_active,
        )  # fmt: skip
        yield from self._send(Reply(sequence, scales))

    def deposit(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        worker, incarnation, values = self._caller(self.first_message(messages, context), context)
        with self.core.receiving_upload():
            frames = self._receive_frames(messages, self.core.upload_limits)
            self.core.upload_weights(worker, incarnation, read_integer(values, "version"), frames)
        yield json_message({})

    def _receive_frames(self, messages: Iterator[bytes], limits: Sequence[int]) -> list[Frame]:
        """Read one or more frames per slot, at most ``len(limits)``, up to the last JSON message."""
        if self.core.job.reply_kind.server_has_weights:
            raise FrameError("this call is for jobs with returns=sum")
        assembler, frames = Assembler(limits), dict[int, Frame]()
        ended = False
        for message in messages:
            if is_json(message):
                ended = True
                continue
            complete = assembler.feed(message)
            if complete is not None:
                slot, frame = complete
                self.traffic.count(received=len(frame))
                if slot in frames:
                    raise FrameError(f"slot {slot} was sent twice")
                frames[slot] = frame
        if not ended or assembler.incomplete:
            raise _InterruptedError("the frames ended before the last message")
        if sorted(frames) != list(range(len(frames))):
            raise FrameError("frames of some slots are missing")
        return [frames[slot] for slot in range(len(frames))]

    def leave(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        worker, incarnation, values = self._caller(request, context)
        stats = read_worker_stats(values)
        self.core.leave(worker, incarnation)
        self._on_stats(worker, incarnation, stats)
        return json_message({})

    def _send(self, reply: Reply) -> Iterator[bytes]:
        yield json_message({"sequence": reply.sequence, "ticket": reply.ticket})
        for slot, frame in enumerate(reply.frames):
            yield from self._frame_messages(slot, frame)

    def _frame_messages(self, slot: int, frame: Frame) -> Iterator[bytes]:
        self.traffic.count(sent=len(frame))
        return frame_messages(slot, frame)

    def _caller(self, request: bytes, context: grpc.ServicerContext) -> tuple[int, int, dict[str, Any]]:
        """Return the worker and incarnation that a request names, and all its values."""
        values = read_json(request)
        return self._worker(values, context), read_integer(values, "incarnation"), values

    def _worker(self, values: dict[str, Any], context: grpc.ServicerContext) -> int:
        """Return the worker number that a request names; the peer's certificate must name the same one."""
        worker = read_integer(values, "worker")
        if self._identify is not None and self._identify(context) != worker:
            raise RefusedError("certificate", f"the certificate is not that of worker {worker}")
        return worker


def _max_connections() -> int:
    """Return the limit on connections: at most half of the process's open files, because checkpoints need some."""
    try:
        import resource
    except ImportError:  # not on this system
        return MAX_CONNECTIONS
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if open_files == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, open_files // 2))


class _InterruptedError(FrameError):
    """A stream ended before its last message."""


def _deadline(context: grpc.ServicerContext) -> float:
    remaining = context.time_remaining()
    seconds = MAX_CALL_SECONDS if remaining is None else max(0.0, remaining - DEADLINE_MARGIN)
    return time.monotonic() + min(MAX_CALL_SECONDS, seconds)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Maps RPC paths to methods of a server; errors become a status with one line of text."""

    def __init__(self, server: Server) -> None:
        # Calls with one request are served as streams of one message: the server sees a missing message in these only.
        unary = {"Hello": server.hello, "Join": server.join, "Leave": server.leave}
        methods = {name: _unary(server, method) for name, method in unary.items()}
        methods |= {"Snapshot": _unary_stream(server, server.snapshot), "Exchange": server.exchange}
        methods |= {"Agree": server.agree, "Deposit": server.deposit}
        self._handlers = {
            RPC_PATHS[name]: grpc.stream_stream_rpc_method_handler(_with_status(method))
            for name, method in methods.items()
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(details.method)


def _unary(server: Server, method: Callable[[bytes, grpc.ServicerContext], bytes]) -> Method:
    def call(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield method(server.first_message(messages, context), context)

    return call


def _unary_stream(server: Server, method: Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]) -> Method:
    def call(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from method(server.first_message(messages, context), context)

    return call


def _with_status(method: Method) -> Method:
    def call(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from method(messages, context)
        except Exception as error:  # a call must not end the server, nor end without a message
            _abort(context, error)
            raise

    return call


def _abort(context: grpc.ServicerContext, error: Exception) -> None:
    if isinstance(error, RefusedError):
        text = json.dumps({"reason": error.reason, "message": str(error), "resume_at": error.resume_at})
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
    if isinstance(error, FrameError):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if isinstance(error, grpc.RpcError):  # the rest of an interrupted stream
        context.abort(grpc.StatusCode.CANCELLED, "the worker has disconnected")
    log.exception("the server failed on a call")
    context.abort(grpc.StatusCode.INTERNAL, f"{SERVER_FAILED}: {type(error).__name__}: {error}")
