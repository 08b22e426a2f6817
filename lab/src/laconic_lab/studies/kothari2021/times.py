"""Time of an iteration with a server process, two worker processes and links of a known rate.

For every method and link the first iterations of the paper's training are timed. Methods take turns, so that
background load affects all of them alike; a turn is a Record, and the tables add up the turns of a cell.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from laconic.errors import ConfigError, LaconicError
from laconic.records import Record
from laconic.train.data_shards import Shards
from laconic.train.run import SERVER, Config
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.kothari2021.settings import HYPER, Setting
from laconic_lab.studies.processes import WorkerReports, measured_links, role_process
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.trainer import Progress

if TYPE_CHECKING:
    from laconic_lab.bench.cluster.processes import Network
    from laconic_lab.network import Link

__all__ = [
    "EXPERIMENT", "LINKS", "TIME", "Lengths", "Plan", "busy", "link_values", "measure_all", "server_port",
    "training_config",
]  # fmt: skip

log = logging.getLogger("laconic")

EXPERIMENT, TIME = "times", "kothari2021.time"

LINKS = ("unshaped", "1gbit", "100mbit")
WORKERS = 2
LEAST = 20
"""Smallest number of iterations of a cell."""
LEAST_EXCHANGES = 10
"""Smallest number of exchanges of a turn: those of method 6 are twenty iterations each."""
WARM_UP = 3
"""Exchanges at the start of a turn that do not count; only one where an exchange has several iterations."""
CALM = 4.0
"""Load average before a turn up to which the machine counts as calm; it includes three processes of the last turn."""
REPORT_TIMEOUT_S = 600.0
"""Seconds without a report of any worker after which a turn has failed."""

PARTS_OF_TIME = {"compute": "compute_s", "encode": "encode_s", "communication": "communication_s",
                 "overlapped": "overlapped_s", "apply": "apply_s", "total_s": "total_s"}  # fmt: skip
"""Fields of a worker's report, and their names in a Record."""

Report = dict[str, Any]
Lengths = dict[tuple[str, str, int], int]
"""Iterations of an epoch, by model, data set and number of workers."""


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Args:
        iterations: Iterations of a cell (a method, a model and a link) in all turns.
        cell_seconds: Seconds after which 20 iterations of a cell, and 10 exchanges of a turn, are enough.
        turns: Number of turns that the iterations are divided into.
        links: Some of ``LINKS``.
    """

    iterations: int = 200
    cell_seconds: float = 150.0
    turns: int = 2
    links: Sequence[str] = LINKS

    def __post_init__(self) -> None:
        for name in ("iterations", "turns", "cell_seconds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for link in self.links:
            if link not in LINKS:
                raise ConfigError(f"unknown link {link!r}: expected some of {', '.join(LINKS)}")


class Cell(NamedTuple):
    setting: Setting
    link: str
    turn: int

    @property
    def key(self) -> str:
        return json.dumps([EXPERIMENT, self.setting.values(), self.link, self.turn], sort_keys=True)

    def __str__(self) -> str:
        return f"{self.setting.model}, {self.link}, method {self.setting.name}, turn {self.turn + 1}"


def measure_all(
    settings: Sequence[Setting], plan: Plan, *, epochs: int | None = None, data_dir: Path | None = None,
    records: RecordLog | None = None, seed: int = 0, made_of: str | None = None, progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Time the cells that have no valid Record yet, and return the Records of all.

    On a calm machine, turns that were timed under background load are repeated, and so are turns of fewer than ten
    exchanges.

    Args:
        settings: Methods on models.
        epochs: Epochs to which times are extrapolated; by default the paper's.
        records: Records of earlier turns.
        made_of: What links are made of; by default network namespaces as root, otherwise a paced proxy.
        progress: Called with the cell, the number of finished turns and their total.
        deadline: When to end although cells are left.
    """
    from laconic_lab.bench.cluster.processes import best_network, network

    finished = records or RecordLog(None)
    models = list(dict.fromkeys(setting.model for setting in settings))
    groups = [
        [Cell(setting, link, turn) for setting in settings if setting.model == model]
        for model in models
        for turn in range(plan.turns)
        for link in plan.links
    ]
    wanted = [cell for group in groups for cell in group]
    calm = os.getloadavg()[0] <= CALM

    def kept(cell: Cell) -> bool:
        values = finished.records[cell.key].values if cell.key in finished else None
        if values is None or not values["valid"] or len(values["exchange_s"]) < LEAST_EXCHANGES:
            return False
        return not (calm and busy(values))

    missing_of = [[cell for cell in group if not kept(cell)] for group in groups]
    done = len(wanted) - sum(map(len, missing_of))
    bench = _Bench(plan, epochs, data_dir, seed)
    for missing in filter(None, missing_of):
        rate = None if missing[0].link == "unshaped" else missing[0].link
        with network(made_of or best_network(), rate, WORKERS) as net:
            links = measured_links(net)
            for cell in missing:
                if progress is not None:
                    progress(str(cell), done, len(wanted))
                if deadline is not None:
                    deadline.check()
                finished.add(Record(TIME, bench.measure(cell, net) | link_values(net, links), seed=seed))
                done += 1
    if progress is not None:
        progress(EXPERIMENT, done, len(wanted))
    return [finished.records[cell.key] for cell in wanted]


def busy(values: Mapping[str, Any]) -> bool:
    """Return whether other processes loaded the machine before the measurement."""
    return bool(values["load_average"][0] > CALM)


def link_values(net: Network, links: Sequence[Link]) -> dict[str, Any]:
    return {
        "link_made_of": net.made_of,
        "link_measured": [link.goodput for link in links],
        "link_round_trip_s": [link.round_trip for link in links],
        "valid": all(link.valid for link in links),
    }


