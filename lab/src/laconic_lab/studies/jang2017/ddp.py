"""DDP cells: ranks of torch.distributed on hosts of the lab, with gradients exchanged by ``laconic.attach``.

``none`` is DDP's own all-reduce over gloo. Summable codecs use the same all-reduce, others the two-shot reduction.
Gradients are sent in DDP buckets: the first of 1 MB, the others of 25 MB.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from laconic.errors import LaconicError
from laconic.plan.background_load import OtherProcesses
from laconic.plan.costs import Message, Network, Step, Work, bucketed, step
from laconic.plan.messages import Workload, message_of
from laconic.plan.profile import Profile
from laconic_lab.studies.jang2017 import cells, tasks

if TYPE_CHECKING:
    from laconic_lab.bench.cluster.processes import Network as Hosts

__all__ = ["calibrate", "predict", "run"]

LIMIT_S = 300.0


def calibrate(model: str, workers: int, codecs: Sequence[str]) -> cells.Calibrated:
    """Time exchanges of almost no values by each reduction, and of all the model's bytes, over unlimited links."""
    from laconic_lab.bench.cluster.processes import LAB, network

    load = os.getloadavg()[0]
    times, step_s = cells.times_of(model, codecs), cells.step_together(model, workers)
    with network(LAB, None, workers) as net:
        plain, whole = (_exchange_s(net, name, workers, "none") for name in ("few", model))
        ways = {}
        for way, codec in (("twoshot", "qsgd:4"), ("sum", "thc:4")):
            pair, many = (_exchange_s(net, name, workers, codec) for name in ("pair", "many"))
            ways[way] = (pair, max(0.0, (many - pair) / (tasks.LARGE["many"] - tasks.LARGE["pair"])))
    calibrated = cells.Calibrated(times, step_s, plain, 0.0, 0.0, load, ways)
    cell = cells.Cell("ddp", workers, cells.rate_of(model), "none")
    known = predict(cell, calibrated, rate=1e15)[1].total_s - step_s
    nbytes = 2 * (workers - 1) / workers * 4 * times.numel
    return replace(calibrated, byte_s=max(0.0, whole - known) / nbytes)


def _exchange_s(net: Hosts, name: str, workers: int, codec: str) -> float:
    """Return a step's seconds without its computation: the lower quartile, as background load only adds time."""
    faster: float = _steps(net, name, workers, codec)["measured_quartiles_s"][0]
    return max(0.0, faster - cells.step_together(name, workers, 0.3))


def predict(cell: cells.Cell, calibrated: cells.Calibrated, rate: float | None = None) -> tuple[Message, Step]:
    candidate, times = cell.candidate, calibrated.times
    way = "none" if cell.codec == "none" else "sum" if cell.codec in cells.SUMMED else "twoshot"
    ready, fixed = bucketed(times.ready, times.numel), calibrated.fixed_s
    work = Work(calibrated.step_s, candidate.every, ready)
    if candidate.local:  # every step ends with the optimizer's
        work = replace(work, step_s=work.step_s + calibrated.slowdown * times.apply_s)
    if way != "none":
        base, slot_s = calibrated.ways[way]
        large = sum(dims > 1 and numel >= 4096 for numel, dims in times.layout())
        fixed = base + slot_s * max(0, large / work.exchanges - tasks.LARGE["pair"])
    bits_s, round_trip_s = cell.link
    network = Network(
        cell.workers, rate or bits_s, "ring" if way == "sum" else "twoshot", byte_s=calibrated.byte_s,
        exchange_s=fixed, round_trip_s=0.0 if rate else round_trip_s,
    )  # fmt: skip
    message = message_of(Profile("here"), Workload.of_model(times), candidate.codec, network).slower(
        calibrated.slowdown
    )
    message = replace(message, add_s=message.add_s * calibrated.slowdown)  # every rank adds, at the same time
    return message, step(work, network, message)


def run(wanted: Sequence[tuple[cells.Cell, int]], net: Hosts) -> Iterator[dict[str, Any]]:
    for cell, count in wanted:
        yield _steps(net, cell.model, cell.workers, cell.codec, count)


def _steps(net: Hosts, name: str, workers: int, codec: str, count: int = 30) -> dict[str, Any]:
    """Run ranks on the workers' hosts and return their step times; the server's host is not used."""
    options = {"name": name, "codec": codec, "ranks": workers, "address": "10.77.0.2", "count": count}
    load = os.getloadavg()[0]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    processes = []
    try:
        for rank in range(workers):
            program = [sys.executable, "-m", "laconic_lab.studies.jang2017.rank", json.dumps(options | {"rank": rank})]
            processes.append(net.start(1 + rank)(program, stdout=subprocess.PIPE, text=True, env=environment))
        others = OtherProcesses([os.getpid(), *(process.pid for process in processes)])
        try:
            out, _ = processes[0].communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise LaconicError(f"the ranks of {name} with {codec} did not end within {LIMIT_S:.0f} s") from None
        if processes[0].returncode:
            raise LaconicError(f"a rank ended with exit code {processes[0].returncode}; its messages are above")
        share = others.share()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    seconds = [json.loads(line)["step_s"] for line in out.splitlines()][cells.WARM_UP :]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {
        "measured_s": middle, "measured_quartiles_s": [low, high], "exchanges": len(seconds), "measured_push": None,
        "measured_pull": None, "others": share, "load_average": [load, os.getloadavg()[0]],
    }  # fmt: skip
