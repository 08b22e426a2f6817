"""Times rounds of several methods over links of several rates, without training.

A round lasts from the first worker's start of encoding to the last worker's end of decoding. Each round uses new
gradients, generated beforehand; channels keep their residuals between rounds, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from laconic.errors import WrongResultError
from laconic_lab.bench.cluster.exchange import Shapes, expected, job_of
from laconic_lab.bench.cluster.processes import Network, Peer, all_do, network, started
from laconic_lab.bench.cluster.profiling import OF_FRAMES
from laconic_lab.bench.timing import quartiles
from laconic_lab.network import Link

__all__ = ["RATES", "TARGETS", "TOLERANCE", "LinkResult", "RoundResult", "measure_rate"]

RATES = ("unshaped", "1gbit", "100mbit")
TARGETS = {
    ("1", "4", "100mbit"): 7.0,
    ("1", "5", "100mbit"): 25.0,
    ("1", "laconic", "100mbit"): 100.0,
    ("3", "homomorphic", "100mbit"): 7.0,
}
"""Goals: speed-up over another method at the same rate, for the same number of iterations."""
TOLERANCE = 0.06
"""Allowed relative difference between the interface's byte count and the frames' bytes."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class LinkResult:
    """The links of one rate, measured before the rounds."""

    rate: str
    made_of: str
    links: tuple[Link, ...]

    @property
    def valid(self) -> bool:
        return all(link.valid for link in self.links)

    def values(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "made_of": self.made_of,
            "valid": self.valid,
            "links": [link.values() for link in self.links],
        }


@dataclass(frozen=True)
class RoundResult:
    """Rounds of one method at one rate.

    Args:
        method: Name of a method in ``laconic.train.methods``.
        rate: Rate of every host's link.
        parts: Median seconds of the slower worker's encoding, waiting and decoding.
        sent: Bytes of frames the workers sent in all rounds, counted where they leave.
        received: Bytes of frames the server sent.
        link_received: Bytes the server's interface received meanwhile.
        link_sent: Bytes the server's interface sent meanwhile.
        server_cpu: Processor time of the server in all rounds.
        steps: Seconds per round of each server step, from separate rounds.
        every: Training iterations per round.
    """

    method: str
    rate: str
    seconds: tuple[float, ...]
    parts: dict[str, float]
    sent: int
    received: int
    link_received: int
    link_sent: int
    server_cpu: float = 0.0
    steps: dict[str, Any] = field(default_factory=dict)
    every: int = 1

    @property
    def median(self) -> float:
        return quartiles(self.seconds)[1]

    @property
    def link_excess(self) -> float:
        """Relative excess of the interface's byte count over the frames' bytes."""
        return (self.link_received + self.link_sent) / (self.sent + self.received) - 1

    def values(self, base: RoundResult | None) -> dict[str, Any]:
        first, middle, third = quartiles(self.seconds)
        target = None if base is None else TARGETS.get((base.method, self.method, self.rate))
        return {
            "method": self.method, "rate": self.rate, "round_s": middle, "round_quartiles_s": [first, third],
            "rounds": len(self.seconds), "server_cpu_s_per_round": self.server_cpu / len(self.seconds),
            "every": self.every,
            "speed_up": None if base is None else (base.median / base.every) / (middle / self.every), "target": target,
            "sent_nbytes_per_round": self.sent / len(self.seconds),
            "received_nbytes_per_round": self.received / len(self.seconds),
            "link_nbytes_per_round": (self.link_received + self.link_sent) / len(self.seconds),
            "link_over_frames": self.link_excess, "link_agrees": abs(self.link_excess) <= TOLERANCE, **self.parts,
            **self.steps,
        }  # fmt: skip


def measure_rate(
    rate: str, methods: Sequence[str], shapes: Shapes, *, made_of: str, workers: int = 2, rounds: int, slow_rounds: int,
    threads: tuple[int, int], seed: int = 0, tell: Tell = lambda what: None,
) -> tuple[LinkResult, list[RoundResult]]:  # fmt: skip
    """Measure all methods at one rate with the same processes.

    Args:
        rate: As in ``laconic_lab.network``, or ``unshaped``.
        methods: Names of methods in ``laconic.train.methods``.
        made_of: How links are emulated.
        rounds: Timed rounds of each method.
        slow_rounds: Timed rounds where a round takes more than two seconds.
        threads: Torch threads of the server and of a worker.
    """
    with ExitStack() as stack:
        net = stack.enter_context(network(made_of, None if rate == "unshaped" else rate, workers))
        tell(f"{rate}: measuring the link")
        link = LinkResult(rate, net.made_of, tuple(net.measure()))
        server = stack.enter_context(started("server", threads[0], net.start(0)))
        peers = [stack.enter_context(started("worker", threads[1], net.start(1 + i))) for i in range(workers)]
        results = []
        for method in methods:
            tell(f"{rate}: method {method}")
            results.append(_measure_method(method, rate, shapes, net, server, peers, (rounds, slow_rounds), seed, tell))
    return link, results


