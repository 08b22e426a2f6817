"""What a host of a lab is like, as data."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.errors import ConfigError
from laconic.units import parse_rate, parse_time

__all__ = ["Counters", "Host"]


@dataclass(frozen=True)
class Host:
    """A host, by its one cable to the switch. Both directions are alike.

    Args:
        rate: Of the cable, each way, headers counted: ``"100mbit"``. None: as fast as the machine can.
        delay: Added to each packet on its way out, and again on its way in: a round trip between two hosts of 5 ms
            takes 20 ms.
        loss: Percent of the packets it should receive that are dropped.
        jitter: At most so much more delay, drawn anew for each packet, evenly. Packets keep their order.
        corrupt: Percent of larger packets, out and in, in which one bit of the payload is flipped. TCP does not
            notice: the checksum is added later, as with a bad network card.
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
                raise ConfigError(f"{name} is in percent, from 0 to 100, got {percent}")

    @property
    def bits_per_second(self) -> float | None:
        return None if self.rate is None else parse_rate(self.rate)

    @property
    def relayed(self) -> bool:
        """Whether its cable runs through a process that holds packets back."""
        return parse_time(self.delay) > 0 or parse_time(self.jitter) > 0 or self.corrupt > 0


@dataclass(frozen=True)
class Counters:
    """What passed a host's interface since the lab is up.

    The kernel hands on up to 64 kB at once and counts that as one packet with one header; ``rx_lost`` is what loss
    took after it was counted as received.
    """

    rx_bytes: int
    rx_packets: int
    tx_bytes: int
    tx_packets: int
    rx_lost: int = 0
