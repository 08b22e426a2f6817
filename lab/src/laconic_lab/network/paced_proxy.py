"""A slow cable without root: a process that passes TCP connections on, at a rate, later.

The loopback twin of a lab's host, for tests and for machines where one is not root. It works on streams and not on
packets: there is no loss, setting up a connection takes no time, and while a cable is cut connections are still taken
(and nothing moves on them). Sockets of others, such as gRPC's, cannot be paced from outside, hence a process between.
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

__all__ = ["Cable", "Traffic"]

Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Traffic:
    """Bytes of payload that a cable took in each direction, and connections it opened, since it was there."""

    up_bytes: int
    down_bytes: int
    connections: int


class Cable:
    """One cable, shared by all connections through it; there as long as the ``with`` block.

    Up is from who connects to whom they connect to, down is back.

    Args:
        rate: Each way, for all connections together, ``"100mbit"``. As on a shaped cable 0.956 of it is for payload.
        delay: Added each way: a round trip takes twice as much longer.

    >>> with Cable(rate="100mbit", delay="5ms") as cable:      # doctest: +SKIP
    ...     host, port = cable.to(("127.0.0.1", 50051))        # connect there instead
    """

    def __init__(self, *, rate: str | None = None, delay: str = "0") -> None:
        self.rate = None if rate is None else parse_rate(rate)
        self.delay = parse_time(delay)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Cable:
        settings: list[Any] = [None, 0, 0.0, self.delay]
        if self.rate is not None:
            settings = [self.rate / 8 * GOODPUT, shaper_burst(self.rate), queue_time(self.rate), self.delay]
        program = [sys.executable, "-I", str(Path(__file__).with_name("paced_proxy_process.py")), json.dumps(settings)]
        # A session of its own: Ctrl-C ends the block, and the block ends the process.
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.communicate()

    def to(self, target: tuple[str, int]) -> tuple[str, int]:
        """Where to connect to reach an address by this cable."""
        host, port = target
        return "127.0.0.1", self._order("route", host, port)

    def counters(self) -> Traffic:
        return Traffic(*self._order("counters"))

    def cut(self) -> None:
        """Silence, as when a cable is pulled: nothing moves and nothing is closed, until ``mend``."""
        self._order("silence", None)

    def mend(self) -> None:
        self._order("silence", 0)

    def stall(self, seconds: float) -> None:
        """A cut that mends itself."""
        self._order("silence", seconds)

    def reset(self) -> None:
        """End all connections, as when a host crashes and is back at once: both ends get a reset."""
        self._order("reset")

    def flip(self, direction: Direction, byte: int, bit: int = 0) -> None:
        """Flip a bit of a byte that is still to come, counted as in ``counters``: 0 is the first of all."""
        if direction not in ("up", "down") or byte < 0 or not 0 <= bit <= 7:
            raise ConfigError(
                f"flip wants up or down, a byte from 0 and a bit from 0 to 7, got {direction!r}, {byte}, {bit}"
            )
        if not self._order("flip", direction, byte, bit):
            raise ConfigError(f"byte {byte} has passed already (see counters): name a later one")

    def measure(self, seconds: float = 1.5) -> Link:
        """How fast bytes go up, while nothing else is sent. What it sends is counted."""
        return measure_path(subprocess.Popen, subprocess.Popen, "127.0.0.1", self.rate, seconds, self._to_loopback)

    def _to_loopback(self, port: int) -> tuple[str, int]:
        return self.to(("127.0.0.1", port))

    def _order(self, *order: Any) -> Any:
        if self._process is None:
            raise ConfigError("a cable is there inside its `with` block only")
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise LaconicError("the process of a cable has ended; what it said is above")
        return json.loads(answer)
