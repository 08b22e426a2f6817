"""Server and worker processes of the benchmark: ``python -m laconic_lab.bench.cluster.roles server`` or ``worker``.

Requests are JSON lines on stdin, answered by JSON lines on stdout; the process ends with its stdin, so nothing is left
behind when its owner ends.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import asdict
from typing import Any

import grpc
import torch

from laconic.cluster import malloc, security
from laconic.cluster.client import Client
from laconic.cluster.job import Job, Slots
from laconic.cluster.protocol import GRPC_OPTIONS, Frame, frame_messages
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import Reply
from laconic.cluster.server import Server
from laconic.errors import LaconicError
from laconic_lab.bench.cluster.exchange import Exchange, Shapes, core_of, digest
from laconic_lab.bench.cluster.profiling import Marks

__all__ = ["BARE", "BareServer", "ServerRole", "WorkerRole"]

BARE = "/laconic.Bare/Exchange"


class BareServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A bare gRPC server: reads a stream of messages, drops them, and sends as many bytes back.

    Args:
        workers: Number of concurrent calls.
        messages: The messages to send back.
    """

    def __init__(self, address: str, workers: int, messages: list[bytes]) -> None:
        self._messages = messages
        self.server = grpc.server(futures.ThreadPoolExecutor(workers + 2), handlers=(self,), options=GRPC_OPTIONS)
        self.port = self.server.add_insecure_port(address)
        self.server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.stream_stream_rpc_method_handler(self._exchange) if details.method == BARE else None

    def _exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in messages:
            pass
        yield from self._messages


def _messages(frames: Sequence[Frame]) -> list[bytes]:
    return [message for slot, frame in enumerate(frames) for message in frame_messages(slot, frame)]


