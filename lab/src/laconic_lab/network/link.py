"""Measured links: rate, goodput and round-trip time of one path."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laconic import link_probe
from laconic.errors import LaconicError
from laconic.units import GOODPUT, show_rate, show_time

__all__ = ["TOLERANCE", "Link", "measure_path"]

TOLERANCE = 0.06
"""Largest relative deviation from the expected goodput at which a link is valid."""

Start = Callable[..., "subprocess.Popen[Any]"]


@dataclass(frozen=True)
class Link:
    """One direction of a path, measured by TCP sockets.

    Attributes:
        rate: Requested bits per second, headers included; None if unlimited.
        goodput: Bits per second of payload that arrived.
        round_trip: Median round-trip time of 64 bytes on the idle path, in seconds.
        congestion: The sender's congestion control; another one may give other figures.
    """

    rate: float | None
    goodput: float
    round_trip: float
    congestion: str

    @property
    def expected(self) -> float | None:
        """The goodput that the rate allows."""
        return None if self.rate is None else GOODPUT * self.rate

    @property
    def valid(self) -> bool:
        """Whether the goodput is within ``TOLERANCE`` of what the rate allows; always true without a rate."""
        return self.expected is None or abs(self.goodput - self.expected) <= TOLERANCE * self.expected

    def values(self) -> dict[str, Any]:
        return {**asdict(self), "expected": self.expected, "valid": self.valid}

    def __str__(self) -> str:
        return (
            f"{show_rate(self.goodput)} of {show_rate(self.rate)}, round trip {show_time(self.round_trip)}, "
            f"{self.congestion}{'' if self.valid else ': not the requested rate'}"
        )


def measure_path(
    near: Start, far: Start, address: str, rate: float | None, seconds: float, via: Callable[[int], tuple[str, int]]
) -> Link:
    """Measure the path from the near end to the far end.

    Args:
        near: Starts a process at the sending end, with the signature of ``subprocess.Popen``.
        far: Starts a process at the receiving end.
        address: Address on which the far end listens.
        rate: Requested rate in bits per second.
        seconds: How long to measure, after a short warm-up.
        via: Maps the far end's port to the address that the near end connects to.
    """
    program = [sys.executable, "-I", str(Path(link_probe.__file__))]
    limit = seconds + 60
    with far([*program, "serve", address], **_PIPES) as receiver:
        try:
            assert receiver.stdout is not None
            line = receiver.stdout.readline()
            if not line.strip():
                raise LaconicError(f"the receiving end of a measurement did not start: {_stderr_of(receiver)}")
            host, port = via(int(line))
            with near([*program, "send", host, str(port), str(seconds)], **_PIPES) as sender:
                try:
                    sent = _result(sender, "sending", limit)
                finally:
                    sender.kill()
            received = _result(receiver, "receiving", limit)
        finally:
            receiver.kill()
    return Link(rate, received["goodput"], sent["round_trip"], sent["congestion"])


_PIPES: dict[str, Any] = {
    "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True,
}  # fmt: skip


def _result(process: subprocess.Popen[Any], end: str, limit: float) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise LaconicError(f"the {end} end of a measurement did not finish in {limit:.0f} s") from None
    if process.returncode != 0:
        raise LaconicError(f"the {end} end of a measurement failed: {_last(err)}")
    result: dict[str, Any] = json.loads(out)
    return result


def _stderr_of(process: subprocess.Popen[Any]) -> str:
    process.kill()
    return _last(process.communicate()[1])


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no error output"])[-1]
