"""The time of one exchange, by laconic's own model.

It distinguishes push and pull, encoding, adding and decoding; links have a latency and carry payload at 0.956 of their
rate; gradients are sent while backward still computes; an exchange may follow several iterations. Topologies::

    ps          M workers and S servers with one link each. The servers' links carry the messages of all workers.
    ring        a reduce-scatter and an all-gather: 2 (M - 1) / M of a message in 2 (M - 1) steps of a round trip each,
                because gloo sends when the receiver has announced its buffer. It sends a rank's share in two parts, one
                while the other is on its way: half of the sending hides the round trips, or they hide it. Packets that
                are added need an agreement on scales before, which takes one round trip. Those of up to ``DIRECT``
                bytes do not go around the ring but from each rank to each other: one round trip, which nothing hides.
                Messages that cannot be added while compressed use two-shot instead, and the step has a note.
    twoshot     each rank receives its shard from all others, adds, encodes the mean and sends it to all others, beside
                one and a half round trips; small tensors go from each rank to each other while the shards are sent.
                Uncompressed float32 uses the ring.
    hsdp        M nodes of several ranks each, which share the node's link. Each rank exchanges its shard with the other
                nodes, as on a ring; encoding, adding and decoding are shared by the ranks of a node.
    fsdp        parameters are sharded over M ranks: a reduce-scatter of gradients by the codec, and float32 parameters
                gathered twice a step, before forward and before backward.

Ranks exchange each DDP bucket by itself, one after the other: see ``bucketed``.

Seconds are those of one exchange; ``Step.total_s`` is the share of one iteration. The formulas are in ``formulas``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from laconic.errors import ConfigError
from laconic.plan import formulas
from laconic.units import GOODPUT

__all__ = [
    "EVENLY", "TOPOLOGIES", "Message", "Network", "Ready", "Step", "Work", "bucketed", "evenly", "pipelined", "step",
]  # fmt: skip

REDUCED = ("none", "fp16", "bf16")
"""Formats that the all-reduce of every engine adds up by itself."""

TOPOLOGIES = ("ps", "ring", "twoshot", "fsdp", "hsdp")

Ready = tuple[tuple[float, float], ...]
"""How much of the gradient is computed after which part of a step: (0.5, 0.25) is a quarter after half of it."""


def evenly(pieces: int = 20, begin: float = 1 / 3) -> Ready:
    """Return gradients that come in pieces of one size between ``begin`` and the end of a step."""
    return tuple((begin + (1 - begin) * k / pieces, k / pieces) for k in range(1, pieces + 1))


EVENLY = evenly()
"""The default: backward takes twice as long as forward."""

TWO_SHOT_TRIPS = 1.5
"""Round trips of two-shot: a rank announces its buffers, receives shards in one, and sends means in the other."""
DIRECT = 1 << 20
"""Bytes that a rank sends at most if all others receive all of what is added; beyond, a ring adds it. The same as
``laconic.collective.transport.DIRECT``, which the planner does not import."""

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes of DDP's first bucket and of the others, by default."""


def bucketed(ready: Ready, numel: float) -> Ready:
    """Return when each DDP bucket of a float32 gradient can be sent: as soon as its last piece is ready.

    >>> bucketed(((0.5, 0.25), (0.75, 0.5), (1.0, 1.0)), 1e6)  # 1 MB, then the rest
    ((0.75, 0.5), (1.0, 1.0))
    """
    buckets, limit, sent = [], FIRST_BUCKET, 0.0
    for time, share in ready:
        if 4 * numel * (share - sent) >= limit or share == ready[-1][1]:
            buckets.append((time, share))
            limit, sent = BUCKET, share
            if share == ready[-1][1]:
                break
    return tuple(buckets)


