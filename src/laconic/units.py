"""Units: parse and format rates, times and sizes; parameters of a traffic shaper for a rate."""

from __future__ import annotations

import math
import re

from laconic.errors import ConfigError

__all__ = [
    "GOODPUT", "MAX_RATE", "MAX_TIME", "parse_rate", "parse_size", "parse_time", "queue_time", "shaper_burst",
    "show_bytes", "show_rate", "show_time",
]  # fmt: skip

GOODPUT = 0.956
"""The payload's share of a rate: 1448 of the 1514 bytes of an Ethernet frame, without Ethernet, IP and TCP headers."""

MAX_RATE, MAX_TIME = 1e14, 1e9
"""The largest rate in bit/s, and the longest time in seconds: about 30 years."""

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SIZES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_rate(text: str) -> float:
    """Return bits per second.

    >>> parse_rate("100mbit")
    100000000.0
    """
    rate = _parse(text, _RATES, "a rate", "100mbit")
    if not 8_000 <= rate <= MAX_RATE:
        raise ConfigError(f"a rate must be from 8kbit to {MAX_RATE / 1e9:.0f}gbit, got {_shortened(text)}")
    return rate


def parse_time(text: str) -> float:
    """Return seconds.

    >>> parse_time("5ms")
    0.005
    """
    seconds = 0.0 if text.strip() == "0" else _parse(text, _TIMES, "a time", "5ms")
    if not seconds <= MAX_TIME:
        raise ConfigError(f"a time must be at most {MAX_TIME:.0f}s, got {_shortened(text)}")
    return seconds


def parse_size(text: str) -> float:
    """Return a number of bytes.

    >>> parse_size("16GiB")
    17179869184.0
    """
    size = _parse(text, _SIZES, "a size", "16gib")
    if not 0 < size < 1 << 63:
        raise ConfigError(f"a size must be above 0 and below 2^63 bytes, got {_shortened(text)}")
    return size


def _parse(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in units:
        names = ", ".join(filter(None, units))
        raise ConfigError(f"{what} is a number and one of {names}, such as {example}; got {_shortened(text)}")
    return float(match[1]) * units[match[2].lower()]


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:30]!r}… of {len(text)} characters"


def show_rate(rate: float | None) -> str:
    """Format bits per second: ``100 Mbit/s``."""
    if rate is None:
        return "unlimited"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= size:
            return f"{rate / size:.4g} {unit}"
    return f"{rate:.4g} bit/s"


def show_time(seconds: float) -> str:
    """Format seconds: ``5 ms``."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def show_bytes(nbytes: float) -> str:
    """Format a number of bytes.

    >>> show_bytes(12), show_bytes(1500), show_bytes(2.5e9)
    ('12 B', '1.5 kB', '2.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"


def shaper_burst(rate: float) -> int:
    """Return the burst of a token bucket in bytes: enough to reach the rate, too few to affect a measurement.

    Measured at 10, 100 and 1000 Mbit/s: 95.3 to 96.6, 94.9 to 95.3 and 94.4 to 95.4 % of the rate.
    """
    if rate < 3e6:
        return 8 * 1024
    if rate < 30e6:
        return 32 * 1024
    return 64 * 1024 if rate < 300e6 else 256 * 1024


def queue_time(rate: float) -> float:
    """Return the seconds that a packet may wait at a shaper before it is dropped: 50 ms, or the time of 500 kB.

    At 10 Mbit/s a queue of 50 ms overflows permanently (3,000 retransmits in 5 s); one of 400 ms does not.
    """
    return max(0.05, math.ceil(500_000 * 8 / rate * 1e3) / 1e3)
