"""What an iteration takes behind the real server: its process, two workers' processes, and links of a known rate.

The first iterations of the paper's training, for every method and link. Methods take turns, so that what else a
machine does meets all of them alike; a turn is a Record, and those of a cell are put together by the report.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
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
from laconic_lab.studies.kothari2021.settings import HYPER, Setting
from laconic_lab.studies.processes import Lines, listen, started
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.trainer import Progress

if TYPE_CHECKING:
    from laconic_lab.bench.cluster.processes import Network
    from laconic_lab.network import Link

__all__ = ["EXPERIMENT", "LINKS", "TIME", "Plan", "busy", "measure_all"]

log = logging.getLogger("laconic")

EXPERIMENT, TIME = "times", "kothari2021.time"

LINKS = ("unshaped", "1gbit", "100mbit")
WORKERS = 2
LEAST = 20
"""Iterations that a cell has whatever they take."""
WARM_UP = 3
"""Exchanges at the start of a turn that do not count; one where an exchange is many iterations."""
TRIES = 3
"""How often a link is measured that is not what was asked for."""
CALM = 4.0
"""The load average before a turn up to which nobody else worked: three processes of the turn before are in it."""
SILENCE = 600.0
"""Seconds without a word from any worker after which a turn has failed."""

PARTS_OF_TIME = {"compute": "compute_s", "encode": "encode_s", "communication": "communication_s",
                 "overlapped": "overlapped_s", "apply": "apply_s", "total_s": "total_s"}  # fmt: skip
"""What a worker tells, and its name in a Record."""

Report = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Args:
        iterations: Of a cell (a method, a model and a link), all turns together.
        cell_seconds: After which a cell may end with fewer, 20 at least.
        turns: In how many turns with the other methods they are measured.
        links: Of ``LINKS``.
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
    settings: Sequence[Setting],
    plan: Plan,
    *,
    epochs: int | None = None,
    data_dir: Path | None = None,
    records: RecordLog | None = None,
    seed: int = 0,
    made_of: str | None = None,
    progress: Progress | None = None,
) -> list[Record]:
    """Measure what is not in the Records yet, or was behind a link that was not what it should be; all Records.

    What was measured while others worked on the machine is measured again once nobody does.

    Args:
        settings: Methods on models.
        plan: How long.
        epochs: What times are to be put up to; the paper's number.
        data_dir: Where data sets lie.
        records: A file.
        seed: Of everything random.
        made_of: What links are made of: network namespaces where we are root, else a paced proxy.
        progress: Told what is measured, how many turns are done and how many there are.
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
        return values is not None and bool(values["valid"]) and not (calm and busy(values))

    missing_of = [[cell for cell in group if not kept(cell)] for group in groups]
    done = len(wanted) - sum(map(len, missing_of))
    bench = _Bench(plan, epochs, data_dir, seed)
    for missing in filter(None, missing_of):
        rate = None if missing[0].link == "unshaped" else missing[0].link
        with network(made_of or best_network(), rate, WORKERS) as net:
            links = _measured(net)
            for cell in missing:
                if progress is not None:
                    progress(str(cell), done, len(wanted))
                finished.add(Record(TIME, bench.measure(cell, net) | _of_links(net, links), seed=seed))
                done += 1
    if progress is not None:
        progress(EXPERIMENT, done, len(wanted))
    return [finished.records[cell.key] for cell in wanted]


def busy(values: Mapping[str, Any]) -> bool:
    """Whether others worked on the machine when this was measured."""
    return bool(values["load_average"][0] > CALM)


def _measured(net: Network) -> list[Link]:
    for _ in range(TRIES):
        found = net.measure()
        if all(link.valid for link in found):
            break
    for link in found:
        if not link.valid:
            log.warning("the link carries %s: times over it are marked as not valid", link)
    return found


def _of_links(net: Network, links: Sequence[Link]) -> dict[str, Any]:
    return {
        "link_made_of": net.made_of,
        "link_measured": [link.goodput for link in links],
        "link_round_trip_s": [link.round_trip for link in links],
        "valid": all(link.valid for link in links),
    }


