"""What an exchange takes: laconic's own model, beside the paper's.

Push and pull are apart, and so are encoding, adding and decoding; links have a latency, and 0.956 of their rate; what
can be sent while backward still computes is; and an exchange may come after several iterations. Four topologies::

    ps          M workers and S servers, each with one cable. Servers' cables carry everybody's messages
    ring        a reduce-scatter and an all-gather: 2 (M - 1) / M of a message, 2 (M - 1) times half a round trip.
                Messages that cannot be added while compressed take the two-shot way instead, and say so
    twoshot     everybody sends each rank its part, which adds and encodes it again and sends it to everybody;
                float32 as it is goes around as before

Seconds are of one exchange; ``Step.total_s`` is an iteration's share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from laconic.errors import ConfigError
from laconic.units import GOODPUT

__all__ = [
    "EVENLY",
    "TOPOLOGIES",
    "Message",
    "Network",
    "Step",
    "Work",
    "evenly",
    "pieces",
    "pipelined",
    "served",
    "step",
]

TOPOLOGIES = ("ps", "ring", "twoshot")

Ready = tuple[tuple[float, float], ...]
"""Of a step, how much of the gradient is there after which part of it: (0.5, 0.25) is a quarter after half of it."""


def evenly(pieces: int = 20, begin: float = 1 / 3) -> Ready:
    """Gradients that come in pieces of one size between ``begin`` and the end of a step."""
    return tuple((begin + (1 - begin) * k / pieces, k / pieces) for k in range(1, pieces + 1))


EVENLY = evenly()
"""Backward takes twice as long as forward."""


@dataclass(frozen=True)
class Work:
    """A worker's computation.

    Args:
        step_s: Seconds of one iteration.
        every: Iterations between two exchanges. With more than one nothing is sent before the last has ended.
        ready: When gradients are there.
        spare: Whether a core is free for encoding while the model computes.
    """

    step_s: float
    every: int = 1
    ready: Ready = EVENLY
    spare: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.step_s < math.inf:
            raise ConfigError(f"step time must be a finite number of seconds, not below 0, got {self.step_s!r}")
        if not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"every must be a whole number, at least 1, got {self.every!r}")
        times, shares = [t for t, _ in self.ready], [f for _, f in self.ready]
        if not self.ready or times != sorted(times) or shares != sorted(shares) or abs(shares[-1] - 1) > 1e-9:
            raise ConfigError("ready must rise, in time and in share, up to a share of 1")


@dataclass(frozen=True)
class Network:
    """Cables of a known rate.

    Args:
        workers: M.
        rate: Bits per second of each worker's cable, headers counted.
        topology: Of ``TOPOLOGIES``.
        servers: S, with ps.
        server_rate: Of a server's cable; a worker's by default.
        round_trip_s: There and back.
        goodput: What of the rate is left for payload.
        byte_s: Seconds that a server (or rank) computes for each byte that it takes or gives.
        exchange_s: Seconds that an exchange takes whatever it carries.
    """

    workers: int
    rate: float
    topology: str = "ps"
    servers: int = 1
    server_rate: float | None = None
    round_trip_s: float = 0.0
    goodput: float = GOODPUT
    byte_s: float = 0.0
    exchange_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("workers", "servers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number, at least 1, got {value!r}")
        if self.topology not in TOPOLOGIES:
            raise ConfigError(f"unknown topology {self.topology!r}: take one of {', '.join(TOPOLOGIES)}")
        if self.servers > 1 and self.topology != "ps":
            raise ConfigError(f"several servers are for topology ps, got {self.topology!r}")
        for name in ("rate", "server_rate", "goodput"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value!r}")
        for name in ("round_trip_s", "byte_s", "exchange_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be a finite number, not below 0, got {value!r}")

    @property
    def bytes_s(self) -> float:
        """Payload per second of a worker's cable."""
        return self.rate * self.goodput / 8

    @property
    def server_bytes_s(self) -> float:
        return (self.server_rate or self.rate) * self.goodput / 8

    def to_server(self, nbytes: float) -> float:
        """Seconds until all workers' messages of this size have passed, be it up or down."""
        load = self.workers * nbytes / self.servers
        return max(nbytes / self.bytes_s, load / self.server_bytes_s, load * self.byte_s)

    def between(self, nbytes: float) -> float:
        """Seconds in which each rank sends that much."""
        return max(nbytes / self.bytes_s, nbytes * self.byte_s)


