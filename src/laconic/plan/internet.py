"""Low-communication training over the internet, on paper: replicas of different speed that come and go.

Each replica takes ``every`` local steps, then all exchange their changes. ``predict`` follows every replica through
some rounds and returns utilisation, bytes and the time to a budget of tokens. Replicas differ in speed and link; some
leave in the middle of a round, lose its work, and return after they have downloaded the model. Quality is not
predicted: see ``evidence``.

Exchanges::

    server      S shards with a link each carry the changes of all replicas, and the means back
    twoshot     each replica averages a shard for all others: (N - 1) / N of a message each way, twice
    gather      each replica uploads once and downloads the messages of all others (SparseLoCo)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from laconic.errors import ConfigError
from laconic.units import GOODPUT

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[Any, np.dtype[np.float64]]

__all__ = ["DATA_CENTRE", "EXCHANGES", "HOME", "Fleet", "Line", "LocalTraining", "Prediction", "predict"]

EXCHANGES = ("server", "twoshot", "gather")
WEIGHT_NBYTES = 2
"""Bytes of a parameter that a joining replica downloads."""


@dataclass(frozen=True)
class Line:
    """A replica's connection: bits per second each way, a round trip, and the spread of rates between replicas.

    Args:
        spread: Standard deviation of the logarithm of the rates.
    """

    up: float
    down: float
    round_trip_s: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not self.up > 0 or not self.down > 0 or self.round_trip_s < 0 or self.spread < 0:
            raise ConfigError(f"a line needs rates above 0, and a round trip and a spread of at least 0, got {self}")


HOME = Line(up=110e6, down=500e6, round_trip_s=0.05, spread=0.3)
"""Home lines as of the participants of Covenant-72B (arXiv:2603.08163), with a spread of rates by assumption."""
DATA_CENTRE = Line(up=10e9, down=10e9, round_trip_s=0.03)
"""A host in a data centre, one of many in several countries."""


@dataclass(frozen=True)
class Fleet:
    """The replicas.

    Args:
        replicas: How many there are when all are present.
        tokens_s: Tokens per second of a replica of speed 1.
        spread: Standard deviation of the logarithm of the replicas' speeds.
        stay_h: Hours after which a replica leaves, on average.
        away_s: Seconds until it returns, besides the download of the model.
        regions: Groups of replicas that exchange within first; their means then cross ``region_line``.
    """

    replicas: int
    tokens_s: float
    line: Line = HOME
    spread: float = 0.0
    stay_h: float = math.inf
    away_s: float = 0.0
    regions: int = 1
    region_line: Line = DATA_CENTRE

    def __post_init__(self) -> None:
        if self.replicas < 2 or not 1 <= self.regions <= self.replicas // 2:
            raise ConfigError(
                f"replicas must be at least 2 and regions at most half of them, got {self.replicas} and {self.regions}"
            )
        if not self.tokens_s > 0 or not self.stay_h > 0 or self.away_s < 0 or self.spread < 0:
            raise ConfigError("tokens_s and stay_h must be above 0, away_s and spread at least 0")


@dataclass(frozen=True)
class LocalTraining:
    """Local steps and their exchange.

    Args:
        every: Steps between two exchanges of a parameter.
        step_tokens: Tokens of a replica's step.
        up_bits: Bits per parameter that a replica sends.
        down_bits: Bits per parameter of the mean that it receives; ``up_bits`` by default.
        exchange: One of ``EXCHANGES``.
        servers, server_rate: For ``server``: shards, and bits per second of each one's link each way.
        fragments: Parts that are exchanged in turn.
        overlap: Steps during which an exchange may go on.
        quorum: Share of the replicas present that a round waits for. The others' work of that round is lost.
        by_time: Whether replicas take as many steps as fit into the round of the median replica, instead of all
            the same number.
    """

    every: int
    step_tokens: float
    up_bits: float
    down_bits: float | None = None
    exchange: str = "twoshot"
    servers: int = 1
    server_rate: float = 10e9
    fragments: int = 1
    overlap: int = 0
    quorum: float = 1.0
    by_time: bool = False

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ConfigError(f"exchange must be one of {', '.join(EXCHANGES)}, got {self.exchange!r}")
        if self.every < 1 or self.fragments < 1 or self.every % self.fragments:
            raise ConfigError(f"every must be a multiple of fragments, got {self.every} and {self.fragments}")
        if not 0 <= self.overlap < max(1, self.every // self.fragments) + (self.every == 1):
            raise ConfigError(f"overlap must be below {self.every // self.fragments} steps, got {self.overlap}")
        if not 0 < self.quorum <= 1 or self.servers < 1 or not self.step_tokens > 0 or not self.up_bits > 0:
            raise ConfigError("quorum must be in (0, 1], servers at least 1, step_tokens and up_bits above 0")


@dataclass(frozen=True)
class Prediction:
    """What a training would take.

    Args:
        utilisation: Share of all replicas' time in which they compute what counts.
        round_s: Seconds of a round, on average.
        exchange_s: Seconds of it in which replicas wait for the exchange.
        sent, received: Bytes of a replica in a round, on average.
        tokens_s: Tokens per second of all replicas that count.
        days: Until the budget of tokens.
        present: Share of replicas that are present, on average.
    """

    utilisation: float
    round_s: float
    exchange_s: float
    sent: float
    received: float
    tokens_s: float
    days: float
    present: float


@dataclass
class _Totals:
    seconds: float = 0.0
    computed: float = 0.0
    tokens: float = 0.0
    waiting: float = 0.0
    present: float = 0.0
    sent: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)


def predict(
    params: float, tokens: float, fleet: Fleet, training: LocalTraining, *, rounds: int = 100, seed: int = 0
) -> Prediction:
    """Follow all replicas through some rounds.

    >>> fleet = Fleet(10, tokens_s=1000.0, line=Line(1e9, 1e9))
    >>> training = LocalTraining(every=100, step_tokens=1000.0, up_bits=1.0)
    >>> found = predict(1e9, 1e9, fleet, training)
    >>> round(found.utilisation, 3), round(found.exchange_s, 2)  # 2 x 0.9 x 125 MB over 119.5 MB/s
    (0.982, 1.88)
    """
    import numpy as np

    if not params > 0 or not tokens > 0 or rounds < 1:
        raise ConfigError(f"params, tokens and rounds must be above 0, got {params}, {tokens} and {rounds}")
    rng = np.random.default_rng(seed)
    count, line = fleet.replicas, fleet.line
    slowness = rng.lognormal(0.0, fleet.spread, count)
    links = rng.lognormal(0.0, line.spread, count)
    up, down = (GOODPUT / 8 * rate * links for rate in (line.up, line.down))
    away = fleet.away_s + WEIGHT_NBYTES * params / down
    returns = np.zeros(count)
    totals = _Totals()
    for _ in range(rounds):
        here = returns <= totals.seconds
        if int(here.sum()) < 2:
            totals.seconds = float(np.sort(returns)[1])
            continue
        compute, counted_tokens = _computation(training, fleet, slowness, here)
        ends = np.sort(compute[here])
        deadline = float(ends[max(0, math.ceil(training.quorum * len(ends)) - 1)])
        counted = here & (compute <= deadline)
        sent, received, network_s = _exchange(params, fleet, training, counted, up, down)
        step_s = training.step_tokens / fleet.tokens_s
        waiting = training.fragments * max(0.0, network_s - training.overlap * step_s)
        round_s = deadline + waiting
        left = here & (rng.random(count) < -math.expm1(-round_s / 3600 / fleet.stay_h))
        useful = counted & ~left
        totals.seconds += round_s
        returns[left] = totals.seconds + away[left]
        totals.computed += float(compute[useful].sum())
        totals.tokens += float(counted_tokens[useful].sum())
        totals.waiting += waiting
        totals.present += float(here.mean())
        totals.sent.append(sent)
        totals.received.append(received)
    done = max(1, len(totals.sent))
    tokens_s = totals.tokens / totals.seconds
    return Prediction(
        totals.computed / (count * totals.seconds), totals.seconds / done, totals.waiting / done,
        sum(totals.sent) / done, sum(totals.received) / done, tokens_s,
        tokens / tokens_s / 86_400 if tokens_s else math.inf, totals.present / done,
    )  # fmt: skip


def _computation(training: LocalTraining, fleet: Fleet, slowness: Floats, here: Any) -> tuple[Floats, Floats]:
    """Return the seconds in which each replica computes in a round, and its tokens."""
    import numpy as np

    step_s = training.step_tokens / fleet.tokens_s * slowness
    if not training.by_time:
        return training.every * step_s, np.full(len(slowness), training.every * training.step_tokens)
    time = training.every * float(np.median(step_s[here]))
    steps = np.maximum(1.0, np.floor(time / step_s))
    return steps * step_s, steps * training.step_tokens


def _exchange(
    params: float, fleet: Fleet, training: LocalTraining, counted: Any, up: Floats, down: Floats
) -> tuple[float, float, float]:
    """Return the bytes that a replica sends and receives in a round, and the seconds of one fragment's exchange."""
    replicas = int(counted.sum())
    part = params / 8 / training.fragments
    pushed = part * training.up_bits
    pulled = part * (training.up_bits if training.down_bits is None else training.down_bits)
    slowest_up, slowest_down = float(up[counted].min()), float(down[counted].min())
    members = max(2, round(replicas / fleet.regions))
    if training.exchange == "server":
        server = GOODPUT / 8 * training.server_rate * training.servers
        sent, received = pushed, pulled
        seconds = max(sent / slowest_up, members * sent / server) + max(
            received / slowest_down, members * received / server
        )
    elif training.exchange == "twoshot":
        share = (members - 1) / members
        sent = received = share * (pushed + pulled)
        seconds = share * (pushed + pulled) / min(slowest_up, slowest_down)
    else:
        sent, received = pushed, (members - 1) * pushed
        seconds = sent / slowest_up + received / slowest_down
    seconds += 2 * fleet.line.round_trip_s
    if fleet.regions > 1:  # one mean of each region crosses to the others, and back
        crossing = (fleet.regions - 1) / fleet.regions * 2 * pulled
        rate = GOODPUT / 8 * min(fleet.region_line.up, fleet.region_line.down)
        seconds += crossing / rate + 2 * fleet.region_line.round_trip_s
    return training.fragments * sent, training.fragments * received, seconds