@dataclass
class _Bench:
    """What all cells have in common."""

    plan: Plan
    epochs: int | None
    data_dir: Path | None
    seed: int
    lengths: dict[tuple[str, str], int] = field(default_factory=dict)
    """Iterations of an epoch, by model and data."""

    def measure(self, cell: Cell, net: Network) -> dict[str, Any]:
        """One turn; what is recorded of it, but for the links."""
        setting, plan = cell.setting, self.plan
        config, per_epoch, epochs = self._config(setting)
        every = config.job.every
        warm_up = WARM_UP if every == 1 else 1
        enough = _Enough(
            exchanges=math.ceil(plan.iterations / plan.turns / every),
            least=math.ceil(LEAST / plan.turns / every),
            seconds=plan.cell_seconds / plan.turns,
        )
        load_before = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "run"
            config.save(run_dir)
            told = _train(net, run_dir, warm_up, enough)
        return {
            "key": cell.key, "part": EXPERIMENT, "method": setting.name, "link": cell.link, "turn": cell.turn,
            **{name: value for name, value in setting.values().items() if name != "name"},
            "epochs": epochs, "iterations_per_epoch": per_epoch, "every": every, "warm_up": warm_up * every,
            **_sums(told, warm_up, every), "load_average": [load_before, os.getloadavg()[0]],
        }  # fmt: skip

    def _config(self, setting: Setting) -> tuple[Config, int, int]:
        """All of a training, of which only the beginning is made; iterations of an epoch, and epochs."""
        job = setting.job(self.seed)
        folder = str(self.data_dir.resolve()) if self.data_dir else None
        config = Config(
            model=setting.model, data=setting.data, data_dir=folder, batch=setting.batch, iterations=job.every,
            method=setting.name, schedule="cosine", holdout=setting.holdout, job=job,
        )  # fmt: skip
        what = (setting.model, setting.data)
        if what not in self.lengths:
            shards = Shards(config.task().num_train, job.workers, setting.batch, self.seed)
            self.lengths[what] = shards.iterations_per_epoch
        per_epoch, epochs = self.lengths[what], self.epochs or HYPER[setting.model].epochs
        iterations = max(1, epochs * per_epoch // job.every) * job.every
        ramp = setting.schedule(iterations, per_epoch).warmup
        return replace(config, iterations=iterations, warmup=ramp), per_epoch, epochs


class _Enough(NamedTuple):
    """When a turn may end."""

    exchanges: int
    least: int
    seconds: float

    def of(self, exchanges: int, seconds: float) -> bool:
        return exchanges >= (self.exchanges if seconds < self.seconds else min(self.least, self.exchanges))


def _sums(told: Sequence[Sequence[Report]], warm_up: int, every: int) -> dict[str, Any]:
    """Of the exchanges after the warm-up that all workers have ended: seconds, means over the workers, and bytes."""
    count = min(map(len, told))
    measured = [(reports[warm_up - 1], reports[count - 1]) for reports in told]
    iterations = (count - warm_up) * every
    found: dict[str, Any] = {
        name: fmean(last[word] - first[word] for first, last in measured) for word, name in PARTS_OF_TIME.items()
    }
    exchanges = [
        fmean(reports[i]["total_s"] - reports[i - 1]["total_s"] for reports in told) for i in range(warm_up, count)
    ]
    sent, received = (
        sum(last[word] - first[word] for first, last in measured) for word in ("bytes_sent", "bytes_received")
    )
    return found | {
        "iterations": iterations,
        "exchange_s": [round(one, 6) for one in exchanges],
        "median_s": median(exchanges) / every,
        "push_bytes_per_iteration": sent / iterations,
        "pull_bytes_per_iteration": received / iterations,
        "bytes_per_iteration": (sent + received) / iterations,
        "retries": sum(reports[-1]["retries"] for reports in told),
    }


# --------------------------------------------------------------------------------------------------------- processes


def _train(net: Network, run_dir: Path, warm_up: int, enough: _Enough) -> list[list[Report]]:
    """What both workers tell, line by line, until it is enough; then all are ended."""
    certs = ["--certs", net.certs] if net.certs is not None else []
    lines: Lines = queue.SimpleQueue()
    told: list[list[Report]] = [[] for _ in range(WORKERS)]
    with ExitStack() as stack:
        arguments = ["server", str(run_dir), "--host", net.host, *certs]
        server = stack.enter_context(started(net, 0, arguments, subprocess.DEVNULL))
        address = net.reach(_port(run_dir, server))
        for number in range(WORKERS):
            arguments = ["worker", str(run_dir), "--worker", str(number), "--server", address, *certs]
            worker = stack.enter_context(started(net, 1 + number, arguments, subprocess.PIPE))
            listen(number, worker, lines)
        began: float | None = None
        while True:
            try:
                number, line = lines.get(timeout=SILENCE)
            except queue.Empty:
                raise LaconicError(f"no worker has ended an exchange in {SILENCE:.0f} s") from None
            if line is None:
                raise LaconicError(f"worker {number} has ended too early; what it said is above")
            told[number].append(json.loads(line))
            count = min(map(len, told))
            if began is None and count >= warm_up:
                began = time.monotonic()
            if began is not None and enough.of(count - warm_up, time.monotonic() - began):
                return told


def _port(run_dir: Path, server: subprocess.Popen[Any]) -> int:
    """Where the server listens, once it does."""
    while server.poll() is None:
        try:
            told = json.loads((run_dir / SERVER).read_text(encoding="utf-8"))
            return int(told["address"].rpartition(":")[2])
        except (OSError, ValueError, KeyError):
            time.sleep(0.02)
    raise LaconicError(f"the server has ended with exit code {server.returncode}; what it said is above")