class ServerRole:
    """A parameter server and, beside it, a bare gRPC server."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._bare: BareServer | None = None
        self._marks: Marks | None = None

    def begin(self, job: dict[str, Any], shapes: Shapes, host: str, certs: str | None = None) -> dict[str, Any]:
        core = core_of(Job.from_json(job), shapes)
        credentials = security.load_server(certs) if certs is not None else None
        security.require_tls(host, credentials)
        if credentials is None:
            self._server = Server(core, f"{host}:0")
        else:
            name = credentials.identity.job
            self._server = Server(
                core,
                f"{host}:0",
                credentials=security.server_credentials(credentials),
                identify=lambda context: security.require_worker(context.auth_context(), name),
            )
        return {"port": self._server.port, "pid": os.getpid()}

    def bare(self, host: str, workers: int) -> dict[str, Any]:
        """Start the bare gRPC server, which sends as many bytes as an uncompressed method."""
        assert self._server is not None
        from laconic.frames import encode

        frames = [encode(x, "none") for x in self._server.core.parameters.values()]
        self._bare = BareServer(f"{host}:0", workers, _messages(frames))
        return {"port": self._bare.port}

    def mark(self) -> dict[str, Any]:
        """Start to profile the handlers."""
        self._marks = Marks()
        self._marks.install()
        return {}

    def marks(self) -> dict[str, Any]:
        assert self._marks is not None
        return {"steps": self._marks.remove(), "missing": self._marks.missing}

    def usage(self) -> dict[str, Any]:
        """Return the processor time and the minor page faults of this process."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"cpu_s": used.ru_utime + used.ru_stime, "faults": used.ru_minflt}

    def traffic(self) -> dict[str, Any]:
        assert self._server is not None
        traffic, core = self._server.traffic, self._server.core
        return {"received": traffic.received, "sent": traffic.sent, "version": core.version}

    def weights(self, numerator: int, denominator: int, gradient: list[float]) -> dict[str, Any]:
        """Check that every slot is exactly a multiple of a repeated pattern."""
        assert self._server is not None
        pattern = torch.tensor(gradient)
        wanted = pattern * (numerator / denominator)
        right = all(
            bool(torch.equal(x.reshape(-1, len(gradient)), wanted.expand(x.numel() // len(gradient), -1)))
            for x in self._server.core.parameters.values()
        )
        return {"right": right}

    def end(self) -> dict[str, Any]:
        if self._server is not None:
            self._server.stop(0)
        if self._bare is not None:
            self._bare.server.stop(0).wait()
        self._server, self._bare = None, None
        return {}


class WorkerRole:
    """A worker that exchanges without training."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._exchange: Exchange | None = None
        self._reply: Reply | None = None
        self._frames: list[Frame] = []
        self._channel: grpc.Channel | None = None

    def begin(
        self, number: int, address: str, job: dict[str, Any], shapes: Shapes, seed: int, certs: str | None = None
    ) -> dict[str, Any]:
        agreed = Job.from_json(job)
        like = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        credentials = security.load_worker(certs, number) if certs is not None else None
        security.require_tls(address, credentials)
        self._client = Client(
            address, worker=number, incarnation=1, slots=Slots.of(like), limits=agreed.pull_limits(like.values()),
            credentials=security.channel_credentials(credentials) if credentials is not None else None,
        )  # fmt: skip
        self._exchange = Exchange(number, agreed, shapes, seed)
        return {"versions": sorted(self._client.hello().versions)}

    def join(self) -> dict[str, Any]:
        """Join the job. Waits for all workers, so send this request to all before reading an answer."""
        client, _ = self._here()
        sequence, _ = client.join(1, Offer(frozenset([0])))
        return {"sequence": sequence}

    def prepare(self) -> dict[str, Any]:
        """Generate the next gradients."""
        self._here()[1].prepare()
        return {}

    def run(self) -> dict[str, Any]:
        """Exchange them."""
        client, exchange = self._here()
        took, self._reply = exchange.run(client)
        return asdict(took)

    def finish(self, check: bool = False) -> dict[str, Any]:
        """Apply the reply; return its digest if requested."""
        assert self._reply is not None
        self._here()[1].finish(self._reply)
        check_values = {"digest": digest(self._reply.frames)} if check else {}
        self._reply = None
        return check_values

    def frames(self) -> dict[str, Any]:
        """Encode frames that are pushed repeatedly."""
        exchange = self._here()[1]
        exchange.prepare()
        self._frames = exchange.frames()
        return {"nbytes": sum(map(len, self._frames))}

    def push(self, check: bool = False) -> dict[str, Any]:
        """Push ready-made frames and read the reply's frames as they arrive."""
        client, exchange = self._here()
        begin = time.monotonic()
        reply = client.exchange(exchange.sequence, _Numbered(self._frames), lambda: 0.0)
        end = time.monotonic()
        exchange.sequence = reply.sequence
        check_values = {"digest": digest(reply.frames)} if check else {}
        return {"begin": begin, "end": end, "nbytes": sum(map(len, self._frames)) + reply.nbytes, **check_values}

    def bare(self, address: str) -> dict[str, Any]:
        """Connect to the bare gRPC server."""
        self._channel = grpc.insecure_channel(address, options=GRPC_OPTIONS)
        grpc.channel_ready_future(self._channel).result(30)
        self._call = self._channel.stream_stream(BARE)
        self._messages = _messages(self._frames)
        return {}

    def push_bare(self) -> dict[str, Any]:
        """Send the same messages to the bare gRPC server."""
        begin = time.monotonic()
        received = sum(map(len, self._call(iter(self._messages), timeout=120)))
        end = time.monotonic()
        return {"begin": begin, "end": end, "nbytes": sum(map(len, self._messages)) + received}

    def traffic(self) -> dict[str, Any]:
        traffic = self._here()[0].traffic
        return {"received": traffic.received, "sent": traffic.sent}

    def end(self) -> dict[str, Any]:
        client, exchange = self._here()
        retries = client.retries
        client.leave()
        client.close()
        exchange.close()
        if self._channel is not None:
            self._channel.close()
        self._client, self._exchange, self._channel = None, None, None
        return {"retries": retries}

    def _here(self) -> tuple[Client, Exchange]:
        assert self._client is not None and self._exchange is not None
        return self._client, self._exchange


class _Numbered:
    """Slots and frames that can be iterated again after a failed push."""

    def __init__(self, frames: list[Frame]) -> None:
        self._frames = frames

    def __iter__(self) -> Iterator[tuple[int, Frame]]:
        return iter(enumerate(self._frames))


def obey(role: Any) -> None:
    """Handle the requests on stdin until it ends."""
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(role, order.pop("do"))(**order)
        except (LaconicError, grpc.RpcError, AssertionError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    malloc.keep_freed_memory()
    obey(ServerRole() if sys.argv[1] == "server" else WorkerRole())
    os._exit(0)  # do not wait for gRPC's threads
