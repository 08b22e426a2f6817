"""A TCP proxy that emulates a slow link on loopback; needs no root.

The proxy works on streams, not on packets: there is no loss, connection set-up is not delayed, and while the link is
cut connections are still accepted but nothing moves on them. gRPC's sockets cannot be paced from outside, hence a
proxy process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from laconic.errors import ConfigError, LaconicError
from laconic.units import GOODPUT, parse_rate, parse_time, queue_time, shaper_burst
from laconic_lab.network.link import Link, measure_path

__all__ = ["PacedProxy", "ProxyCounters"]

Direction = Literal["up", "down"]


@dataclass(frozen=True)
class ProxyCounters:
    """Payload bytes in each direction and connections opened since the proxy started."""

    up_bytes: int
    down_bytes: int
    connections: int


class PacedProxy:
    """An emulated link, shared by all connections through it, for the duration of a ``with`` block.

    Up is the direction from client to server, down is the way back.

    Args:
        rate: Rate in each direction for all connections together, ``"100mbit"``; 0.956 of it is payload.
        delay: Added in each direction.

    >>> with PacedProxy(rate="100mbit", delay="5ms") as proxy:      # doctest: +SKIP
    ...     host, port = proxy.address_of(("127.0.0.1", 50051))     # connect there instead
    """

    def __init__(self, *, rate: str | None = None, delay: str = "0") -> None:
        self.rate = None if rate is None else parse_rate(rate)
        self.delay = parse_time(delay)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> PacedProxy:
        settings: list[Any] = [None, 0, 0.0, self.delay]
        if self.rate is not None:
            settings = [self.rate / 8 * GOODPUT, shaper_burst(self.rate), queue_time(self.rate), self.delay]
        program = [sys.executable, "-I", str(Path(__file__).with_name("paced_proxy_process.py")), json.dumps(settings)]
        # In a new session: Ctrl-C ends the block, and the block ends the process.
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.communicate()

    def address_of(self, target: tuple[str, int]) -> tuple[str, int]:
        """Return the address to connect to in order to reach a target through this proxy."""
        host, port = target
        return "127.0.0.1", self._request("route", host, port)

    def counters(self) -> ProxyCounters:
        return ProxyCounters(*self._request("counters"))

    def cut(self) -> None:
        """Stop all traffic without closing connections, until ``mend``."""
        self._request("silence", None)

    def mend(self) -> None:
        self._request("silence", 0)

    def stall(self, seconds: float) -> None:
        """Cut the link for some seconds."""
        self._request("silence", seconds)

    def reset(self) -> None:
        """Reset all connections at both ends, as when a host crashes and restarts at once."""
        self._request("reset")

    def flip(self, direction: Direction, byte: int, bit: int = 0) -> None:
        """Flip a bit of a future byte, counted as in ``counters`` from 0."""
        if direction not in ("up", "down") or byte < 0 or not 0 <= bit <= 7:
            raise ConfigError(
                f"flip needs up or down, a byte >= 0 and a bit from 0 to 7, got {direction!r}, {byte}, {bit}"
            )
        if not self._request("flip", direction, byte, bit):
            raise ConfigError(f"byte {byte} has already passed (see counters): choose a later one")

    def measure(self, seconds: float = 1.5) -> Link:
        """Measure the upward direction; nothing else should be sent meanwhile. The counters include the measurement."""
        return measure_path(subprocess.Popen, subprocess.Popen, "127.0.0.1", self.rate, seconds, self._loopback_address)

    def _loopback_address(self, port: int) -> tuple[str, int]:
        return self.address_of(("127.0.0.1", port))

    def _request(self, *request: Any) -> Any:
        if self._process is None:
            raise ConfigError("a proxy runs inside its `with` block only")
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise LaconicError("the proxy process has ended; its error output is above")
        return json.loads(answer)
