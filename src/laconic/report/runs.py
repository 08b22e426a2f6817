"""Runs of ``laconic train`` and ``laconic demo``, read from Records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from laconic.records import Record
from laconic.report.plots import number
from laconic.units import MAX_TIME

__all__ = ["SCHEMAS", "Prices", "Run", "baselines", "presets", "runs_of"]

SUMMARIES = ("train.run", "demo.method")
MAX_NUMEL, MAX_WORKERS = 1 << 33, 4096
"""Runs beyond these are in the table, but no setting of the sliders."""


class RunSummary(TypedDict, total=False):
    """Fields of ``train.run`` and ``demo.method`` with which the report computes; a run may lack any of them."""

    every: int | None
    iterations: int | None
    servers: int | None
    workers: int | None


class _Optional(TypedDict, total=False):
    judged: Judged
    iterations_per_epoch: float | None
    numel: int | None


class Track(_Optional):
    """Fields of ``train.track``: loss and bytes of one worker along a run."""

    bytes_received: list[float]
    bytes_sent: list[float]
    iteration: list[int]
    loss: list[float | None]
    run: str
    seconds: list[float]
    worker: int


class Judged(TypedDict):
    """Accuracy of worker 0's model at some iterations, computed after the run."""

    accuracy: list[float]
    bytes_received: list[float]
    bytes_sent: list[float]
    iteration: list[int]
    seconds: list[float]


class Slots(TypedDict):
    """Fields of ``train.slots``."""

    exchanges: int
    run: str
    slots: list[Slot]


class Slot(TypedDict):
    errors: list[float]
    numel: int
    received: float
    sent: float
    slot: str


class Staleness(TypedDict):
    """Fields of ``train.staleness``: gradients by the number of updates they missed."""

    missed: dict[str, int]
    run: str


SCHEMAS: dict[str, Any] = {
    "train.run": RunSummary, "demo.method": RunSummary, "train.track": Track, "train.slots": Slots,
    "train.staleness": Staleness,
}  # fmt: skip


@dataclass(frozen=True)
class Prices:
    """Prices of an hour of one machine and of a gigabyte sent, in any currency."""

    hour: float = 0.0
    gigabyte: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.hour or self.gigabyte)

    def cost(self, run: Run) -> float | None:
        """Return the cost of all workers and servers for the duration of the run, and of the bytes sent."""
        if run.seconds("total") is None and self.hour:
            return None
        hours = (run.seconds("total") or 0.0) / 3600
        return hours * (run.workers + run.servers) * self.hour + (run.nbytes or 0.0) / 1e9 * self.gigabyte


@dataclass
class Run:
    """One run: its summary, and the other Records of its folder."""

    label: str
    values: Mapping[str, Any]
    tracks: list[Mapping[str, Any]] = field(default_factory=list)
    slots: Mapping[str, Any] | None = None
    staleness: Mapping[str, Any] | None = None

    @property
    def workers(self) -> int:
        return int(self.values.get("workers") or 1)

    @property
    def servers(self) -> int:
        return int(self.values.get("servers") or 1)

    @property
    def iterations(self) -> int:
        return int(self.values.get("iterations") or 0)

    @property
    def accuracy(self) -> float | None:
        return number(self.values.get("accuracy"))

    @property
    def nbytes(self) -> float | None:
        """Bytes of the whole run."""
        rate = number(self.values.get("wire_bytes_per_iteration"))
        return number(self.values.get("wire_bytes")) if rate is None else rate * self.iterations

    def seconds(self, part: str) -> float | None:
        return number(self.values.get(f"{part}_s"))

    @property
    def setting(self) -> tuple[Any, ...]:
        """Model, data and workers: runs are compared if these are equal."""
        return tuple(self.values.get(key) for key in ("model", "data", "workers"))


def runs_of(records: Sequence[Record]) -> list[Run]:
    """Return the runs that have a summary, with the Records of their folders; Records of other runs are ignored."""
    runs: dict[str, Run] = {}
    for record in records:
        if record.kind in SUMMARIES:
            name = str(record.values.get("run") or record.values.get("method") or "run")
            label, copies = name, 1
            while label in runs:
                copies += 1
                label = f"{name} ({copies})"
            runs[label] = Run(label, record.values)
    for record in records:
        run = runs.get(str(record.values.get("run")))
        if run is None:
            continue
        if record.kind == "train.track":
            run.tracks.append(record.values)
        elif record.kind == "train.slots":
            run.slots = record.values
        elif record.kind == "train.staleness":
            run.staleness = record.values
    for run in runs.values():
        run.tracks.sort(key=lambda track: int(track["worker"]))
    return list(runs.values())


def baselines(runs: Sequence[Run]) -> dict[str, Run]:
    """Return the run that each run is compared with: method 1 of the same model, data and workers, or the first run."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return {
        run.label: next((other for other in group if str(other.values.get("method")) == "1"), group[0])
        for group in groups.values()
        for run in group
    }


def presets(runs: Sequence[Run], most: int = 12) -> list[dict[str, Any]]:
    """Return settings of the what-if sliders that describe runs: size, step time and rho."""
    settings = []
    for run in runs:
        numel, compute_s = number(run.values.get("numel")), run.seconds("compute")
        if not numel or not compute_s or not run.iterations or run.nbytes is None:
            continue
        if not (0 < numel <= MAX_NUMEL and 0 < run.workers <= MAX_WORKERS and 0 < compute_s <= MAX_TIME):
            continue
        every = max(1, int(run.values.get("every") or 1))
        exchanges = run.iterations / every
        settings.append({
            "name": run.label, "workers": run.workers, "nbytes": 4 * numel, "every": every,
            # The paper's minibatch is that of all workers together, on one node.
            "step_s": run.workers * compute_s / run.iterations,
            "rho": min(1.0, run.nbytes / exchanges / run.workers / (8 * numel)),
        })  # fmt: skip
    return settings[:most]
