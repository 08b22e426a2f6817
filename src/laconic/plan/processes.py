"""How much slower processes are that compute on one machine at the same time."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

from laconic.errors import LaconicError

__all__ = ["processes_per_core", "run_simultaneously", "slowdown_factors"]

_COMPUTE = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
a = torch.randn(384, 384); x = torch.randn(1 << 20); y = torch.empty_like(x)
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
end, turns, began = time.perf_counter() + float(sys.argv[2]), 0, time.process_time()
while time.perf_counter() < end:
    a @ a; torch.mul(x, 1.0001, out=y); turns += 1
print((time.process_time() - began) / turns)
"""


def slowdown_factors(counts: Sequence[int], *, threads: int = 1, seconds: float = 1.0) -> dict[int, float]:
    """Return how many times as long a computation takes while so many processes do it at once.

    The effect of shared caches and memory is measured, as processor time; where there are more processes than cores,
    that is multiplied by the number of processes for each core.
    """
    if max(counts, default=1) == 1:
        return {}

    def mean_s(count: int) -> float:
        argv = ["-c", _COMPUTE, str(threads), str(seconds)]
        return statistics.fmean(run_simultaneously(count, argv, threads=threads))

    alone = mean_s(1)
    return {n: max(1.0, mean_s(n) / alone) * processes_per_core(n, threads) for n in counts if n > 1}


def processes_per_core(processes: int, threads: int = 1) -> float:
    """Return the number of processes for each core, at least 1."""
    return max(1.0, processes * threads / (os.cpu_count() or 1))


def run_simultaneously(count: int, argv: Sequence[str], *, threads: int = 1) -> list[float]:
    """Run Python processes at the same time, and return the number that each prints.

    Each process prints the line ``ready``, waits for a line, measures, and prints its result.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    processes = [
        subprocess.Popen(
            [sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise LaconicError("a measuring process did not start; its error is above")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        results = []
        for process in processes:
            assert process.stdout is not None
            results.append(float(process.stdout.readline() or 0))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    if not all(results):
        raise LaconicError("a measuring process ended early; its error is above")
    return results
