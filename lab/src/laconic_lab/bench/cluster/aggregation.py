"""Times the server's rounds beside bare gRPC, in turns and by the same processes.

Two workers push ready-made ``none`` frames and receive the weights, as in method 1. Bare gRPC moves the same messages
up and as many bytes down without reading them. Everything runs on loopback and shares the machine's cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from laconic.errors import WrongResultError
from laconic_lab.bench.cluster.exchange import Shapes, expected, job_of, numel
from laconic_lab.bench.cluster.processes import LOOPBACK, Peer, all_do, started
from laconic_lab.bench.timing import quartiles

__all__ = ["TARGET", "AggregationResult", "measure_aggregation"]

WORKERS = 2
METHOD = "1"
TARGET = 0.75
WARM_UP, MARKED = 2, 3


@dataclass(frozen=True)
class AggregationResult:
    """Alternating rounds of the parameter server and of bare gRPC.

    Args:
        numel: Values that a worker sends.
        ours: Seconds of the server's rounds.
        bare: Seconds of bare gRPC's rounds, each right after one of ours.
        nbytes: Bytes of frames per round, both directions, all workers.
        bare_nbytes: Bytes of messages per round of bare gRPC.
        steps: Seconds per round of each server step, from separate rounds.
        marked: Median seconds of those rounds.
        usage: Processor time and fresh memory pages of the server process per round.
        bare_usage: The same for bare gRPC.
        missing: Functions that should be timed and no longer exist.
    """

    numel: int
    ours: tuple[float, ...]
    bare: tuple[float, ...]
    nbytes: int
    bare_nbytes: int
    steps: dict[str, dict[str, float]]
    marked: float
    usage: dict[str, float]
    bare_usage: dict[str, float]
    missing: tuple[str, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ratio of our throughput to bare gRPC's, round by round."""
        return tuple(
            (self.nbytes / ours) / (self.bare_nbytes / bare) for ours, bare in zip(self.ours, self.bare, strict=True)
        )

    def values(self) -> dict[str, Any]:
        ratio, ours, bare = (quartiles(samples) for samples in (self.ratios, self.ours, self.bare))
        return {
            "method": METHOD, "workers": WORKERS, "numel": self.numel, "rounds": len(self.ours),
            "nbytes_per_round": self.nbytes, "bare_nbytes_per_round": self.bare_nbytes, "round_s": ours[1],
            "round_quartiles_s": [ours[0], ours[2]], "bare_s": bare[1], "bare_quartiles_s": [bare[0], bare[2]],
            "bytes_per_s": self.nbytes / ours[1], "bare_bytes_per_s": self.bare_nbytes / bare[1], "ratio": ratio[1],
            "ratio_quartiles": [ratio[0], ratio[2]], "target": TARGET, "steps": self.steps,
            "marked_round_s": self.marked, "server_cpu_s": self.usage["cpu_s"], "server_faults": self.usage["faults"],
            "bare_server_cpu_s": self.bare_usage["cpu_s"], "bare_server_faults": self.bare_usage["faults"],
            "not_clocked": list(self.missing),
        }  # fmt: skip


def measure_aggregation(
    shapes: Shapes, *, rounds: int, threads: tuple[int, int], seed: int = 0,
    tell: Callable[[str], None] = lambda what: None,
) -> AggregationResult:  # fmt: skip
    """Check and measure the aggregation.

    Args:
        rounds: Timed rounds of each.
        threads: Torch threads of the server and of a worker.
    """
    job = job_of(METHOD, WORKERS)
    with ExitStack() as stack:
        tell("aggregation: starting")
        server = stack.enter_context(started("server", threads[0]))
        workers = [stack.enter_context(started("worker", threads[1])) for _ in range(WORKERS)]
        port = server.do("begin", job=job.to_json(), shapes=shapes, host=LOOPBACK)["port"]
        address = f"{LOOPBACK}:{port}"
        for number, worker in enumerate(workers):
            worker.do("begin", number=number, address=address, job=job.to_json(), shapes=shapes, seed=seed)
        all_do(workers, "join")
        nbytes = 2 * sum(answer["nbytes"] for answer in all_do(workers, "frames"))
        all_do(workers, "bare", address=f"{LOOPBACK}:{server.do('bare', host=LOOPBACK, workers=WORKERS)['port']}")

        answers = all_do(workers, "push", check=True)
        if {answer["digest"] for answer in answers} != set(expected(job, shapes, seed)):
            raise WrongResultError("the server's answer is not what the same job makes in one process")
        if (moved := sum(answer["nbytes"] for answer in answers)) != nbytes:
            raise WrongResultError(f"a round has {nbytes} bytes of frames, but {moved} were moved")
        _, bare_nbytes = _timed(workers, "push_bare")
        if abs(bare_nbytes - nbytes) > 0.01 * nbytes:
            raise WrongResultError(f"bare gRPC moves {bare_nbytes} bytes per round, frames have {nbytes}")
        for _ in range(WARM_UP):
            _timed(workers, "push")
            _timed(workers, "push_bare")

        ours, bare = [], []
        for done in range(rounds):
            tell(f"aggregation: round {done + 1} of {rounds}")
            ours.append(_timed(workers, "push")[0])
            bare.append(_timed(workers, "push_bare")[0])
        before = server.do("usage")
        for _ in range(MARKED):
            _timed(workers, "push_bare")
        between = server.do("usage")
        server.do("mark")
        marked = tuple(_timed(workers, "push")[0] for _ in range(MARKED))
        after, marks = server.do("usage"), server.do("marks")
        _check_traffic(server, nbytes, 1 + WARM_UP + rounds + MARKED)
        all_do(workers, "end")
        server.do("end")
    steps = {
        step: {"wall_s": one["wall_s"] / MARKED, "cpu_s": one["cpu_s"] / MARKED, "calls": one["calls"] / MARKED}
        for step, one in marks["steps"].items()
    }
    return AggregationResult(
        numel(shapes), tuple(ours), tuple(bare), nbytes, bare_nbytes, steps, quartiles(marked)[1],
        {name: (after[name] - between[name]) / MARKED for name in after},
        {name: (between[name] - before[name]) / MARKED for name in after}, tuple(marks["missing"]),
    )  # fmt: skip


def _timed(workers: Sequence[Peer], what: str) -> tuple[float, int]:
    """Return the seconds from the first start to the last end, and all bytes."""
    answer = all_do(workers, what)
    seconds = max(one["end"] for one in answer) - min(one["begin"] for one in answer)
    return seconds, sum(one["nbytes"] for one in answer)


def _check_traffic(server: Peer, nbytes: int, rounds: int) -> None:
    answer = server.do("traffic")
    if answer["received"] + answer["sent"] != rounds * nbytes or answer["version"] != rounds:
        raise WrongResultError(f"{rounds} rounds of {nbytes} bytes: the server counted {answer}")