def _measure_method(
    method: str, rate: str, shapes: Shapes, net: Network, server: Peer, workers: Sequence[Peer],
    rounds: tuple[int, int], seed: int, tell: Tell,
) -> RoundResult:  # fmt: skip
    job = job_of(method, len(workers))
    port = server.do("begin", job=job.to_json(), shapes=shapes, host=net.host, certs=net.certs)["port"]
    address = net.reach(port)
    for number, worker in enumerate(workers):
        worker.do("begin", number=number, address=address, job=job.to_json(), shapes=shapes, seed=seed, certs=net.certs)
    all_do(workers, "join")
    first, _, digests = _round(workers, check=True)  # also warms up
    if set(digests) != set(expected(job, shapes, seed)):
        raise WrongResultError(f"method {method} at {rate}: the reply differs from the same job in one process")
    count = rounds[1] if first > 2 else rounds[0]
    before, used, link_before = server.do("traffic"), server.do("usage"), net.counters()
    seconds, took = [], []
    for done in range(count):
        tell(f"{rate}: method {method}, round {done + 1} of {count}")
        one, parts, _ = _round(workers)
        seconds.append(one)
        took.append(parts)
    link_after, after = net.counters(), server.do("traffic")
    cpu = server.do("usage")["cpu_s"] - used["cpu_s"]
    result = RoundResult(
        method, rate, tuple(seconds), _parts(took), sent=sum(one["sent"] for parts in took for one in parts),
        received=sum(one["received"] for parts in took for one in parts), link_received=link_after[0] - link_before[0],
        link_sent=link_after[1] - link_before[1], server_cpu=cpu,
        steps=_steps(server, workers, 3) if first <= 2 else {}, every=job.every,
    )  # fmt: skip
    _check_bytes(result, before, after, f"method {method} at {rate}")
    if retries := sum(answer["retries"] for answer in all_do(workers, "end")):
        raise WrongResultError(f"method {method} at {rate}: {retries} calls were retried")
    server.do("end")
    return result


def _round(workers: Sequence[Peer], check: bool = False) -> tuple[float, list[dict[str, Any]], list[str]]:
    """Return the seconds from first start to last end, each worker's answer, and digests of the replies."""
    all_do(workers, "prepare")
    took = all_do(workers, "run")
    answer = all_do(workers, "finish", check=check)
    return (
        max(one["end"] for one in took) - min(one["begin"] for one in took),
        took,
        [one["digest"] for one in answer if check],
    )


def _parts(took: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """Return the median parts of the worker that ended last in each round."""
    last = [max(parts, key=lambda one: one["end"]) for parts in took]
    return {name: quartiles(tuple(one[name] for one in last))[1] for name in ("encode_s", "wait_s", "decode_s")}


def _steps(server: Peer, workers: Sequence[Peer], rounds: int) -> dict[str, Any]:
    server.do("mark")
    before = server.do("usage")
    for _ in range(rounds):
        _round(workers)
    after, answer = server.do("usage"), server.do("marks")
    cpu = {step: one["cpu_s"] / rounds for step, one in answer["steps"].items()}
    return {
        "server_steps_cpu_s": cpu,
        "server_frames_cpu_s": sum(cpu[step] for step in OF_FRAMES),
        "server_steps_s": {step: one["wall_s"] / rounds for step, one in answer["steps"].items()},
        "server_cpu_s": (after["cpu_s"] - before["cpu_s"]) / rounds,
        "server_faults": (after["faults"] - before["faults"]) / rounds,
    }


def _check_bytes(result: RoundResult, before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    """Raise unless the server counted exactly the bytes of the workers' frames."""
    received, sent = after["received"] - before["received"], after["sent"] - before["sent"]
    if (received, sent) != (result.sent, result.received):
        raise WrongResultError(
            f"{what}: the workers' frames are {result.sent} bytes out and {result.received} in, the server counted "
            f"{received} and {sent}"
        )
