"""How fast a path is, as measured."""

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
"""A link further than this from what its rate allows is not the link that was asked for."""

Start = Callable[..., "subprocess.Popen[Any]"]


@dataclass(frozen=True)
class Link:
    """One direction of a path, measured by TCP sockets.

    Attributes:
        rate: Bits per second that were asked for, headers counted; None if unlimited.
        goodput: Bits per second of payload that arrived.
        round_trip: Seconds for 64 bytes there and back on an idle path, the median.
        congestion: The sender's congestion control: figures under another one may differ.
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
        """Whether the goodput is within 6 % of what the rate allows; always, where no rate was asked for."""
        return self.expected is None or abs(self.goodput - self.expected) <= TOLERANCE * self.expected

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "expected": self.expected, "valid": self.valid}

    def __str__(self) -> str:
        return (
            f"{show_rate(self.goodput)} of {show_rate(self.rate)}, round trip {show_time(self.round_trip)}, "
            f"{self.congestion}{'' if self.valid else ': not the rate asked for'}"
        )


def measure_path(
    near: Start, far: Start, address: str, rate: float | None, seconds: float, via: Callable[[int], tuple[str, int]]
) -> Link:
    """Measure from near to far.

    Args:
        near: Starts a process at the end that sends; takes argv and what ``subprocess.Popen`` takes.
        far: The same at the end that receives.
        address: Where the far end listens.
        rate: What was asked for, in bits per second.
        seconds: How long to measure, after a short warm-up.
        via: From the far end's port to the address that the near end connects to.
    """
    program = [sys.executable, "-I", str(Path(link_probe.__file__))]
    limit = seconds + 60
    with far([*program, "serve", address], **_PIPES) as receiver:
        try:
            assert receiver.stdout is not None
            line = receiver.stdout.readline()
            if not line.strip():
                raise LaconicError(f"the receiving end of a measurement did not start: {_said(receiver)}")
            host, port = via(int(line))
            with near([*program, "send", host, str(port), str(seconds)], **_PIPES) as sender:
                try:
                    sent = _result(sender, "sending", limit)
                finally:
                    sender.kill()
            got = _result(receiver, "receiving", limit)
        finally:
            receiver.kill()
    return Link(rate, got["goodput"], sent["round_trip"], sent["congestion"])


_PIPES: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "text": True,
}


def _result(process: subprocess.Popen[Any], what: str, limit: float) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise LaconicError(f"the {what} end of a measurement did not finish in {limit:.0f} s") from None
    if process.returncode != 0:
        raise LaconicError(f"the {what} end of a measurement failed: {_last(err)}")
    result: dict[str, Any] = json.loads(out)
    return result


def _said(process: subprocess.Popen[Any]) -> str:
    process.kill()
    return _last(process.communicate()[1])


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