@dataclass
class _Bench:
    """Options that all cells share."""

    plan: Plan
    epochs: int | None
    data_dir: Path | None
    seed: int
    lengths: Lengths = field(default_factory=dict)

    def measure(self, cell: Cell, net: Network) -> dict[str, Any]:
        """Time one turn and return the values of its Record, without those of the links."""
        setting, plan = cell.setting, self.plan
        config, per_epoch, epochs = training_config(setting, self.seed, self.epochs, self.data_dir, self.lengths)
        every = config.job.every
        warm_up = WARM_UP if every == 1 else 1
        enough = _Enough(
            exchanges=max(LEAST_EXCHANGES, math.ceil(plan.iterations / plan.turns / every)),
            least=max(LEAST_EXCHANGES, math.ceil(LEAST / plan.turns / every)),
            seconds=plan.cell_seconds / plan.turns,
        )
        load_before = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "run"
            config.save(run_dir)
            reports = _train(net, run_dir, warm_up, enough)
        return {
            "key": cell.key, "part": EXPERIMENT, "method": setting.name, "link": cell.link, "turn": cell.turn,
            **{name: value for name, value in setting.values().items() if name != "name"},
            "epochs": epochs, "iterations_per_epoch": per_epoch, "every": every, "warm_up": warm_up * every,
            **_summary(reports, warm_up, every), "load_average": [load_before, os.getloadavg()[0]],
        }  # fmt: skip


def training_config(
    setting: Setting, seed: int, epochs: int | None, data_dir: Path | None, lengths: Lengths
) -> tuple[Config, int, int]:
    """Return the options of a whole training, the iterations of an epoch, and the epochs (by default the paper's)."""
    job = setting.job(seed)
    folder = str(data_dir.resolve()) if data_dir else None
    config = Config(
        model=setting.model, data=setting.data, data_dir=folder, batch=setting.batch, iterations=job.every,
        method=setting.name, schedule="cosine", holdout=setting.holdout, job=job,
    )  # fmt: skip
    key = (setting.model, setting.data, job.workers)
    if key not in lengths:
        shards = Shards(config.task().num_train, job.workers, setting.batch, seed)
        lengths[key] = shards.iterations_per_epoch
    per_epoch, epochs = lengths[key], epochs or HYPER[setting.model].epochs
    iterations = max(1, epochs * per_epoch // job.every) * job.every
    ramp = setting.schedule(iterations, per_epoch).warmup
    return replace(config, iterations=iterations, warmup=ramp), per_epoch, epochs


class _Enough(NamedTuple):
    """When a turn may end."""

    exchanges: int
    least: int
    seconds: float

    def reached(self, exchanges: int, seconds: float) -> bool:
        return exchanges >= (self.exchanges if seconds < self.seconds else min(self.least, self.exchanges))


def _summary(all_reports: Sequence[Sequence[Report]], warm_up: int, every: int) -> dict[str, Any]:
    """Return seconds (means over workers) and bytes of the exchanges after the warm-up that all workers finished."""
    count = min(map(len, all_reports))
    ends = [(reports[warm_up - 1], reports[count - 1]) for reports in all_reports]
    iterations = (count - warm_up) * every
    seconds: dict[str, Any] = {
        name: fmean(last[field] - first[field] for first, last in ends) for field, name in PARTS_OF_TIME.items()
    }
    exchanges = [
        fmean(reports[i]["total_s"] - reports[i - 1]["total_s"] for reports in all_reports)
        for i in range(warm_up, count)
    ]
    sent, received = (
        sum(last[field] - first[field] for first, last in ends) for field in ("bytes_sent", "bytes_received")
    )
    return seconds | {
        "iterations": iterations, "exchange_s": [round(seconds_each, 6) for seconds_each in exchanges],
        "median_s": median(exchanges) / every, "push_bytes_per_iteration": sent / iterations,
        "pull_bytes_per_iteration": received / iterations, "bytes_per_iteration": (sent + received) / iterations,
        "retries": sum(reports[-1]["retries"] for reports in all_reports),
    }  # fmt: skip


def _train(net: Network, run_dir: Path, warm_up: int, enough: _Enough) -> list[list[Report]]:
    """Return the reports of both workers until there are enough; then all processes are ended."""
    certs = ["--certs", net.certs] if net.certs is not None else []
    queue, by_worker = WorkerReports(), [list[Report]() for _ in range(WORKERS)]
    with ExitStack() as stack:
        arguments = ["server", str(run_dir), "--host", net.host, *certs]
        server = stack.enter_context(role_process(net, 0, arguments, subprocess.DEVNULL))
        address = net.reach(server_port(run_dir, server))
        for number in range(WORKERS):
            arguments = ["worker", str(run_dir), "--worker", str(number), "--server", address, *certs]
            worker = stack.enter_context(role_process(net, 1 + number, arguments, subprocess.PIPE))
            queue.listen(number, worker)
        began: float | None = None
        while True:
            number, report = queue.next(REPORT_TIMEOUT_S)
            by_worker[number].append(report)
            count = min(map(len, by_worker))
            if began is None and count >= warm_up:
                began = time.monotonic()
            if began is not None and enough.reached(count - warm_up, time.monotonic() - began):
                return by_worker


def server_port(run_dir: Path, server: subprocess.Popen[Any]) -> int:
    """Return the port of the server as soon as it listens."""
    while server.poll() is None:
        try:
            server_info = json.loads((run_dir / SERVER).read_text(encoding="utf-8"))
            return int(server_info["address"].rpartition(":")[2])
        except (OSError, ValueError, KeyError):
            time.sleep(0.02)
    raise LaconicError(f"the server has ended with exit code {server.returncode}; its messages are above")