@dataclass(frozen=True)
class Work:
    """A worker's computation.

    Args:
        every: Iterations between two exchanges. Above 1, nothing is sent before the last of them has ended.
        ready: When which part of the gradient is computed.
        spare_core: Whether encoding has a core of its own while the model computes.
        overlap: Steps after the exchange's start during which it may go on, if ``every`` is above 1.
    """

    step_s: float
    every: int = 1
    ready: Ready = EVENLY
    spare_core: bool = False
    overlap: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.step_s < math.inf:
            raise ConfigError(f"step_s must be finite and at least 0, got {self.step_s!r}")
        if not isinstance(self.every, int) or self.every < 1:
            raise ConfigError(f"every must be a whole number of at least 1, got {self.every!r}")
        if not 0 <= self.overlap < self.every and self.overlap:
            raise ConfigError(f"overlap must be below every, {self.every}, got {self.overlap!r}")
        times, shares = [time for time, _ in self.ready], [share for _, share in self.ready]
        if not self.ready or times != sorted(times) or shares != sorted(shares) or abs(shares[-1] - 1) > 1e-9:
            raise ConfigError("ready must rise in time and in share, up to a share of 1")

    @property
    def exchanges(self) -> int:
        """Exchanges of ranks after these iterations: one for each piece, or one after local steps."""
        return len(self.ready) if self.every == 1 else 1

    @property
    def shares(self) -> list[float]:
        """Size of each piece as a share of the gradient."""
        before = (0.0, *(share for _, share in self.ready))
        return [share - previous for previous, (_, share) in zip(before, self.ready, strict=False)]

    def encoded(self, encode_s: float) -> list[float]:
        """When each piece is encoded, from the start of the last iteration."""
        ready = [time for time, _ in self.ready]
        return formulas.encoded_times(ready, self.shares, self.step_s, self.every, self.spare_core, encode_s)

    def computed_s(self, encode_s: float) -> float:
        """When everything is computed and encoded, from the start of the last iteration."""
        return formulas.computed_s(self.step_s, self.every, self.spare_core, encode_s)

    def waited(self, encode_s: float, end: float) -> float:
        """Return when the worker goes on if an exchange ends at ``end``, from the start of the last iteration."""
        return formulas.overlapped_end(self.computed_s(encode_s), end, self.overlap * self.step_s)


@dataclass(frozen=True)
class Network:
    """Links of a known rate.

    Args:
        workers: M.
        rate: Bits per second of each worker's link, headers included.
        topology: One of ``TOPOLOGIES``.
        servers: S, for ps.
        server_rate: Bits per second of a server's link; a worker's by default.
        round_trip_s: Seconds of a round trip.
        goodput: Share of the rate that carries payload.
        byte_s: Seconds that a server (or rank) computes for each byte that it receives or sends.
        exchange_s: Seconds of an exchange that do not depend on its size; between ranks, of that of each DDP bucket.
        ranks: Ranks of a node, for hsdp.
        gathered: Bytes of all parameters, for fsdp.
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
    ranks: int = 1
    gathered: float = 0.0

    def __post_init__(self) -> None:
        for name in ("workers", "servers", "ranks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.topology not in TOPOLOGIES:
            raise ConfigError(f"topology must be one of {', '.join(TOPOLOGIES)}, got {self.topology!r}")
        if self.servers > 1 and self.topology != "ps":
            raise ConfigError(f"servers must be 1 unless the topology is ps, got {self.servers} with {self.topology}")
        if self.ranks > 1 and self.topology != "hsdp":
            raise ConfigError(f"ranks must be 1 unless the topology is hsdp, got {self.ranks} with {self.topology}")
        for name in ("rate", "server_rate", "goodput"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value!r}")
        for name in ("round_trip_s", "byte_s", "exchange_s", "gathered"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be finite and at least 0, got {value!r}")

    @property
    def adds_packets(self) -> bool:
        """Whether an all-reduce adds what can be added while compressed."""
        return self.topology in ("ring", "hsdp")

    @property
    def all_reduce_s(self) -> float:
        """Seconds in which an all-reduce waits for the network: 2 (M - 1) steps of a round trip each."""
        return 2 * (self.workers - 1) * self.round_trip_s

    @property
    def bytes_s(self) -> float:
        """Payload bytes per second of a worker's link."""
        return formulas.payload_bytes_s(self.rate, self.goodput)

    @property
    def server_bytes_s(self) -> float:
        """Payload bytes per second of a server's link."""
        return formulas.payload_bytes_s(self.server_rate or self.rate, self.goodput)

    def to_server(self, nbytes: float) -> float:
        """Return the seconds in which all workers' messages of this size pass the servers, one way."""
        return formulas.through_server_s(
            nbytes, self.workers, self.servers, self.bytes_s, self.server_bytes_s, self.byte_s
        )

    def between_ranks(self, nbytes: float) -> float:
        """Return the seconds in which each rank sends so many bytes."""
        return formulas.through_server_s(nbytes, 1, 1, self.bytes_s, self.bytes_s, self.byte_s)