@dataclass(frozen=True)
class Message:
    """What a codec makes of a model's gradient.

    Args:
        codec: Its spec.
        push: Bytes that a worker sends.
        pull: Bytes that come back: of the mean, encoded again; or of the sum.
        encode_s: Seconds for a worker to make it.
        decode_s: Seconds to read it (and to take the step, where that was measured with it).
        add_s: Seconds to add one to a sum.
        summable: Whether that is done without decoding; then nothing is encoded again.
        memory: Bytes that it needs on a worker, beside model and optimizer.
        server_encode_s: Seconds in which a server encodes the mean; a worker's by default.
        server_step_s: Seconds of its own step, without which the last of the answer is not sent; likewise.
    """

    codec: str
    push: float
    pull: float
    encode_s: float = 0.0
    decode_s: float = 0.0
    add_s: float = 0.0
    summable: bool = False
    memory: float = 0.0
    server_encode_s: float | None = None
    server_step_s: float | None = None

    def slower(self, factor: float) -> Message:
        """The same where workers share cores and take longer; a server computes while they wait."""
        return replace(
            self,
            encode_s=self.encode_s * factor,
            decode_s=self.decode_s * factor,
            server_encode_s=self.at_server[0],
            server_step_s=self.at_server[1],
        )

    @property
    def at_server(self) -> tuple[float, float]:
        """Seconds in which it makes the answer, and takes the step that workers take."""
        encode_s = self.encode_s if self.server_encode_s is None else self.server_encode_s
        step_s = self.decode_s if self.server_step_s is None else self.server_step_s
        return (0.0, 0.0) if self.summable else (encode_s, step_s)


@dataclass(frozen=True)
class Step:
    """One exchange, in seconds; with ``every`` iterations before it.

    ``push_s`` and ``pull_s`` are what cables are busy for, ``hidden_s`` what of all that happens while the model
    computes. So the parts add up to more than the whole by as much as is hidden.
    """

    every: int
    compute_s: float
    encode_s: float = 0.0
    push_s: float = 0.0
    aggregate_s: float = 0.0
    pull_s: float = 0.0
    decode_s: float = 0.0
    fixed_s: float = 0.0
    hidden_s: float = 0.0
    note: str = field(default="", compare=False)

    @property
    def exchange_s(self) -> float:
        parts = self.compute_s + self.encode_s + self.push_s + self.aggregate_s + self.pull_s + self.decode_s
        return parts + self.fixed_s - self.hidden_s

    @property
    def total_s(self) -> float:
        """Of one iteration."""
        return self.exchange_s / self.every


def served(times: Sequence[float], shares: Sequence[float], seconds: float) -> list[float]:
    """When pieces that come at these times have passed a stage, one after the other, that takes so long for all.

    >>> served([0.0, 1.0, 4.0], [0.5, 0.25, 0.25], 4.0)
    [2.0, 3.0, 5.0]
    """
    found, free = [], 0.0
    for time, share in zip(times, shares, strict=True):
        free = max(free, time) + share * seconds
        found.append(free)
    return found


def pieces(work: Work, encode_s: float) -> tuple[list[float], list[float]]:
    """When pieces of a message are encoded, from the beginning of the last iteration, and what share each is."""
    shares, before = [], 0.0
    for _, share in work.ready:
        shares.append(share - before)
        before = share
    if work.every > 1:
        return served([work.step_s] * len(shares), shares, encode_s), shares
    if work.spare:
        return served([time * work.step_s for time, _ in work.ready], shares, encode_s), shares
    whole = work.step_s + encode_s  # there is one core for both
    return [time * whole for time, _ in work.ready], shares


