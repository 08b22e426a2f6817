"""Whole trainings by a server and workers in processes of their own, over links of a known rate.

``whole`` trains methods over a slow link from start to end. ``unequal`` has one slow worker, or one slow link, and
compares the server's modes by the time until a worker's model reaches an accuracy.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from laconic.errors import LaconicError
from laconic.records import Record
from laconic.train.methods import method_options
from laconic_lab.studies.deadline import Deadline
from laconic_lab.studies.kothari2021.settings import Setting, setting_of
from laconic_lab.studies.kothari2021.times import Lengths, link_values, server_port, training_config
from laconic_lab.studies.processes import measured_links, role_process
from laconic_lab.studies.record_log import RecordLog
from laconic_lab.studies.trainer import Progress

if TYPE_CHECKING:
    from laconic.train.run import Config
    from laconic_lab.bench.cluster.processes import Network

__all__ = ["EXPERIMENTS", "MODES", "SITUATIONS", "TARGET", "TRAINING", "Case", "cases_of", "seconds_to", "train_all"]

log = logging.getLogger("laconic")

EXPERIMENTS = ("whole", "unequal")
TRAINING = "kothari2021.training"

WHOLE_METHODS, WHOLE_LINK = ("1", "5", "laconic"), "100mbit"
UNEQUAL_METHODS, UNEQUAL_LINK, WORKERS = ("1",), "200mbit", 3
SITUATIONS = {"equal": (None, None), "one slow worker": (None, 0.25), "one slow link": ("10mbit", None)}
"""Rate of the last worker's link, and the share of the time in which the last worker may run."""
MODES = {"sync": ("sync", 0), "sync, 1 backup": ("sync", 1), "bounded:4": ("bounded:4", 0), "async": ("async", 0)}
"""Mode of the job and number of backup workers, by name."""
TARGET = 95.0
"""Accuracy that trainings with unequal workers shall reach, of digits, in per cent."""
PERIOD_S = 0.04
"""A slow worker runs and is stopped once in so many seconds."""
PATIENCE_S = 3600.0
"""Seconds after which a training that has not ended has failed."""


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        situation: A key of ``SITUATIONS``.
        mode: A key of ``MODES``.
        link: Rate of all links but a slow one.
    """

    experiment: str
    setting: Setting
    situation: str
    mode: str
    link: str

    def key(self, epochs: int | None, seed: int) -> str:
        own = [self.experiment, self.setting.values(), self.situation, self.mode, self.link, epochs, seed]
        return json.dumps(own, sort_keys=True)

    def __str__(self) -> str:
        return f"{self.setting.name}, {self.situation}, {self.mode}, {self.link}"


def cases_of(experiment: str, methods: Sequence[str] | None, data: str | None) -> Iterator[Case]:
    """Yield the trainings of an experiment: of LeNet-5, whose trainings end within minutes on two cores."""
    if experiment == "whole":
        for method in methods or WHOLE_METHODS:
            yield Case(experiment, setting_of("lenet5", method, data=data), "equal", "sync", WHOLE_LINK)
        return
    for method in methods or UNEQUAL_METHODS:
        for situation in SITUATIONS:
            for name, (mode, backup) in MODES.items():
                options: dict[str, Any] = {"backup": backup} if backup else {}
                if mode != "sync" and method_options(method).get("returns") != "weights":
                    options |= {"returns": "delta", "pull": method_options(method, mode)["pull"]}
                shape: dict[str, Any] = {"workers": WORKERS, "mode": mode, "batch": 32}
                setting = setting_of("lenet5", method, data=data or "digits", **shape, **options)
                yield Case(experiment, setting, situation, name, UNEQUAL_LINK)


def train_all(
    cases: Sequence[Case], *, epochs: int | None = None, data_dir: Path | None = None,
    records: RecordLog | None = None, seeds: Sequence[int] = (0,), made_of: str | None = None,
    progress: Progress | None = None, deadline: Deadline | None = None,
) -> list[Record]:  # fmt: skip
    """Do the trainings that have no Record over a valid link yet, and return the Records of all.

    Args:
        epochs: Passes over the images; by default the paper's 20.
        made_of: What links are made of; by default network namespaces as root, otherwise a paced proxy, which cannot
            have one slow link: these trainings are left out.
        deadline: When to end although trainings are left; one that was begun is finished.
    """
    from laconic_lab.bench.cluster.processes import PACED, best_network, network

    finished, lengths = records or RecordLog(None), Lengths()
    made_of = made_of or best_network()
    possible = [case for case in cases if made_of != PACED or SITUATIONS[case.situation][0] is None]
    if len(possible) < len(cases):
        log.warning("%d trainings with one slow link are left out: they need root", len(cases) - len(possible))
    wanted = [(case, seed) for case in possible for seed in seeds]
    for done, (case, seed) in enumerate(wanted):
        if progress is not None:
            progress(str(case), done, len(wanted))
        key = case.key(epochs, seed)
        if key in finished and finished.records[key].values["valid"]:
            continue
        if deadline is not None:
            deadline.check()
        slow_link, share = SITUATIONS[case.situation]
        config, per_epoch, length = training_config(case.setting, seed, epochs, data_dir, lengths)
        with network(made_of, case.link, config.job.workers, slow=slow_link) as net:
            links, load = measured_links(net), os.getloadavg()[0]
            trained = _train(net, config, share)
            values = {
                "key": key, "part": case.experiment, "situation": case.situation, "update": case.mode,
                "link": case.link, "epochs": length, "iterations_per_epoch": per_epoch, "seed": seed,
                **{name: value for name, value in case.setting.values().items() if name != "name"},
                "method": case.setting.name, **trained, "load_average": [load, os.getloadavg()[0]],
                **link_values(net, links),
            }  # fmt: skip
        finished.add(Record(TRAINING, values, seed=seed))
    if progress is not None:
        progress(wanted[0][0].experiment if wanted else "", len(wanted), len(wanted))
    return [finished.records[case.key(epochs, seed)] for case, seed in wanted]


def _train(net: Network, config: Config, share: float | None) -> dict[str, Any]:
    """Train from start to end; the last worker runs in a share of the time.

    The first worker copies its model along the way and evaluates the copies on the test set afterwards. Time and bytes
    are the first worker's.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run_dir = Path(folder) / "run"
        config.save(run_dir)
        certs = ["--certs", net.certs] if net.certs is not None else []
        arguments = ["server", str(run_dir), "--host", net.host, *certs]
        server = stack.enter_context(role_process(net, 0, arguments, subprocess.DEVNULL))
        address = net.reach(server_port(run_dir, server))
        workers = []
        for number in range(config.job.workers):
            arguments = ["worker", str(run_dir), "--worker", str(number), "--server", address, *certs]
            workers.append(stack.enter_context(role_process(net, 1 + number, arguments, subprocess.PIPE)))
        for worker in workers[:-1]:
            _read(worker, lambda: None)
        stack.enter_context(_slowed(workers[-1], share))
        try:  # a slow worker may be behind when the others have finished the training
            code = workers[0].wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise LaconicError(f"the training has not ended after {PATIENCE_S:.0f} s") from None
        if code:
            raise LaconicError(f"worker 0 has ended with exit code {code}; its messages are above")
        track = json.loads((run_dir / "track-0.json").read_text(encoding="utf-8"))
    judged = track["judged"]
    return {
        "seconds": track["seconds"][-1], "iterations": track["iteration"][-1], "accuracy": judged["accuracy"],
        "accuracy_s": judged["seconds"], "push_bytes": [track["bytes_sent"][-1]],
        "pull_bytes": [track["bytes_received"][-1]],
    }  # fmt: skip