@dataclass(frozen=True)
class Message:
    """A model's gradient after encoding, and the time that takes.

    Args:
        push: Bytes that a worker sends.
        pull: Bytes of the reply: the mean, encoded again, or the sum.
        encode_s: Seconds in which a worker encodes it.
        decode_s: Seconds in which a worker decodes the reply (and applies it, where that was measured with it).
        add_s: Seconds to add one message to a sum.
        summable: Whether messages are added without decoding; then nothing is encoded again.
        memory: Bytes that a worker needs for it, besides model and optimizer.
        server_encode_s: Seconds in which a server encodes the mean; a worker's by default.
        server_step_s: Seconds of the server's optimizer step, before the last of the reply is sent; likewise.
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

    def part(self, share: float) -> Message:
        """Return the message of a share of the slots. Memory is that of the whole message."""
        encode_s, step_s = self.at_server
        return replace(
            self, push=share * self.push, pull=share * self.pull, encode_s=share * self.encode_s,
            decode_s=share * self.decode_s, add_s=share * self.add_s, server_encode_s=share * encode_s,
            server_step_s=share * step_s,
        )  # fmt: skip

    def shared_by(self, ranks: int) -> Message:
        """Return the message of a node whose ranks encode, add and decode a share each, at the same time."""
        return replace(self, encode_s=self.encode_s / ranks, decode_s=self.decode_s / ranks, add_s=self.add_s / ranks)

    def slower(self, factor: float) -> Message:
        """Return the message of workers that share cores. The server is not slower: it computes while they wait."""
        encode_s, step_s = self.at_server
        return replace(
            self, encode_s=self.encode_s * factor, decode_s=self.decode_s * factor, server_encode_s=encode_s,
            server_step_s=step_s,
        )  # fmt: skip

    @property
    def at_server(self) -> tuple[float, float]:
        """Seconds in which a server encodes the reply, and takes the optimizer step."""
        encode_s = self.encode_s if self.server_encode_s is None else self.server_encode_s
        step_s = self.decode_s if self.server_step_s is None else self.server_step_s
        return (0.0, 0.0) if self.summable else (encode_s, step_s)


@dataclass(frozen=True)
class Step:
    """Seconds of one exchange and the ``every`` iterations before it.

    ``push_s`` and ``pull_s`` are the seconds in which links are busy; ``hidden_s`` is the part of everything that
    happens while the model computes, or while round trips pass. So the parts add up to more than the whole, by
    ``hidden_s``.
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
        """Seconds from one exchange to the next."""
        parts = self.compute_s + self.encode_s + self.push_s + self.aggregate_s + self.pull_s + self.decode_s
        return parts + self.fixed_s - self.hidden_s

    @property
    def total_s(self) -> float:
        """Seconds of one iteration."""
        return self.exchange_s / self.every


def pipelined(
    work: Work, encode_s: float, out_s: float, back_s: float = 0.0, each_s: float = 0.0, wait_s: float = 0.0
) -> float:
    """Return when the last piece has been exchanged, from the start of the last iteration.

    Args:
        out_s: Seconds in which the first half of the exchange passes a link; ``back_s``: the second half.
        each_s: Seconds of the exchange of a piece that do not depend on its size.
        wait_s: Seconds of a piece's round trips, which pass while its first half is sent.
    """
    encoded, shares, computed = work.encoded(encode_s), work.shares, work.computed_s(encode_s)
    if work.every > 1:  # all pieces are exchanged at once
        sent = formulas.exchanged(encoded, shares, out_s, back_s, 0.0, 0.0)[-1]
        return max(computed, sent) + each_s + max(0.0, wait_s - out_s)
    return max(computed, formulas.exchanged(encoded, shares, out_s, back_s, each_s, wait_s)[-1])


