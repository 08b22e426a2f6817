"""The server on the network: gRPC calls to a ``Core``.

gRPC brings flow control, keepalive, deadlines and TLS. Payloads are bytes of our own format, so that sizes are checked
before anything is allocated and bytes are counted where they leave. The calls:

- ``Hello``: a worker introduces itself; returns the job and the versions that the server has.
- ``Join``: the versions a worker can restore up, the exchange at which it continues down.
- ``Snapshot``: all weights, for a worker that starts or restarts.
- ``Exchange``: a stream of frames up, a stream of frames down.
- ``Agree``: with returns=sum, before the first exchange: scales of all slots up, the agreed scales down.
- ``Deposit``: with returns=sum: a weight upload, for a checkpoint, for the end, or for a worker that lost its weights;
  or the hashes of the weights that another worker holds, to compare them.
- ``Leave``: a worker has finished.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import nullcontext
from typing import Any

import grpc

from laconic._version import __version__
from laconic.cluster import calls as calls_
from laconic.cluster import malloc
from laconic.cluster.calls import CALLS_PER_WORKER, Call, Calls, max_unnamed_calls
from laconic.cluster.core import Core
from laconic.cluster.deny_list import DenyList
from laconic.cluster.protocol import (
    GRPC_OPTIONS,
    PROTOCOL,
    RPC_PATHS,
    SERVER_FAILED,
    Assembler,
    ByteCounter,
    CutFrame,
    Frame,
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
from laconic.cluster.security import AuthContext
from laconic.cluster.shared_state import FrameMemory
from laconic.errors import ConfigError, FrameError

__all__ = ["Server"]

log = logging.getLogger("laconic")
Method = Callable[[Iterator[bytes], Call], Iterator[bytes]]

STRANGER_OPTIONS = (
    # TLS and HTTP/2 handshakes must end within this time; by default they may take two minutes.
    ("grpc.server_handshake_timeout_ms", 5_000),
    # For peers that answer pings and send no request; a worker that computes for longer reconnects without notice.
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_concurrent_streams", 16),
)
MAX_CONNECTIONS = 4096
MAX_CALL_SECONDS = 600.0
"""The deadline of a call that has none."""
DEADLINE_MARGIN = 1.0
"""Seconds before a call's deadline at which the server answers what it waits for, instead of nothing."""
MAX_VERSIONS = 1024
_AFTER_THE_LAST = "a call ends with one JSON message, got another message behind it"
WATCH_INTERVAL = 0.5
"""Seconds between two checks of the calls' deadlines."""
TRIM_INTERVAL = 5.0
"""Seconds after which unused memory is returned to the system."""


