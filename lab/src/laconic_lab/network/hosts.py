"""Settings and counters of a lab's host."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.errors import ConfigError
from laconic.units import parse_rate, parse_time

__all__ = ["Counters", "Host"]


@dataclass(frozen=True)
class Host:
    """A host, described by its one link to the switch. Both directions are alike.

    Args:
        rate: Rate of the link in each direction, headers included: ``"100mbit"``. None: unlimited.
        delay: Added to each packet in each direction: a round trip between two hosts with 5 ms takes 20 ms.
        loss: Percent of incoming packets that are dropped.
        jitter: Upper bound of a uniform random extra delay per packet. Packets keep their order.
        corrupt: Percent of larger packets, in both directions, in which one payload bit is flipped. TCP does not
            notice because the checksum is computed afterwards, as with a faulty network card.
    """

    rate: str | None = None
    delay: str = "0"
    loss: float = 0.0
    jitter: str = "0"
    corrupt: float = 0.0

    def __post_init__(self) -> None:
        if self.rate is not None:
            parse_rate(self.rate)
        for text in (self.delay, self.jitter):
            parse_time(text)
        for name, percent in (("loss", self.loss), ("corrupt", self.corrupt)):
            if not 0 <= percent <= 100:
                raise ConfigError(f"{name} must be a percentage from 0 to 100, got {percent}")

    @property
    def bits_per_second(self) -> float | None:
        return None if self.rate is None else parse_rate(self.rate)

    @property
    def relayed(self) -> bool:
        """Whether the link runs through the relay process that delays or corrupts packets."""
        return parse_time(self.delay) > 0 or parse_time(self.jitter) > 0 or self.corrupt > 0


@dataclass(frozen=True)
class Counters:
    """Traffic of a host's interface since the lab was built.

    The kernel passes up to 64 kB as one packet with one header and counts it so. ``rx_lost`` counts packets that the
    emulated loss dropped after they were counted as received.
    """

    rx_bytes: int
    rx_packets: int
    tx_bytes: int
    tx_packets: int
    rx_lost: int = 0
