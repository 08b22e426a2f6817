"""Load test: many clients at one server; measures fairness, latency and the server's memory.

The clients (``plain_client``) implement the protocol without torch or laconic: threads of a few processes, each with
its own connection, each pushing as soon as its last push is answered, in mode ``async``. Gradients are small integers
and the learning rate is a power of two, so the final weights must be the exact sum of all pushes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic._version import __version__
from laconic.cluster.job import Job, Slots
from laconic.errors import LaconicError, WrongResultError
from laconic.frames import encode
from laconic_lab.bench.cluster.exchange import Shapes
from laconic_lab.bench.cluster.processes import LOOPBACK, started

__all__ = ["FLAT", "TAIL", "LoadResult", "Sample", "measure_load", "slope"]

SHAPES: Shapes = {"w": [500, 500]}
"""A million bytes of float32."""
PATTERN = [1.0, -2.0, 0.0, 3.0, -1.0]
RATE = 2.0**-10
TAIL = 2.0
"""Goal: 99th percentile of the latency in multiples of the median."""
FLAT = 0.05
"""Goal: relative growth of memory over a run."""
EVERY = 0.25


@dataclass(frozen=True)
class Sample:
    """Memory and open files of the server process at one time."""

    at: float
    rss: int
    descriptors: int

    @classmethod
    def of(cls, pid: int, at: float) -> Sample:
        status = Path(f"/proc/{pid}/status").read_text()
        rss = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
        return cls(at, rss, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))


def slope(samples: list[tuple[float, float]]) -> float:
    """Return the change of a value over its run by a least-squares line, relative to its mean.

    >>> slope([(0, 99.0), (1, 100.0), (2, 101.0)])
    0.02
    """
    count = len(samples)
    if count < 2:
        return 0.0
    mean_at, mean = sum(at for at, _ in samples) / count, sum(value for _, value in samples) / count
    spread = sum((at - mean_at) ** 2 for at, _ in samples)
    per_second = sum((at - mean_at) * (value - mean) for at, value in samples) / spread if spread else 0.0
    return per_second * (samples[-1][0] - samples[0][0]) / mean if mean else 0.0


@dataclass(frozen=True)
class LoadResult:
    """Measurements of the clients and of the server process.

    Args:
        processes: Processes that the clients are threads of.
        nbytes: Bytes of a push's frame; the reply is as large.
        acknowledged: Sorted latencies from the start of a push to the last byte of its reply.
        least: Smallest number of answered pushes of a client.
        most: Largest number of answered pushes of a client.
        samples: Memory and file descriptors over time.
    """

    clients: int
    processes: int
    seconds: float
    nbytes: int
    acknowledged: tuple[float, ...]
    least: int
    most: int
    errors: tuple[str, ...]
    samples: tuple[Sample, ...]

    def percentile(self, percent: float) -> float:
        return self.acknowledged[min(len(self.acknowledged) - 1, int(percent / 100 * len(self.acknowledged)))]

    @property
    def tail(self) -> float:
        return self.percentile(99) / self.percentile(50)

    @property
    def after_warm_up(self) -> list[Sample]:
        """Samples after the warm-up: a third of the time, at most ten seconds."""
        return [sample for sample in self.samples if sample.at >= min(10.0, self.seconds / 3)]

    @property
    def rss_slope(self) -> float:
        return slope([(sample.at, float(sample.rss)) for sample in self.after_warm_up])

    @property
    def descriptor_slope(self) -> float:
        return slope([(sample.at, float(sample.descriptors)) for sample in self.after_warm_up])

    def values(self) -> dict[str, Any]:
        rss, descriptors = [s.rss for s in self.samples], [s.descriptors for s in self.samples]
        return {
            "clients": self.clients, "processes": self.processes, "seconds": self.seconds, "push_nbytes": self.nbytes,
            "pushes": len(self.acknowledged), "pushes_per_s": len(self.acknowledged) / self.seconds,
            "pushes_of_a_client": [self.least, self.most], "errors": list(self.errors), "median_s": self.percentile(50),
            "p90_s": self.percentile(90), "p99_s": self.percentile(99), "longest_s": self.acknowledged[-1],
            "p99_over_median": self.tail, "target": TAIL, "rss_nbytes": [rss[0], max(rss), rss[-1]],
            "rss_slope": self.rss_slope, "descriptors": [descriptors[0], max(descriptors), descriptors[-1]],
            "descriptor_slope": self.descriptor_slope, "flat": self.rss_slope <= FLAT and self.descriptor_slope <= FLAT,
            "rss_over_time": [[round(s.at, 2), s.rss, s.descriptors] for s in self.samples],
        }  # fmt: skip


def measure_load(
    *, clients: int, processes: int, seconds: float, threads: int, tell: Callable[[str], None] = lambda what: None
) -> LoadResult:
    """Run the load and check that every acknowledged push counts once.

    Args:
        processes: Processes that the clients are threads of.
        threads: Torch threads of the server.
    """
    job = Job(workers=clients, mode="async", lr=RATE, momentum=0.0)
    gradient = torch.tensor(PATTERN).repeat(500 * 500 // len(PATTERN)).view(500, 500)
    frame = encode(gradient, "none")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "frame").write_bytes(frame)
        tell("load: starting")
        server = stack.enter_context(started("server", threads))
        answer = server.do("begin", job=job.to_json(), shapes=SHAPES, host=LOOPBACK)
        order = {
            "address": f"{LOOPBACK}:{answer['port']}",
            "fingerprint": Slots.of({"w": gradient}).fingerprint,
            "version": __version__,
            "frames": [str(folder / "frame")],
        }
        programs = [
            stack.enter_context(_program(order | {"numbers": list(range(first, clients, processes))}))
            for first in range(processes)
        ]
        for program in programs:
            if _line(program)["torch"]:
                raise WrongResultError("clients that are to have no torch have loaded it")
        began = time.monotonic()
        until = began + seconds
        for program in programs:
            _say(program, str(until))
        samples = []
        while (now := time.monotonic()) < until:
            samples.append(Sample.of(answer["pid"], now - began))
            tell(f"load: {clients} clients, {now - began:.0f} of {seconds:.0f} s")
            time.sleep(min(EVERY, max(0.0, until - now)))
        reports = [_line(program) for program in programs]
        traffic = server.do("traffic")
        for program in programs:
            _say(program, "done")
            program.wait(60)
        each = [client for one in reports for client in one["acknowledged"]]
        errors = tuple(error for one in reports for error in one["errors"])
        acknowledged = tuple(sorted(took for client in each for _, took in client))
        if not acknowledged:
            raise WrongResultError(f"no push was acknowledged: {errors[:1]}")
        _check(server.do, traffic, len(acknowledged), len(frame), errors)
        server.do("end")
    counts = [len(client) for client in each]
    return LoadResult(
        clients, processes, seconds, len(frame), acknowledged, min(counts), max(counts), errors, tuple(samples)
    )


def _check(
    do: Callable[..., dict[str, Any]], traffic: dict[str, Any], pushes: int, nbytes: int, errors: tuple[str, ...]
) -> None:
    """Raise unless exactly the acknowledged pushes were applied; failed calls make this unknown."""
    if errors:
        return
    if traffic["version"] != pushes or traffic["received"] != pushes * nbytes:
        raise WrongResultError(f"{pushes} pushes of {nbytes} bytes were acknowledged, but the server counted {traffic}")
    if not do("weights", numerator=-pushes, denominator=round(1 / RATE), gradient=PATTERN)["right"]:
        raise WrongResultError(f"the weights are not the sum of the {pushes} pushes that were acknowledged")


def _program(order: dict[str, Any]) -> subprocess.Popen[str]:
    program = [sys.executable, "-I", str(Path(__file__).with_name("plain_client.py")), json.dumps(order)]
    return _Killed(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


class _Killed(subprocess.Popen):  # type: ignore[type-arg]
    """Run a process that is killed at the end of the block."""

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is not None:
            self.kill()
        super().__exit__(*raised)


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise LaconicError("a client of a bench has ended; what it said is above")
    answer: dict[str, Any] = json.loads(line)
    return answer
