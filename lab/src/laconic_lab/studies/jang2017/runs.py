"""Predicted and measured time of an iteration.

A cell is an engine, a number of workers, a rate and a codec. Before the first cell of a number of workers the machine
is calibrated with as many processes: a step while all of them compute, codecs on the model's own gradients, and an
exchange of almost no values over unlimited links. A cell is predicted from these alone and then run by real server and
worker processes on hosts of the lab. Records hold both times, the measured links, and the load.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from laconic.cluster.job import Job
from laconic.errors import ConfigError
from laconic.plan.background_load import OtherProcesses
from laconic.plan.costs import Message, Network, Step, Work, step
from laconic.plan.messages import Workload, message_of
from laconic.plan.profile import Profile
from laconic.records import Record, machine
from laconic.train.run import Config
from laconic_lab.bench.gpt.settings import link_parts
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.jang2017 import cells, ddp, tasks
from laconic_lab.studies.jang2017.cells import (
    BUSY,
    CODECS,
    ENOUGH_S,
    EXPERIMENT,
    FEW_BYTES,
    LEAST,
    LOCAL,
    MOST,
    RATES,
    SUMMED,
    WARM_UP,
    WORKERS,
    Calibrated,
    Cell,
    step_together,
    times_of,
    wait_until_calm,
)
from laconic_lab.studies.processes import WorkerReports, measured_links, role_process
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.trainer import Progress

if TYPE_CHECKING:
    from laconic_lab.bench.cluster.processes import Network as Hosts
    from laconic_lab.network import Link

__all__ = ["CALIBRATION", "CODECS", "ENGINES", "EXPERIMENT", "RATES", "RUN", "WORKERS", "Cell", "measure_all"]

log = logging.getLogger("laconic")

RUN, CALIBRATION = "jang2017.run", "jang2017.calibration"

REPORT_TIMEOUT_S = 180.0
Report = dict[str, Any]


class Engine(NamedTuple):
    """A way to exchange gradients: functions that calibrate, predict and run it.

    Cells that differ only in their codec are run one after the other by the same processes.
    """

    calibrate: Callable[[str, int, tuple[str, ...]], Calibrated]
    predict: Callable[[Cell, Calibrated], tuple[Message, Step]]
    run: Callable[[Sequence[tuple[Cell, int]], Any], Iterator[dict[str, Any]]]


def measure_all(
    wanted: Sequence[Cell], *, records: RecordLog | None = None, progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Run the cells that have no valid Record yet, one at a time, and return the Records of all.

    Cells that were measured under background load or over invalid links are run again, and after all others those that
    were measured on another machine. A setting waits up to a minute until other processes leave the machine alone.

    Args:
        records: Records of earlier cells.
        progress: Called with the cell, the number of finished cells and their total.
        deadline: When to end although cells are left.
    """
    from laconic_lab.bench.cluster.processes import LAB, network

    if os.geteuid() != 0:
        raise ConfigError("the experiment runs emulates links, which needs root: run it as root")
    finished, done, here = records or RecordLog(None), 0, machine()["cpu"]

    def known(cell: Cell) -> bool:
        record = finished.records.get(cell.key)
        return record is not None and bool(record.values["valid"]) and calm_cell(record.values)

    def kept(cell: Cell) -> bool:
        return known(cell) and finished.records[cell.key].machine.get("cpu") == here

    for engine, workers, model in dict.fromkeys((cell.engine, cell.workers, cell.model) for cell in wanted):
        if deadline is not None:
            deadline.check()
        _calibrated(finished, engine, workers, model, progress)  # cells that are kept are predicted from it again
    missing = sorted((cell for cell in wanted if not kept(cell)), key=known)
    for engine, workers, rate in dict.fromkeys(cell[:3] for cell in missing):
        if deadline is not None:
            deadline.check()
        group = [cell for cell in missing if cell[:3] == (engine, workers, rate)]
        calibrated = _calibrated(finished, engine, workers, group[0].model, progress)
        bits_s, delay = link_parts(rate)
        with network(LAB, bits_s, workers, delay) as net:
            links = measured_links(net)
            modelled = {cell: ENGINES[engine].predict(cell, calibrated) for cell in group}
            wait_until_calm()
            counts = [(cell, _exchanges(modelled[cell][1].exchange_s)) for cell in group]
            for cell, measured in zip(group, ENGINES[engine].run(counts, net), strict=True):
                finished.add(_record(cell, calibrated, *modelled[cell], measured, links))
                done += 1
                if progress is not None:
                    progress(str(cell), len(wanted) - len(missing) + done, len(wanted))
                if deadline is not None and done < len(missing):
                    deadline.check()
    return [finished.records[cell.key] for cell in wanted]


def calm_cell(values: Mapping[str, Any]) -> bool:
    """Return whether other processes used little of the machine while a cell or a calibration was measured."""
    others = values.get("others")  # early calibrations have none
    return others is None or float(others) <= BUSY


def _exchanges(seconds: float) -> int:
    """Return the exchanges of a cell: the warm-up and as many as fit into its time, within limits."""
    return WARM_UP + min(MOST, max(LEAST, round(ENOUGH_S / seconds)))


