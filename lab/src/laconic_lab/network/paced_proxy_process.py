"""The process of ``laconic_lab.network.paced_proxy``; a stand-alone program.

Requests are lines of JSON on stdin, each answered by a line on stdout; the process ends with its stdin. One loop moves
all bytes. Each direction has one token bucket for all connections, which decides when bytes leave; they arrive
``delay`` later. While more bytes wait than a shaper's queue would hold, nothing is read, so that TCP itself slows the
senders.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["ProxyLoop"]

_BUFFER = 128 << 10  # of sockets; small, because bytes in a kernel buffer are not paced
_MIN_QUEUE, _MAX_QUEUE = 256 << 10, 64 << 20
_MAX_CONNECTIONS = 400
_CONNECT_S = 2.0


class _Direction:
    """The token bucket of one direction, shared by all connections."""

    def __init__(self, rate: float | None, burst: int, queue_s: float, delay: float) -> None:
        self.rate = rate  # bytes of payload per second
        self.burst_s = burst / rate if rate else 0.0
        self.queue_s, self.delay = queue_s, delay
        self.queue_limit = int(min(max(_MIN_QUEUE, 2 * rate * (queue_s + delay)), _MAX_QUEUE)) if rate else _MAX_QUEUE
        self.chunk = int(min(max(1448, rate * 0.001), 1 << 16)) if rate else 1 << 16
        self.free = 0.0
        self.nbytes = 0
        self.flips: dict[int, int] = {}

    def open_at(self, now: float) -> bool:
        return self.rate is None or self.free - now < self.queue_s

    def due(self, nbytes: int, now: float) -> float:
        """Return the arrival time of bytes that were read now."""
        if self.rate is not None:
            self.free = max(self.free, now - self.burst_s) + nbytes / self.rate
        return max(now, self.free) + self.delay

    def corrupt(self, data: bytes) -> bytes:
        """Count the bytes and flip the requested bits."""
        first, self.nbytes = self.nbytes, self.nbytes + len(data)
        affected = [byte for byte in self.flips if first <= byte < self.nbytes]
        if not affected:
            return data
        damaged = bytearray(data)
        for byte in affected:
            damaged[byte - first] ^= 1 << self.flips.pop(byte)
        return bytes(damaged)


class _Pipe:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, direction: _Direction) -> None:
        self.source, self.sink, self.direction = source, sink, direction
        self.queue: deque[tuple[float, bytes]] = deque()  # empty bytes mark the end of the stream
        self.nbytes = 0
        self.ended = self.done = False

    def can_read(self, now: float) -> bool:
        return not self.ended and self.nbytes < self.direction.queue_limit and self.direction.open_at(now)

    def read(self, now: float) -> None:
        data = self.direction.corrupt(self.source.recv(self.direction.chunk))
        self.ended = not data
        self.nbytes += len(data)
        self.queue.append((self.direction.due(len(data), now), data))

    def due(self) -> float:
        return self.queue[0][0] if self.queue else math.inf

    def write_due(self, now: float) -> None:
        while self.queue and self.queue[0][0] <= now:
            due, data = self.queue.popleft()
            if not data:
                self.done = True
                self.sink.shutdown(socket.SHUT_WR)
                return
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                sent = 0
            self.nbytes -= sent
            if sent < len(data):
                self.queue.appendleft((due, data[sent:]))
                return


class ProxyLoop:
    """The event loop: routes, connections, and the requests of the owner."""

    def __init__(self, rate: float | None, burst: int, queue_s: float, delay: float) -> None:
        self.up, self.down = (_Direction(rate, burst, queue_s, delay) for _ in range(2))
        self.routes: dict[socket.socket, tuple[str, int]] = {}
        self.pairs: list[tuple[_Pipe, _Pipe]] = []
        self.silent_until = 0.0
        self.connections = 0

    def run_once(self, control: int) -> bool:
        """Wait for events and handle them; return whether requests wait on the control descriptor."""
        now = time.monotonic()
        pipes = [pipe for pair in self.pairs for pipe in pair]
        if now < self.silent_until:
            requests, _, _ = select.select([control], [], [], self._wait([self.silent_until], now))
            return bool(requests)
        readers = {pipe.source: pipe for pipe in pipes if pipe.can_read(now)}
        writers = [pipe.sink for pipe in pipes if pipe.due() <= now]  # sinks that could not take all bytes
        times = [due for pipe in pipes if (due := pipe.due()) > now]
        # A full queue is read again as soon as it has drained.
        times += [d.free - d.queue_s for d in (self.up, self.down) if pipes and not d.open_at(now)]
        routes = self.routes if len(self.pairs) < _MAX_CONNECTIONS else {}  # select is limited to 1,024 descriptors
        watched: list[Any] = [control, *routes, *readers]
        ready, _, _ = select.select(watched, writers, [], self._wait(times, now))
        now = time.monotonic()
        for source in ready:
            if source in routes:
                self._accept(source)
            elif source in readers:
                self._act(readers[source], _Pipe.read, now)
        for pipe in pipes:
            self._act(pipe, _Pipe.write_due, now)
        for pair in [pair for pair in self.pairs if pair[0].done and pair[1].done]:
            self._close(pair, reset=False)
        return control in ready

    @staticmethod
    def _wait(times: list[float], now: float) -> float | None:
        soonest = min(times, default=math.inf)
        return None if soonest == math.inf else max(0.0, soonest - now)

    def _accept(self, listener: socket.socket) -> None:
        try:
            near, _ = listener.accept()
        except OSError:  # the client has already disconnected
            return
        try:
            far = socket.create_connection(self.routes[listener], timeout=_CONNECT_S)
        except OSError:
            _reset(near)
            return
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self.connections += 1
        self.pairs.append((_Pipe(near, far, self.up), _Pipe(far, near, self.down)))

    def _act(self, pipe: _Pipe, act: Callable[[_Pipe, float], None], now: float) -> None:
        pair = next((pair for pair in self.pairs if pipe in pair), None)
        if pair is None:  # already closed
            return
        try:
            act(pipe, now)
        except BlockingIOError:
            return
        except OSError:
            self._close(pair, reset=True)

    def _close(self, pair: tuple[_Pipe, _Pipe], reset: bool) -> None:
        self.pairs.remove(pair)
        for end in (pair[0].source, pair[0].sink):
            _reset(end) if reset else end.close()

    def route(self, host: str, port: int) -> int:
        """Listen for connections to an address; return the port."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)  # inherited by accepted sockets
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        self.routes[listener] = (host, port)
        number: int = listener.getsockname()[1]
        return number

    def handle(self, request: str, *args: Any) -> Any:
        """Carry out a request of the owner and return its answer."""
        if request == "route":
            return self.route(*args)
        if request == "silence":
            self.silent_until = math.inf if args[0] is None else time.monotonic() + args[0]
        elif request == "reset":
            for pair in list(self.pairs):
                self._close(pair, reset=True)
        elif request == "flip":
            which, byte, bit = args
            direction = self.up if which == "up" else self.down
            if byte < direction.nbytes:
                return False
            direction.flips[byte] = bit
        elif request == "counters":
            return [self.up.nbytes, self.down.nbytes, self.connections]
        return True


def _reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def main(rate: float | None, burst: int, queue_s: float, delay: float) -> None:
    loop = ProxyLoop(rate, burst, queue_s, delay)
    control, text = sys.stdin.fileno(), b""
    while True:
        if not loop.run_once(control):
            continue
        more = os.read(control, 1 << 16)
        if not more:
            return
        *lines, text = (text + more).split(b"\n")
        for line in lines:
            print(json.dumps(loop.handle(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