def _read(process: subprocess.Popen[Any], at_first: Callable[[], None]) -> threading.Thread:
    """Read a worker's reports in a thread, and call a function after the first one."""

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as out:
            if out.readline():
                at_first()
            for _ in out:
                pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


@contextmanager
def _slowed(process: subprocess.Popen[Any], share: float | None) -> Iterator[None]:
    """Let a worker run in a share of the time after its first exchange: it is stopped and continued in turns."""
    began, ended = threading.Event(), threading.Event()

    def alternate() -> None:
        began.wait()
        while share is not None and process.poll() is None and not ended.is_set():
            for one, seconds in ((signal.SIGSTOP, (1 - share) * PERIOD_S), (signal.SIGCONT, share * PERIOD_S)):
                try:
                    os.killpg(process.pid, one)
                except ProcessLookupError:
                    return
                time.sleep(seconds)

    thread = threading.Thread(target=alternate, daemon=True)
    thread.start()
    _read(process, began.set)
    try:
        yield
    finally:
        ended.set()
        began.set()
        thread.join()


class Reached(NamedTuple):
    """When a training reached an accuracy."""

    seconds: float | None
    best: float


def seconds_to(values: Mapping[str, Any], accuracy: float) -> Reached:
    """Return the seconds until the first copy with an accuracy, None if there is none, and the best accuracy."""
    points = list(zip(values["accuracy_s"], values["accuracy"], strict=True))
    first = next((seconds for seconds, top1 in points if top1 >= accuracy), None)
    return Reached(first, max(values["accuracy"]))