def _record(
    cell: Cell, calibrated: Calibrated, message: Message, modelled: Step, measured: dict[str, Any],
    links: Sequence[Link],
) -> Record:  # fmt: skip
    return Record(RUN, {
        "key": cell.key, "part": EXPERIMENT, **cell._asdict(), "model": cell.model, "numel": calibrated.times.numel,
        "predicted_s": modelled.total_s, "predicted": asdict(modelled), "predicted_push": message.push,
        "predicted_pull": message.pull, **measured,
        "link_goodput": [link.goodput for link in links], "link_round_trip_s": [link.round_trip for link in links],
        "valid": all(link.valid for link in links), "calibration_load": calibrated.load,
    })  # fmt: skip


def _calibrated(finished: RecordLog, engine: str, workers: int, model: str, progress: Progress | None) -> Calibrated:
    key = json.dumps([CALIBRATION, engine, workers, model])
    known = finished.records.get(key)
    usable = known is not None and "contention_s" in known.values and calm_cell(known.values)
    if known is None or not usable or known.machine.get("cpu") != machine()["cpu"]:
        if progress is not None:
            progress(f"calibrating {engine}, {workers} workers, {model}", 0, 1)
        wait_until_calm()
        local = (Cell(engine, workers, "", one).candidate.codec for one in LOCAL_OF.get(engine, ()))
        codecs = [*CODECS, *sorted(set(FEW_BYTES.values())), *local]
        others = OtherProcesses([os.getpid()])
        calibrated = ENGINES[engine].calibrate(model, workers, tuple(codecs))
        finished.add(Record(CALIBRATION, {"key": key, "engine": engine, "workers": workers, "model": model,
                                          "others": others.share(), **asdict(calibrated)}))  # fmt: skip
    return Calibrated.of(finished.records[key].values)


def latest(records: Iterable[Record]) -> Iterator[Record]:
    """Yield all Records but earlier ones of the same cell; cells are predicted by the present model.

    It predicts from the calibration of the same machine; where there is none, the prediction is that of the Record.
    """
    calibrations: dict[tuple[Any, ...], Record] = {}
    by_key: dict[str, Record] = {}
    for record in records:
        values = record.values
        if record.kind == CALIBRATION:
            calibrations[values["engine"], values["workers"], values["model"], record.machine.get("cpu")] = record
        elif record.kind == RUN:
            by_key[values["key"]] = record
        else:
            yield record
    for record in by_key.values():
        cell = Cell(*(record.values[name] for name in Cell._fields))
        known = calibrations.get((cell.engine, cell.workers, cell.model, record.machine.get("cpu")))
        if known is not None and cell.candidate.codec in known.values["times"]["messages"]:
            modelled = ENGINES[cell.engine].predict(cell, Calibrated.of(known.values))[1]
            record = replace(record, values={**record.values, "predicted_s": modelled.total_s})
        yield record


def _calibrate_ps(model: str, workers: int, codecs: tuple[str, ...]) -> Calibrated:
    """Time exchanges of two slots, of 34 slots, and of few and all of the model's bytes over unlimited links."""
    from laconic_lab.bench.cluster.processes import LAB, network

    load = os.getloadavg()[0]
    times = times_of(model, codecs)
    step_s = step_together(model, workers)
    with network(LAB, None, workers) as net:
        small = FEW_BYTES["ps"]
        wanted = [("few", "none", 33), ("many", "none", 33), (model, "none", WARM_UP + LEAST), (model, small, 33)]
        *trained, sparse = _train(net, workers, wanted)
    computing = [step_together(name, workers, 0.3) for name in ("few", "many")]
    # The lower quartile: background load can only make an exchange slower.
    few, many, whole = (
        max(0.0, measured["measured_quartiles_s"][0] - seconds)
        for measured, seconds in zip(trained, [*computing, step_s], strict=True)
    )
    slots = 34 - 2
    slot_s = max(0.0, (many - few) / slots)
    calibrated = Calibrated(times, step_s, few, slot_s, 0.0, load)
    # The model's bytes take the server more time than an exchange of almost no values: pushes and pulls.
    cell = Cell("ps", workers, cells.rate_of(model), "none")
    parts_s = _predict_ps(cell._replace(codec=small), calibrated, rate=cells.UNLIMITED)[1].total_s
    calibrated = replace(calibrated, contention_s={"ps": max(0.0, sparse["measured_s"] - parts_s)})
    known = _predict_ps(cell, calibrated, rate=cells.UNLIMITED)[1].total_s - step_s
    nbytes = 2 * workers * 4 * times.numel
    return replace(calibrated, byte_s=max(0.0, whole - known) / nbytes)


def _predict_ps(cell: Cell, calibrated: Calibrated, rate: float | None = None) -> tuple[Message, Step]:
    bits_s, round_trip_s = cell.link
    network = Network(
        cell.workers,
        rate or bits_s,
        round_trip_s=0.0 if rate else round_trip_s,
        byte_s=calibrated.byte_s,
        exchange_s=calibrated.fixed_s
        + calibrated.slot_s * (len(calibrated.times.numels) - 2)
        + calibrated.contention_s.get("ps", 0.0),
    )
    load = Workload.of_model(calibrated.times)
    message = message_of(Profile("here"), load, cell.codec, network).slower(calibrated.slowdown)
    slowed = cells.beyond_burst(message, network.rate, cell.workers)
    return message, step(Work(calibrated.step_s, ready=calibrated.times.ready), network, slowed)


