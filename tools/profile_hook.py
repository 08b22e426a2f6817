"""Print where the host's time goes inside the hook of an attached DDP step, function by function.

    python tools/profile_hook.py 'ef|qsgd:4' 'ef|thc:4' --device cuda --model gpt2 --compile

The hook runs on a thread of autograd, so a profiler of the whole program does not see it: this one is on while the hook
runs. A step is also timed without it, plain and attached in turns: profiling makes Python several times slower.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from laconic import counters
from laconic.collective.reductions.device_replay import record_exchanges
from laconic_lab.bench.device_step import StepBench, StepSettings, one_rank

STEPS = 6
WARM_UP = 5


class Hook:
    """Times the hook of an attachment, or profiles it."""

    def __init__(self, attachment: Any) -> None:
        self._reduce, self.seconds, self.profiler = attachment.reduce, list[float](), cProfile.Profile()
        self.profiling = False
        attachment.reduce = self

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if self.profiling:
            self.profiler.enable()
        began = time.perf_counter()
        try:
            future: torch.futures.Future[Tensor] = self._reduce(bucket)
            return future
        finally:
            self.seconds.append(time.perf_counter() - began)
            if self.profiling:
                self.profiler.disable()


def profile(bench: StepBench, spec: str, rows: int) -> str:
    bench.attachment.set(spec)
    vars(bench.attachment).pop("reduce", None)
    hook = Hook(bench.attachment)
    works = {which: partial(bench.step, which) for which in bench.modules}
    for _ in range(WARM_UP):
        works["attached"]()
    hook.seconds.clear()
    runs: dict[str, list[tuple[float, float]]] = {which: [] for which in works}
    for _ in range(STEPS):
        for which, work in works.items():
            runs[which].append(bench.timed(work))
    buckets = len(hook.seconds) // STEPS
    micros = 1e6 * statistics.median(hook.seconds)
    hook.seconds.clear()
    hook.profiling = True
    for _ in range(STEPS):
        works["attached"]()
    bench.wait()
    launched = {which: statistics.median(run[1] for run in timed) for which, timed in runs.items()}
    took = {which: statistics.median(run[0] for run in timed) for which, timed in runs.items()}
    entries = vars(pstats.Stats(hook.profiler))["stats"]
    each = STEPS * buckets
    calls = sum(entry[1] for entry in entries.values()) / each
    lines = [
        f"{1e6 * own / each:8.1f} {1e6 * whole / each:8.1f} {count / each:7.1f}  {Path(file).name}:{line} {name}"
        for (file, line, name), (_, count, own, whole, _) in sorted(entries.items(), key=lambda item: -item[1][2])
    ]
    table = "\n".join(["  itself  in all   calls  (µs a bucket) function", *lines[:rows]])
    added = 100 * (took["attached"] / took["ddp"] - 1)
    return (
        f"\n## {spec}: {added:+.1f} % ({1e3 * took['ddp']:.1f} ms plain, {1e3 * took['attached']:.1f} attached); "
        f"the host launches them in {1e3 * launched['ddp']:.1f} and {1e3 * launched['attached']:.1f} ms\n\n"
        f"{buckets} DDP buckets, {micros:.0f} µs in the hook of one (median, not profiled), {calls:.0f} Python calls; "
        f"unusual events: {counters.counts() or 'none'}\n\n{table}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=["ef|qsgd:4"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--rows", type=int, default=25)
    options = parser.parse_args()
    record_exchanges(not options.no_graphs)
    settings = StepSettings(model=options.model, device=options.device, compiled=options.compile)
    with one_rank(torch.device(options.device)):
        bench = StepBench(settings)
        for _ in range(WARM_UP):
            for which in bench.modules:
                bench.step(which)
        for spec in options.specs:
            print(profile(bench, spec, options.rows), flush=True)
        bench.attachment.detach()


if __name__ == "__main__":
    main()
