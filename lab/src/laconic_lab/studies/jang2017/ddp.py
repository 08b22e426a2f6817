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
import threading
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
COUNT = 30
"""Exchanges of each training of a calibration."""
WAYS = {"twoshot": "qsgd:4", "sum": "thc:4"}
"""A codec of each compressed reduction."""


def calibrate(model: str, workers: int, codecs: tuple[str, ...]) -> cells.Calibrated:
    """Time exchanges of almost no values by each reduction, and of all the model's bytes, over unlimited links."""
    from laconic_lab.bench.cluster.processes import LAB, network

    load = os.getloadavg()[0]
    times, step_s = cells.times_of(model, codecs), cells.step_together(model, workers)
    timed = [("few", "none"), (model, "none"), *((name, codec) for codec in WAYS.values() for name in ("pair", "many"))]
    sparse = [(model, cells.FEW_BYTES[way]) for way in WAYS]
    with network(LAB, None, workers) as net:
        trained = list(_train(net, workers, [(name, codec, COUNT) for name, codec in (*timed, *sparse)]))
    measured, with_few_bytes = trained[: len(timed)], trained[len(timed) :]
    # The lower quartile: background load only adds time.
    plain, whole, *small = (
        max(0.0, one["measured_quartiles_s"][0] - cells.step_together(name, workers, 0.3))
        for one, (name, _) in zip(measured, timed, strict=True)
    )
    ways = {}
    for way, pair, many in zip(WAYS, small[::2], small[1::2], strict=True):
        ways[way] = (pair, max(0.0, (many - pair) / (tasks.LARGE["many"] - tasks.LARGE["pair"])))
    calibrated = cells.Calibrated(times, step_s, plain, 0.0, 0.0, load, ways)
    cell = cells.Cell("ddp", workers, cells.rate_of(model), "none")
    known = predict(cell, calibrated, rate=cells.UNLIMITED)[1].total_s - step_s
    nbytes = 2 * (workers - 1) / workers * 4 * times.numel
    calibrated = replace(calibrated, byte_s=max(0.0, whole - known) / nbytes)
    contention_s = {}
    for way, one in zip(WAYS, with_few_bytes, strict=True):
        parts_s = predict(cell._replace(codec=cells.FEW_BYTES[way]), calibrated, rate=cells.UNLIMITED)[1].total_s
        contention_s[way] = max(0.0, one["measured_s"] - parts_s)
    return replace(calibrated, contention_s=contention_s)


def predict(cell: cells.Cell, calibrated: cells.Calibrated, rate: float | None = None) -> tuple[Message, Step]:
    candidate, times = cell.candidate, calibrated.times
    summed = (*cells.SUMMED, cells.FEW_BYTES["sum"])
    way = "none" if cell.codec == "none" else "sum" if cell.codec in summed else "twoshot"
    ready, fixed = bucketed(times.ready, times.numel), calibrated.fixed_s
    work = Work(calibrated.step_s, candidate.every, ready)
    if candidate.local:  # every step ends with the optimizer's
        work = replace(work, step_s=work.step_s + calibrated.slowdown * times.apply_s)
    if way != "none":
        base, slot_s = calibrated.ways[way]
        large = sum(dims > 1 and numel >= 4096 for numel, dims in times.layout())
        fixed = base + slot_s * max(0, large / work.exchanges - tasks.LARGE["pair"])
        fixed += calibrated.contention_s.get(way, 0.0) / work.exchanges
    bits_s, round_trip_s = cell.link
    network = Network(
        cell.workers, rate or bits_s, "ring" if way == "sum" else "twoshot", byte_s=calibrated.byte_s,
        exchange_s=fixed, round_trip_s=0.0 if rate else round_trip_s,
    )  # fmt: skip
    message = message_of(Profile("here"), Workload.of_model(times), candidate.codec, network).slower(
        calibrated.slowdown
    )
    message = replace(message, add_s=message.add_s * calibrated.slowdown)  # every rank adds, at the same time
    slowed = cells.beyond_burst(message, network.rate, 2 * (cell.workers - 1) / cell.workers)
    return message, step(work, network, slowed)


def run(wanted: Sequence[tuple[cells.Cell, int]], net: Hosts) -> Iterator[dict[str, Any]]:
    return _train(net, wanted[0][0].workers, [(cell.model, cell.codec, count) for cell, count in wanted])


def _train(net: Hosts, workers: int, trainings: Sequence[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    """Run trainings (task, codec, exchanges) one after the other by the same ranks, and yield their step times.

    Ranks are processes on the workers' hosts; the server's host is not used.
    """
    options = {"trainings": trainings, "ranks": workers, "address": "10.77.0.2"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(workers):
            program = [sys.executable, "-m", "laconic_lab.studies.jang2017.rank", json.dumps(options | {"rank": rank})]
            processes.append(net.start(1 + rank)(program, stdout=subprocess.PIPE, text=True, env=environment))
        others = OtherProcesses([os.getpid(), *(process.pid for process in processes)])
        for name, codec, count in trainings:
            yield _measure(processes[0], f"{name} with {codec}", count, others)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _measure(first: subprocess.Popen[str], what: str, count: int, others: OtherProcesses) -> dict[str, Any]:
    """Read the step times that the first rank prints of one training."""
    assert first.stdout is not None
    load, seconds = os.getloadavg()[0], []
    others.share()
    limit = threading.Timer(LIMIT_S, first.kill)
    limit.start()
    try:
        for _ in range(count):
            line = first.stdout.readline()
            if not line:
                raise LaconicError(f"the ranks of {what} ended early or did not end within {LIMIT_S:.0f} s")
            seconds.append(json.loads(line)["step_s"])
    finally:
        limit.cancel()
    low, middle, high = statistics.quantiles(seconds[cells.WARM_UP :], n=4, method="inclusive")
    return {
        "measured_s": middle, "measured_quartiles_s": [low, high], "exchanges": count - cells.WARM_UP,
        "measured_push": None, "measured_pull": None, "others": others.share(),
        "load_average": [load, os.getloadavg()[0]],
    }  # fmt: skip