def _run_ps(cells: Sequence[tuple[Cell, int]], net: Hosts) -> Iterator[dict[str, Any]]:
    return _train(net, cells[0][0].workers, [(cell.model, cell.codec, count) for cell, count in cells])


def job_of(codec: str, workers: int) -> Job:
    """Return a job with gradients both ways by a codec; summable codecs use the options of method ``homomorphic``.

    No checkpoint falls into the measurement.
    """
    options: dict[str, Any] = {"workers": workers, "lr": 1e-3, "checkpoint_every": 100_000}
    if codec in SUMMED:
        return Job(push=f"ef|{codec}", push_small="shared:16", returns="sum", **options)
    return Job(push=codec, pull=codec, returns="gradients", **options)


def _train(net: Hosts, workers: int, trainings: Sequence[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    """Run trainings (task, codec, exchanges) one after the other by real processes, and yield their measurements."""
    certs = ["--certs", net.certs] if net.certs is not None else []
    queue = WorkerReports()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run_dirs = [str(folder / str(number)) for number in range(len(trainings))]
        for run_dir, (name, codec, count) in zip(run_dirs, trainings, strict=True):
            Config(
                model=name, data="random", script=f"{tasks.SCRIPT}:{name}", batch=tasks.BATCH[name], iterations=count,
                method="", holdout=0.0, job=job_of(codec, workers),
            ).save(Path(run_dir))  # fmt: skip
        server = ["server", *run_dirs, "--host", net.host, *certs]
        pids = [os.getpid(), stack.enter_context(role_process(net, 0, server, subprocess.DEVNULL)).pid]
        for number in range(workers):
            arguments = ["worker", *run_dirs, "--worker", str(number), *certs]
            worker = stack.enter_context(role_process(net, 1 + number, arguments, subprocess.PIPE))
            queue.listen(number, worker)
            pids.append(worker.pid)
        others = OtherProcesses(pids)
        for run_dir, (_, _, count) in zip(run_dirs, trainings, strict=True):
            yield _measure(queue, run_dir, workers, count, others)


def _measure(queue: WorkerReports, run_dir: str, workers: int, count: int, others: OtherProcesses) -> dict[str, Any]:
    """Collect the reports of a training and return its measurements."""
    by_worker: list[list[Report]] = [[] for _ in range(workers)]
    load: list[float] = []
    while min(map(len, by_worker)) < count:
        number, report = queue.next(REPORT_TIMEOUT_S)
        if report["run_dir"] == run_dir:  # otherwise it is the last report about the training before
            if not load:
                load.append(os.getloadavg()[0])
                others.share()
            by_worker[number].append(report)
    return _summary(by_worker) | {"others": others.share(), "load_average": [*load, os.getloadavg()[0]]}


def _summary(by_worker: Sequence[Sequence[Report]]) -> dict[str, Any]:
    """Return quartiles of the exchanges after the warm-up, and means over workers of their parts."""
    count = min(map(len, by_worker))
    exchanges = [
        statistics.fmean(reports[i]["total_s"] - reports[i - 1]["total_s"] for reports in by_worker)
        for i in range(WARM_UP, count)
    ]

    def mean(field: str) -> float:
        return statistics.fmean(
            (reports[count - 1][field] - reports[WARM_UP - 1][field]) / (count - WARM_UP) for reports in by_worker
        )

    low, middle, high = statistics.quantiles(exchanges, n=4, method="inclusive")
    return {
        "measured_s": middle, "measured_quartiles_s": [low, high], "exchanges": len(exchanges),
        **{f"{name}_s": mean(name) for name in ("compute", "encode", "communication", "overlapped", "apply")},
        "measured_push": mean("bytes_sent"), "measured_pull": mean("bytes_received"),
        "retries": sum(reports[-1]["retries"] for reports in by_worker),
    }  # fmt: skip


ENGINES: Mapping[str, Engine] = {
    "ps": Engine(_calibrate_ps, _predict_ps, _run_ps),
    "ddp": Engine(ddp.calibrate, ddp.predict, ddp.run),
}
"""Engines by name."""
LOCAL_OF = {"ddp": (LOCAL,)}
"""Local steps that an engine is measured with, too."""


def all_cells(engines: Sequence[str] | None = None, links: Sequence[str] = RATES) -> list[Cell]:
    """Return the cells of some engines and links, by default all."""
    unknown = [link for link in links if link not in RATES]
    if unknown:
        raise ConfigError(f"a link must be one of {', '.join(RATES)}, got {unknown[0]!r}")
    return [
        Cell(engine, workers, rate, codec)
        for rate in links
        for engine in (ENGINES if engines is None else engines)
        for workers in WORKERS
        for codec in (*CODECS, *LOCAL_OF.get(engine, ()))
    ]