def step(work: Work, network: Network, message: Message) -> Step:
    """Return the time of an exchange of this message.

    >>> network = Network(workers=4, rate=1e9, goodput=1.0)  # 125 MB/s
    >>> round(step(Work(0.5, every=2), network, Message("none", push=25e6, pull=25e6)).exchange_s, 9)
    2.456
    """
    if network.workers == 1:
        return Step(work.every, work.every * work.step_s, note="one worker has no one to exchange with")
    if network.topology == "ps":
        return _parameter_server(work, network, message)
    if network.topology == "fsdp":
        return _sharded(work, network, message)
    if network.topology == "hsdp":
        message = message.shared_by(network.ranks)
    if message.codec == "none" or (network.adds_packets and message.summable):
        return _ring(work, network, message)
    note = "its packets cannot be added while compressed: two-shot" if network.adds_packets else ""
    return replace(_two_shot(work, network, message), note=note)


def _step(work: Work, end: float, parts: Sequence[float]) -> Step:
    """Return a step from the seconds of its parts and its end, counted from the start of the last iteration."""
    encode_s, push_s, aggregate_s, pull_s, decode_s, fixed_s = parts
    hidden_s = work.step_s + sum(parts) - end
    compute_s = work.every * work.step_s
    return Step(work.every, compute_s, encode_s, push_s, aggregate_s, pull_s, decode_s, fixed_s, hidden_s)


def _parameter_server(work: Work, network: Network, message: Message) -> Step:
    push_s, pull_s = network.to_server(message.push), network.to_server(message.pull)
    add_s = network.workers * message.add_s / network.servers
    encode_s, step_s = (seconds / network.servers for seconds in message.at_server)
    fixed_s = network.exchange_s + network.round_trip_s
    end = formulas.server_exchange_end(
        work.encoded(message.encode_s), work.shares, work.computed_s(message.encode_s), network.workers, push_s, add_s,
        encode_s, step_s, pull_s, message.pull / network.bytes_s, message.summable,
    )  # fmt: skip
    parts = [message.encode_s, push_s, add_s + encode_s + step_s, pull_s, message.decode_s, fixed_s]
    return _step(work, work.waited(message.encode_s, end + fixed_s) + message.decode_s, parts)


def _ring(work: Work, network: Network, message: Message) -> Step:
    others = network.workers - 1
    out_s = back_s = network.between_ranks(others / network.workers * message.push)
    each_s, wait_s = network.exchange_s, network.all_reduce_s
    if message.codec not in REDUCED:
        each_s += network.round_trip_s
    largest = max(work.shares) if work.every == 1 else 1.0
    if message.codec != "none" and others * message.push * largest <= DIRECT:
        out_s, back_s = network.between_ranks(others * message.push), 0.0
        each_s, wait_s = each_s + network.round_trip_s, 0.0
    add_s = others / network.workers * message.add_s
    end = work.waited(message.encode_s, pipelined(work, message.encode_s, out_s, back_s, each_s, wait_s) + add_s)
    fixed_s = (each_s + wait_s) * work.exchanges
    return _step(work, end + message.decode_s, [message.encode_s, out_s, add_s, back_s, message.decode_s, fixed_s])


def _sharded(work: Work, network: Network, message: Message) -> Step:
    share = (network.workers - 1) / network.workers
    push_s, gather_s = network.between_ranks(share * message.push), 2 * network.between_ranks(share * network.gathered)
    decode_s = message.decode_s / network.workers  # a rank decodes and updates its shard
    fixed_s = network.exchange_s + 3 * network.round_trip_s / 2
    # Parameters are gathered while other layers compute, but they share the link with the gradients.
    end = max(pipelined(work, message.encode_s, push_s), gather_s + push_s) + message.add_s + fixed_s
    return _step(work, end + decode_s, [message.encode_s, push_s, message.add_s, gather_s, decode_s, fixed_s])


def _two_shot(work: Work, network: Network, message: Message) -> Step:
    share = (network.workers - 1) / network.workers
    push_s, pull_s = network.between_ranks(share * message.push), network.between_ranks(share * message.pull)
    # A rank adds its shard of all messages, one message in total, and encodes the mean of its shard.
    add_s = message.add_s + (0.0 if message.summable else message.encode_s / network.workers)
    each_s = network.exchange_s + TWO_SHOT_TRIPS * network.round_trip_s
    end = work.waited(message.encode_s, pipelined(work, message.encode_s, push_s, pull_s, each_s) + add_s)
    fixed_s = each_s * work.exchanges
    return _step(work, end + message.decode_s, [message.encode_s, push_s, add_s, pull_s, message.decode_s, fixed_s])