class Server:
    """Serves a ``Core`` until it is stopped.

    Args:
        address: ``host:port``; port 0 takes a free one (see ``port``).
        credentials: gRPC server credentials; None for plaintext, which the caller allows on loopback only.
        identify: With credentials: returns the worker number of a call's peer certificate, or raises ``FrameError``.
        deny_list: With credentials: certificates that are refused, also for calls in progress when the list changes.
        on_stats: Receives a worker's number, its incarnation and the statistics it reports.
    """

    def __init__(
        self, core: Core, address: str, *, credentials: grpc.ServerCredentials | None = None,
        identify: Callable[[grpc.ServicerContext], int] | None = None, deny_list: DenyList | None = None,
        on_stats: Callable[[int, int, dict[str, float]], None] | None = None,
    ) -> None:  # fmt: skip
        self.core = core
        self.traffic = ByteCounter()
        self._identify, self._deny_list = identify, deny_list
        self._peers: dict[int, AuthContext] = {}
        """With a deny list: the last certificate of each worker."""
        self._on_stats = on_stats or (lambda worker, incarnation, stats: None)
        self._limits = core.job.push_limits(core.parameters.values())
        self.calls = Calls(core.job.workers)
        self._stopped = threading.Event()
        options = (*GRPC_OPTIONS, *STRANGER_OPTIONS, ("grpc.max_allowed_incoming_connections", _max_connections()))
        # A thread for each call that there may be, and some for calls that were cancelled and are about to end. Threads
        # are started when they are needed. Calls beyond twice as many are refused at once: the queue is bounded.
        of_workers = CALLS_PER_WORKER * core.job.workers + 8
        threads = of_workers + max_unnamed_calls(core.job.workers)
        pool = futures.ThreadPoolExecutor(threads, thread_name_prefix="laconic-server")
        self._readers = futures.ThreadPoolExecutor(of_workers, thread_name_prefix="laconic-reader")
        self._server = grpc.server(
            pool, handlers=(_Handlers(self),), options=options, maximum_concurrent_rpcs=2 * threads
        )
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: is the port taken? Choose another with --port") from error
        self._server.start()
        for name, task in (("trim", self._trim_memory), ("calls", self._watch_calls)):
            threading.Thread(target=task, name=f"laconic-{name}", daemon=True).start()

    def stop(self, grace: float = 1.0) -> None:
        self._stopped.set()
        self._server.stop(grace).wait()
        self._readers.shutdown(wait=False)

    def _trim_memory(self) -> None:
        """Return freed memory to the system: the large blocks of many workers could add up to gigabytes."""
        while not self._stopped.wait(TRIM_INTERVAL):
            malloc.trim()

    def _watch_calls(self) -> None:
        while not self._stopped.wait(WATCH_INTERVAL):
            self.calls.cancel_overdue()
            if self._deny_list is not None and self._deny_list.refresh():
                self._end_denied_calls(self._deny_list)
            self.core.wake()  # the push that may exceed the byte budget may have been idle for too long

    def _end_denied_calls(self, deny_list: DenyList) -> None:
        for call in self.calls.in_progress():
            if deny_list.is_denied(call.context.auth_context()):
                call.context.cancel()
        for worker, peer in list(self._peers.items()):  # one that computes has no call
            if deny_list.is_denied(peer):
                self.core.leave(worker)  # a job that can do without it goes on

    # ------------------------------------------------------------------------------------------------------- calls

    def hello(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        values = read_json(call.first(messages))
        if values.get("protocol") != PROTOCOL:
            raise RefusedError(
                "version",
                f"the worker uses protocol {shorten(values.get('protocol'))} (laconic "
                f"{shorten(values.get('laconic'))}), the server {PROTOCOL} (laconic {__version__}): install the same "
                "version on both",
            )
        worker, incarnation = self._worker(values, call), read_integer(values, "incarnation")
        self.calls.pace(call, worker)
        answer = self.core.welcome(worker, incarnation, shorten(values.get("fingerprint")))
        self.calls.admit(call, worker, incarnation)
        yield json_message(answer | {"protocol": PROTOCOL, "laconic": __version__})

    def join(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        worker, incarnation, values = self._admit(messages, call)
        self.calls.pace(call, worker)
        versions = values.get("versions")
        if not isinstance(versions, list) or len(versions) > MAX_VERSIONS or not all(map(is_integer, versions)):
            raise FrameError(f"'versions' must be a list of at most {MAX_VERSIONS} integers, got {shorten(versions)}")
        call.context.add_callback(self.core.wake)
        sequence, lost = self.core.join(
            worker, incarnation, read_integer(values, "attempt"), Offer(frozenset(versions), bool(values.get("lost"))),
            deadline=_deadline(call), alive=call.context.is_active,
        )  # fmt: skip
        yield json_message({"sequence": sequence, "lost": lost})

    def snapshot(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        worker, incarnation, _ = self._admit(messages, call)
        call.context.add_callback(self.core.wake)
        with self.calls.costly(call, worker, self.core.version):
            reply = self.core.snapshot(worker, incarnation, deadline=_deadline(call), alive=call.context.is_active)
        yield from self._send(reply)

    def exchange(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        worker, incarnation, values = self._caller(messages, call)
        sequence = read_integer(values, "sequence")
        try:
            receiver = self.core.receive(worker, incarnation, sequence, alive=call.context.is_active)
        except RefusedError:
            self.calls.pace(call, worker, version=self.core.version)
            raise
        self.calls.admit(call, worker, incarnation, sequence)
        ended = threading.Event()

        def disconnected() -> None:
            if not ended.is_set():
                ended.set()
                if call.superseded:
                    self.core.wake()
                else:
                    self.core.disconnected(worker, incarnation)

        call.context.add_callback(disconnected)
        try:
            with receiver:
                self.calls.pace(call, worker, cost=0.0)  # of pushes that failed
                if receiver.reply is not None:
                    if receiver.repeats:
                        self.calls.pace(call, worker)
                    yield from self._send_while_receiving(messages, receiver, receiver.reply, call)
                    return
                with self.calls.costly(call, worker) if receiver.repeats else nullcontext():
                    reply = self._receive_push(messages, receiver, call)
            yield from self._send(reply)
        except BaseException as error:
            if not isinstance(error, RefusedError) or error.reason not in ("deposit", "waiting", "regather"):
                self.calls.charge(worker)
            if isinstance(error, _InterruptedError):
                disconnected()
            raise
        finally:
            if call.context.is_active():
                ended.set()

    def _send_while_receiving(
        self, messages: Iterator[bytes], receiver: PushReceiver, reply: ReplyStream, call: Call
    ) -> Iterator[bytes]:
        """Receive a push in another thread and meanwhile send the frames of the reply that are ready."""
        receiving = self._readers.submit(self._receive_push, messages, receiver, call)
        receiving.add_done_callback(lambda _: reply.wake())
        yield json_message({"sequence": receiver.sequence + 1, "ticket": None})
        for frame in reply.by_arrival(lambda: receiving.done() and receiving.exception() is not None):
            yield from self._frame_messages(frame)
        receiving.result()

    def _receive_push(self, messages: Iterator[bytes], receiver: PushReceiver, call: Call) -> Reply:
        deadline = _deadline(call)
        assembler = Assembler(
            self._limits, keep=not receiver.drops_frames,
            on_begin=lambda slot, nbytes: receiver.begin(slot, nbytes, deadline=deadline),
        )  # fmt: skip
        score: float | None = None
        # The frames of a push that was applied before are ready; those of another one are perhaps being computed.
        timeout = calls_.MESSAGE_TIMEOUT if receiver.drops_frames else calls_.COMPUTE_TIMEOUT
        for message in call.receive(messages, timeout):
            if score is not None:
                raise FrameError(_AFTER_THE_LAST)
            if is_json(message):  # the last message: a worker knows its score only then
                values = read_json(message)
                score = read_finite(values, "score")
                self._on_stats(receiver.worker, receiver.incarnation, read_worker_stats(values))
                continue
            before = assembler.total
            complete = assembler.feed(message)
            if complete is not None:
                self.traffic.count(received=assembler.total - before)
                receiver.add(*complete, deadline=deadline)
        if score is None:  # an interrupted connection may look like the end of the stream
            raise _InterruptedError("the push ended before its last message")
        if assembler.incomplete:
            raise FrameError("the push ended inside a frame")
        return receiver.finish(score, deadline=deadline)

    def agree(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        worker, incarnation, values = self._admit(messages, call)
        sequence = read_integer(values, "sequence")
        self.calls.pace(call, worker)
        call.context.add_callback(self.core.wake)
        with self.core.frame_memory(alive=call.context.is_active) as memory:
            frames = self._receive_frames(messages, self.core.scale_limits, memory, call)
            scales = self.core.agree_scales(
                worker, incarnation, sequence, frames, deadline=_deadline(call), alive=call.context.is_active
            )
        yield from self._send(Reply(sequence, scales))

    def deposit(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        worker, incarnation, values = self._admit(messages, call)
        version = read_integer(values, "version")
        if self.core.repeats_upload(worker, version):
            self.calls.pace(call, worker)
        call.context.add_callback(self.core.wake)
        if values.get("digests"):
            with self.core.frame_memory(alive=call.context.is_active) as memory:
                frames = self._receive_frames(messages, self.core.digest_limits, memory, call)
                self.core.compare_weights(worker, incarnation, version, frames)
            yield json_message({})
            return
        with (
            self.core.receiving_upload(worker),
            self.core.frame_memory(alive=call.context.is_active) as memory,
        ):
            frames = self._receive_frames(messages, self.core.upload_limits, memory, call)
            self.core.upload_weights(worker, incarnation, version, frames)
        yield json_message({})

    def _receive_frames(
        self, messages: Iterator[bytes], limits: Sequence[int], memory: FrameMemory, call: Call
    ) -> list[Frame]:
        """Read one or more frames per slot, at most ``len(limits)``, up to the last JSON message."""
        deadline = _deadline(call)
        assembler = Assembler(limits, on_begin=lambda _, nbytes: memory.reserve(nbytes, deadline=deadline))
        frames, ended = dict[int, Frame](), False
        for message in call.receive(messages, calls_.MESSAGE_TIMEOUT):
            if ended:
                raise FrameError(_AFTER_THE_LAST)
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

    def leave(self, messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
        worker, incarnation, values = self._caller(messages, call)
        stats = read_worker_stats(values)
        self.core.leave(worker, incarnation)
        self._on_stats(worker, incarnation, stats)
        yield json_message({})

    def _send(self, reply: Reply) -> Iterator[bytes]:
        yield json_message({"sequence": reply.sequence, "ticket": reply.ticket})
        if isinstance(reply.frames, ReplyStream):
            frames = reply.frames.by_arrival()
        else:
            frames = (CutFrame.of(slot, frame) for slot, frame in enumerate(reply.frames))
        for frame in frames:
            yield from self._frame_messages(frame)

    def _frame_messages(self, frame: CutFrame) -> Sequence[bytes]:
        self.traffic.count(sent=frame.nbytes)
        return frame.messages

    def _admit(self, messages: Iterator[bytes], call: Call) -> tuple[int, int, dict[str, Any]]:
        """Read the first message of a call and make it one of its worker's; see ``_caller``."""
        worker, incarnation, values = self._caller(messages, call)
        self.core.check_member(worker, incarnation)
        self.calls.admit(call, worker, incarnation)
        return worker, incarnation, values

    def _caller(self, messages: Iterator[bytes], call: Call) -> tuple[int, int, dict[str, Any]]:
        """Return the worker and incarnation that a call's first message names, and all its values."""
        values = read_json(call.first(messages))
        return self._worker(values, call), read_integer(values, "incarnation"), values

    def _worker(self, values: dict[str, Any], call: Call) -> int:
        """Return the worker number that a request names; the peer's certificate must name the same one."""
        worker = read_integer(values, "worker")
        if self._identify is not None and self._identify(call.context) != worker:
            raise RefusedError("certificate", f"the certificate is not that of worker {worker}")
        if self._deny_list is not None:
            peer = self._peers[worker] = call.context.auth_context()
            self._deny_list.check(peer, f"worker {worker}")
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


def _deadline(call: Call) -> float:
    remaining = call.context.time_remaining()
    seconds = MAX_CALL_SECONDS if remaining is None else max(0.0, remaining - DEADLINE_MARGIN)
    return time.monotonic() + min(MAX_CALL_SECONDS, seconds)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Maps RPC paths to methods of a server; errors become a status with one line of text."""

    def __init__(self, server: Server) -> None:
        methods: dict[str, Method] = {
            "Hello": server.hello, "Join": server.join, "Snapshot": server.snapshot, "Exchange": server.exchange,
            "Agree": server.agree, "Deposit": server.deposit, "Leave": server.leave,
        }  # fmt: skip
        # Calls with one request are served as streams of one message: the server sees a missing message in these only.
        self._handlers = {
            RPC_PATHS[name]: grpc.stream_stream_rpc_method_handler(_handler(server, name, method))
            for name, method in methods.items()
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(details.method)


def _handler(
    server: Server, name: str, method: Method
) -> Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]:
    def handle(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with server.calls.open(name, context) as call:
            try:
                yield from call.send(method(messages, call))
            except Exception as error:  # a call must not end the server, nor end without a message
                _abort(context, error)
                raise

    return handle


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