def _all_computed(work: Work, encode_s: float) -> float:
    """A step has ended no sooner than this, whatever was sent."""
    return work.step_s + (0.0 if work.spare and work.every == 1 else encode_s)


def pipelined(work: Work, encode_s: float, send_s: float) -> float:
    """When the last byte has left, from the beginning of the last iteration."""
    times, shares = pieces(work, encode_s)
    return max(_all_computed(work, encode_s), served(times, shares, send_s)[-1])


def step(work: Work, network: Network, message: Message) -> Step:
    """What an exchange of this message takes.

    >>> network = Network(workers=4, rate=1e9, goodput=1.0)  # 125 MB/s
    >>> round(step(Work(0.5, every=2), network, Message("none", push=25e6, pull=25e6)).exchange_s, 9)
    2.6
    """
    compute = work.every * work.step_s
    if network.workers == 1:
        return Step(work.every, compute, note="one worker has nobody to exchange with")
    if network.topology == "ps":
        return _through_servers(work, network, message, compute)
    if message.codec == "none" or (network.topology == "ring" and message.summable):
        return _around(work, network, message, compute)
    note = "its packets cannot be added while compressed: two-shot" if network.topology == "ring" else ""
    return replace(_two_shot(work, network, message, compute), note=note)


def _parts(work: Work, compute: float, end: float, parts: Sequence[float]) -> Step:
    """Of what is known to take so long, and the end, counted from the beginning of the last iteration."""
    encode_s, push_s, aggregate_s, pull_s, decode_s, fixed_s = parts
    hidden_s = work.step_s + sum(parts) - end
    return Step(work.every, compute, encode_s, push_s, aggregate_s, pull_s, decode_s, fixed_s, hidden_s)


def _through_servers(work: Work, network: Network, message: Message, compute: float) -> Step:
    push, pull = network.to_server(message.push), network.to_server(message.pull)
    adding = network.workers * message.add_s / network.servers
    encode_s, step_s = (seconds / network.servers for seconds in message.at_server)
    fixed = network.exchange_s + network.round_trip_s
    times, shares = pieces(work, message.encode_s)
    there = served(times, shares, push)
    if message.summable:  # each slot is added while others still arrive, and answered at once
        end = served(served(there, shares, adding), shares, pull)[-1]
    else:  # all is added when all is there; slots are answered from the first layer on
        begin, back = max(there[-1], _all_computed(work, message.encode_s)) + adding, shares[::-1]
        made = served([begin] * len(back), back, encode_s)
        made[-1] += step_s
        end = served(made, back, pull)[-1]
    end = max(end, _all_computed(work, message.encode_s)) + message.decode_s + fixed
    return _parts(
        work, compute, end, [message.encode_s, push, adding + encode_s + step_s, pull, message.decode_s, fixed]
    )


def _around(work: Work, network: Network, message: Message, compute: float) -> Step:
    share = (network.workers - 1) / network.workers
    once, adding = network.between(share * message.push), share * message.add_s
    fixed = network.exchange_s + (network.workers - 1) * network.round_trip_s
    end = pipelined(work, message.encode_s, 2 * once) + adding + message.decode_s + fixed
    return _parts(work, compute, end, [message.encode_s, once, adding, once, message.decode_s, fixed])


def _two_shot(work: Work, network: Network, message: Message, compute: float) -> Step:
    share = (network.workers - 1) / network.workers
    once, back = network.between(share * message.push), network.between(share * message.pull)
    # A rank adds the parts of all, which are one message together, and encodes its own part again.
    adding = message.add_s + (0.0 if message.summable else message.encode_s / network.workers)
    fixed = network.exchange_s + network.round_trip_s
    end = pipelined(work, message.encode_s, once + back) + adding + message.decode_s + fixed
    return _parts(work, compute, end, [message.encode_s, once, adding, back, message.decode_s, fixed])
