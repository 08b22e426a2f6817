"""DDP cells: ranks of torch.distributed on hosts of the lab, gradients exchanged by ``laconic.attach``.

``none`` is DDP's own all-reduce over gloo. Packets that are added while compressed go through the same all-reduce;
others take two shots. Gradients leave in DDP's buckets: the first of 1 MB, others of 25.
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
from laconic.plan.costs import Message, Network, Ready, Step, Work, step
from laconic.plan.messages import Workload, message_of
from laconic.plan.profile import ModelTimes
from laconic.units import parse_rate
from laconic_lab.studies.jang2017 import cells, tasks

if TYPE_CHECKING:
    from laconic_lab.bench.cluster.processes import Network as Hosts

__all__ = ["bucketed", "calibrate", "predict", "run"]

FIRST, BUCKET = 1 << 20, 25 << 20
LIMIT_S = 300.0


def bucketed(times: ModelTimes) -> Ready:
    """Gradients in DDP's buckets: one leaves when the last of it is ready."""
    total, found = times.numel, []
    room, filled, done = FIRST, 0, 0
    for numel, (at, _) in zip(times.numels, times.ready, strict=True):
        filled, done = filled + 4 * numel, done + numel
        if filled >= room or done == total:
            found.append((at, done / total))
            room, filled = BUCKET, 0
    return tuple(found)


def calibrate(model: str, workers: int, codecs: Sequence[str]) -> cells.Calibrated:
    """A step of next to nothing for each way to exchange, and all the model's bytes in float32, without limits."""
    from laconic_lab.bench.cluster.processes import LAB, network

    load = os.getloadavg()[0]
    times, step_s = cells.times_of(model, codecs), cells.step_together(model, workers)
    with network(LAB, None, workers) as net:
        plain, whole = (_left_over(net, name, workers, "none") for name in ("few", model))
        ways = {}
        for way, codec in (("twoshot", "qsgd:4"), ("sum", "thc:4")):
            pair, many = (_left_over(net, name, workers, codec) for name in ("pair", "many"))
            ways[way] = (pair, max(0.0, (many - pair) / (tasks.LARGE["many"] - tasks.LARGE["pair"])))
    here = cells.Calibrated(times, step_s, plain, 0.0, 0.0, load, ways)
    cell = cells.Cell("ddp", workers, cells.rate_of(model), "none")
    known = predict(cell, here, rate=1e15)[1].total_s - step_s
    nbytes = 2 * (workers - 1) / workers * 4 * times.numel
    return replace(here, byte_s=max(0.0, whole - known) / nbytes)


def _left_over(net: Hosts, name: str, workers: int, codec: str) -> float:
    """Seconds of a step beside its computation; of the faster ones, since others on the machine only ever add."""
    faster: float = _steps(net, name, workers, codec)["measured_quartiles_s"][0]
    return max(0.0, faster - cells.step_together(name, workers, 0.3))


def predict(cell: cells.Cell, here: cells.Calibrated, rate: float | None = None) -> tuple[Message, Step]:
    way = "none" if cell.codec == "none" else "sum" if cell.codec in cells.SUMMED else "twoshot"
    fixed = here.fixed_s
    if way != "none":
        base, slot_s = here.ways[way]
        large = sum(dims > 1 and numel >= 4096 for numel, dims in here.times.layout())
        fixed = base + slot_s * (large - tasks.LARGE["pair"])
    network = Network(
        cell.workers, rate or parse_rate(cell.rate), "ring" if way == "sum" else "twoshot", byte_s=here.byte_s,
        exchange_s=fixed,
    )  # fmt: skip
    message = message_of(cells.generic(), Workload.of_model(here.times), cell.codec, network).slower(here.slowdown)
    message = replace(message, add_s=message.add_s * here.slowdown)  # every rank adds, at the same time
    return message, step(Work(here.step_s, ready=bucketed(here.times)), network, message)


def run(wanted: Sequence[tuple[cells.Cell, int]], net: Hosts) -> Iterator[dict[str, Any]]:
    for cell, count in wanted:
        yield _steps(net, cell.model, cell.workers, cell.codec, count)


def _steps(net: Hosts, name: str, workers: int, codec: str, count: int = 30) -> dict[str, Any]:
    """The ranks are on the workers' hosts; that of the server is not used."""
    orders = {"name": name, "codec": codec, "ranks": workers, "address": "10.77.0.2", "count": count}
    load = os.getloadavg()[0]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    processes = []
    try:
        for rank in range(workers):
            program = [sys.executable, "-m", "laconic_lab.studies.jang2017.rank", json.dumps(orders | {"rank": rank})]
            processes.append(net.start(1 + rank)(program, stdout=subprocess.PIPE, text=True, env=environment))
        others = OtherProcesses([os.getpid(), *(process.pid for process in processes)])
        try:
            out, _ = processes[0].communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise LaconicError(f"ranks of {name} by {codec} did not end in {LIMIT_S:.0f} s") from None
        if processes[0].returncode:
            raise LaconicError(f"a rank ended with exit code {processes[0].returncode}; what it said is above")
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
