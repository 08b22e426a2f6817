"""The server on the network: gRPC calls in, ``Core`` behind them.

gRPC brings flow control, keepalive, deadlines and TLS; payloads are our own bytes, so that sizes are checked before
anything is allocated and are counted as they leave. Four calls:

- ``Hello``: who is there, and what the job is. Nothing is believed of a worker before it.
- ``Snapshot``: all weights, for a worker that begins or begins again.
- ``Exchange``: a stream of frames up, a stream of frames down.
- ``Leave``: a worker has done its part.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc

from laconic._version import __version__
from laconic.cluster.core import Contribution, Core, RefusedError, Reply
from laconic.cluster.messages import MAX_MESSAGE, PROTOCOL, Assembler, frame_messages, is_note, note, read_note
from laconic.codecs import parse
from laconic.errors import ConfigError, FrameError
from laconic.frames import max_nbytes

__all__ = ["CALLS", "OPTIONS", "Server", "Traffic"]

log = logging.getLogger("laconic")

SERVICE = "laconic.ParameterServer"
CALLS = {name: f"/{SERVICE}/{name}" for name in ("Hello", "Snapshot", "Exchange", "Leave")}

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    # A peer that is stopped or cut off is noticed within seconds; by default never.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.enable_http_proxy", 0),  # what is for this host stays on it
    ("grpc.so_reuseport", 0),  # a busy port is an error, not a second server
)

LONGEST = 600.0
"""Seconds that a call without a deadline of its own may take."""


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


class Server:
    """Serves a ``Core`` until it is stopped.

    Args:
        core: What it serves.
        address: ``host:port``; port 0 takes a free one (see ``port``).
        credentials: gRPC server credentials; None for plaintext, which the caller allows on loopback only.
        identify: With credentials: gives the worker number of a call's peer certificate, or raises ``FrameError``.
    """

    def __init__(
        self,
        core: Core,
        address: str,
        *,
        credentials: grpc.ServerCredentials | None = None,
        identify: Callable[[grpc.ServicerContext], int] | None = None,
    ) -> None:
        self.core = core
        self.traffic = Traffic()
        self._identify = identify
        _, codec = parse(core.job.push)  # a policy may exempt a slot, which then travels as it is
        self._limits = [max(max_nbytes("none", x), max_nbytes(codec, x)) for x in core.parameters.values()]
        # Every worker may wait in a call of its own, and come again before the server knows that it was cut off.
        pool = futures.ThreadPoolExecutor(max_workers=3 * core.job.workers + 8, thread_name_prefix="laconic-server")
        self._server = grpc.server(pool, handlers=(_Calls(self),), options=OPTIONS)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: is the port taken? Choose another with --port") from error
        self._server.start()

    def stop(self, grace: float = 1.0) -> None:
        self._server.stop(grace).wait()

    # ------------------------------------------------------------------------------------------------------- calls

    def hello(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        asked = read_note(request)
        if asked.get("protocol") != PROTOCOL:
            raise RefusedError(
                "version",
                f"the worker speaks protocol {asked.get('protocol')} (laconic {asked.get('laconic')}), the server "
                f"{PROTOCOL} (laconic {__version__}): install the same version on both",
            )
        worker = self._worker(asked, context)
        answer = self.core.welcome(worker, _whole(asked, "incarnation"), str(asked.get("fingerprint")))
        return note(answer | {"protocol": PROTOCOL, "laconic": __version__})

    def snapshot(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        asked = read_note(request)
        yield from self._send(self.core.snapshot(self._worker(asked, context)))

    def exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        first = next(messages, b"")
        asked = read_note(first)
        worker = self._worker(asked, context)
        frames: dict[int, bytes] = {}
        assembler = Assembler(self._limits)
        score = 0.0
        for message in messages:
            if is_note(message):  # the last one, when it is known
                score = float(read_note(message).get("score", 0.0))
                continue
            done = assembler.feed(message)
            if done is not None:
                slot, frame = done
                if slot in frames:
                    raise FrameError(f"slot {slot} came twice")
                frames[slot] = frame
        if assembler.in_pieces or len(frames) != len(self.core.slots):
            raise FrameError(f"the push ended after {len(frames)} of {len(self.core.slots)} frames")
        self.traffic.count(received=assembler.total)
        push = Contribution(
            worker,
            _whole(asked, "incarnation"),
            _whole(asked, "sequence"),
            [frames[slot] for slot in range(len(frames))],
            score,
        )
        remaining = context.time_remaining()
        deadline = time.monotonic() + min(LONGEST, LONGEST if remaining is None else remaining)
        yield from self._send(self.core.exchange(push, deadline=deadline))

    def leave(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        asked = read_note(request)
        self.core.leave(self._worker(asked, context), _whole(asked, "incarnation"))
        return note({})

    def _send(self, reply: Reply) -> Iterator[bytes]:
        yield note({"sequence": reply.sequence, "frames": len(reply.frames)})
        for slot, frame in enumerate(reply.frames):
            yield from frame_messages(slot, frame)
        self.traffic.count(sent=reply.nbytes)

    def _worker(self, asked: dict[str, Any], context: grpc.ServicerContext) -> int:
        """The worker that calls: what it says, and what its certificate says, must agree."""
        worker = _whole(asked, "worker")
        if self._identify is not None and self._identify(context) != worker:
            raise RefusedError("certificate", f"the certificate is not that of worker {worker}")
        return worker


def _whole(asked: dict[str, Any], name: str) -> int:
    value = asked.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise FrameError(f"a note needs a whole number {name!r}, got {value!r}")
    return value


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """From gRPC's names to methods; what goes wrong becomes a status with a line of text."""

    def __init__(self, server: Server) -> None:
        self._handlers = {
            CALLS["Hello"]: grpc.unary_unary_rpc_method_handler(_guarded(server.hello)),
            CALLS["Leave"]: grpc.unary_unary_rpc_method_handler(_guarded(server.leave)),
            CALLS["Snapshot"]: grpc.unary_stream_rpc_method_handler(_guarded_stream(server.snapshot)),
            CALLS["Exchange"]: grpc.stream_stream_rpc_method_handler(_guarded_stream(server.exchange)),
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(details.method)


def _abort(context: grpc.ServicerContext, error: Exception) -> None:
    if isinstance(error, RefusedError):
        text = json.dumps({"reason": error.reason, "message": str(error), "resume_at": error.resume_at})
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
    if isinstance(error, FrameError):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    log.exception("the server failed on a call")
    context.abort(grpc.StatusCode.INTERNAL, f"the server failed: {type(error).__name__}: {error}")


def _guarded(method: Callable[[bytes, grpc.ServicerContext], bytes]) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    def call(request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return method(request, context)
        except Exception as error:  # a call must not take the server down, nor end without a word
            _abort(context, error)
            raise

    return call


def _guarded_stream(method: Callable[[Any, grpc.ServicerContext], Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from method(request, context)
        except Exception as error:
            _abort(context, error)
            raise

    return call
