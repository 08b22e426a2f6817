"""From Records to tables: what is lost, what is sent, what it costs to compute, and where the bound is met."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from laconic.plan import Bound
from laconic.records import Record
from laconic_lab.studies.homomorphic import speed
from laconic_lab.studies.homomorphic.experiments import BITS, PARTS, WORKERS
from laconic_lab.studies.homomorphic.settings import said
from laconic_lab.studies.homomorphic.study import KIND
from laconic_lab.studies.tables import Table, read_all

__all__ = ["GOALS", "Finding", "Goal", "Results", "Row", "findings", "load", "tables"]

MODEL_NAMES = {"mlp": "MLP", "lenet5": "LeNet-5", "vgg11": "VGG-11", "alexnet": "AlexNet"}
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
RATES = ((1e9, "1 Gbit/s"), (10e9, "10 Gbit/s"))
CROWDS = (4, 16, 25)


def load(folder: Path) -> list[Record]:
    """All Records of the study that a folder keeps."""
    return read_all(folder, PARTS)


@dataclass
class Row:
    """All runs of one setting, by seed."""

    runs: list[Mapping[str, Any]]

    @property
    def values(self) -> Mapping[str, Any]:
        return self.runs[0]

    @property
    def layers(self) -> str:
        return said(self.values["layers"], self.values["rules"])

    @property
    def codec(self) -> str:
        return "float32" if self.values["codec"] == "none" else str(self.values["codec"])

    @property
    def final(self) -> list[float]:
        """Top-1 after the last epoch, by seed."""
        return [run["accuracy"][-1] for run in self.runs]

    @property
    def top1(self) -> float:
        return fmean(self.final)

    @property
    def rho(self) -> float:
        """Bytes of a worker's message over those of the dense model in float32: headers, scales and all."""
        return float(self.values["rho"])


class Results:
    """Records by part, model and setting; steps and codecs by device."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.rows: dict[tuple[str, str], list[Row]] = {}
        self.steps: dict[tuple[str, str, str], Mapping[str, Any]] = {}
        """By device, model or layer, and scheme."""
        self.codecs: dict[tuple[str, str], Mapping[str, Any]] = {}
        """By device and codec."""
        found: dict[tuple[str, str], dict[tuple[Any, ...], Row]] = {}
        for record in records:
            values = record.values
            if record.kind == KIND:
                rows = found.setdefault((values["part"], values["model"]), {})
                rows.setdefault(_setting(values), Row([])).runs.append(values)
            elif record.kind == speed.SCHEME_KIND:
                self.steps[values["device"], values["case"], values["scheme"]] = values
            elif record.kind == speed.KIND:
                self.codecs[values["device"], values["codec"]] = values
        for key, some in found.items():
            for row in some.values():
                row.runs.sort(key=lambda run: run["seed"])
            self.rows[key] = list(some.values())

    def find(self, part: str, model: str, layers: str | None = None, codec: str = "none", **more: Any) -> Row | None:
        for row in self.rows.get((part, model), []):
            values = row.values
            if (values["layers"], values["codec"]) == (layers, codec) and all(
                values[name] == value for name, value in more.items()
            ):
                return row
        return None

    def dense(self, row: Row) -> Row | None:
        """Float32 of the same model and workers; of two workers where there is none."""
        for workers in (row.values["workers"], 2):
            found = self.find("sums", row.values["model"], workers=workers)
            if found is not None:
                return found
        return None

    def lost(self, row: Row) -> float | None:
        """Points of top-1 below dense float32: the mean of all seeds below the mean of all seeds."""
        dense = self.dense(row)
        return None if dense is None else dense.top1 - row.top1

    def models(self, *parts: str) -> list[str]:
        return [model for model in MODEL_NAMES if any((part, model) in self.rows for part in parts)]

    def h(self, model: str, scheme: str, device: str) -> float | None:
        """Of a scheme's step; 1 for dense layers. None where it was not measured, or too unsteady."""
        if scheme == "dense":
            return 1.0
        found = self.steps.get((device, model, scheme))
        return None if found is None else found["h"]

    def dense_step_s(self, model: str, device: str) -> float | None:
        """The fastest of the dense model's steps that was seen."""
        times = [values["dense_s"] for (at, case, _), values in self.steps.items() if (at, case) == (device, model)]
        return min(times, default=None)

    def coding_s(self, codec: str, numel: float, device: str) -> float:
        """What encoding and decoding so many numbers takes a worker."""
        found = self.codecs.get((device, codec))
        return 0.0 if found is None else (found["encode_s"] + found["decode_s"]) * numel / found["values"]


_SETTING = ("model", "data", "epochs", "layers", "codec", "small", "workers", "carry", "at_renewal", "batch", "lr",
            "decay")  # fmt: skip


def _setting(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*(values[name] for name in _SETTING), tuple(map(tuple, values["rules"])))


# -------------------------------------------------------------------------------------------------------------- goals


@dataclass(frozen=True)
class Goal:
    """The most that a setting may lose.

    Args:
        what: In words.
        part: Where it is trained.
        model: Of which model.
        most: Points of top-1 below dense float32.
        setting: What its Records say.
    """

    what: str
    part: str
    model: str
    most: float
    setting: Mapping[str, Any]


GOALS = (
    Goal("two bits, 4 workers", "sums", "mlp", 0.2, {"codec": "ef|thc:2", "workers": 4}),
    Goal("two bits, 8 workers", "sums", "mlp", 0.2, {"codec": "ef|thc:2", "workers": 8}),
    Goal("a tenth of the numbers", "layers", "mlp", 0.5, {"layers": "subspace:0.1"}),
    Goal("a tenth, by two bits", "products", "mlp", 0.7, {"layers": "subspace:0.1", "codec": "ef|thc:2"}),
    Goal("two bits", "sums", "vgg11", 0.2, {"codec": "ef|thc:2", "workers": 2}),
    Goal("one bit", "sums", "vgg11", 0.3, {"codec": "ef|thc:1", "workers": 2}),
    Goal("a sixth, by one bit", "products", "vgg11", 0.5, {"layers": "subspace:0.125", "codec": "ef|thc:1"}),
    Goal("a thirteenth, by one bit", "products", "vgg11", 0.5, {"layers": "subspace:0.025", "codec": "ef|thc:1"}),
)


@dataclass(frozen=True)
class Finding:
    """A goal and what was measured."""

    goal: Goal
    row: Row
    lost: float

    @property
    def met(self) -> bool:
        return self.lost <= self.goal.most

    def values(self) -> dict[str, Any]:
        return {
            "goal": f"{MODEL_NAMES[self.goal.model]}, {self.goal.what}", "most": self.goal.most, "lost": self.lost,
            "rho": self.row.rho, "runs": len(self.row.runs), "verdict": "met" if self.met else "missed",
        }  # fmt: skip


def findings(results: Results) -> list[Finding]:
    """Of every goal that the Records speak of."""
    found = []
    for goal in GOALS:
        row = results.find(goal.part, goal.model, **dict(goal.setting))
        lost = None if row is None else results.lost(row)
        if row is not None and lost is not None:
            found.append(Finding(goal, row, lost))
    return found


# ------------------------------------------------------------------------------------------------------------- tables


def tables(results: Results) -> list[Table]:
    """All that the Records allow."""
    found = [_goals(results), _sums(results), _layers(results), _products(results), _search(results)]
    found += [_steps(results), _codecs(results), _bounds(results), _compared(results)]
    return [table for table in found if table.rows]


def _goals(results: Results) -> Table:
    rows = []
    for one in findings(results):
        values = one.values()
        rows.append((
            values["goal"], f"{one.row.layers} × {one.row.codec}", _small(one.row.rho), _spread(one.row.final),
            f"{one.lost:+.2f}", f"{one.goal.most:g}", values["verdict"],
        ))  # fmt: skip
    columns = ("goal", "setting", "rho", "top-1 %, by seed", "points lost", "at most", "verdict")
    return Table("What was asked", columns, rows)


def _sums(results: Results) -> Table:
    """Dense layers, by bits and workers."""
    rows = []
    for model in results.models("sums"):
        for codec in ("none", *(f"ef|thc:{bits}" for bits in BITS)):
            found = [results.find("sums", model, None, codec, workers=count) for count in WORKERS]
            if not any(found):
                continue
            sent = next(row for row in found if row is not None)
            rows.append((MODEL_NAMES[model], sent.codec, _small(sent.rho), *(_top1(results, row) for row in found)))
    columns = ("model", "codec", "rho up", *(f"{count} workers" for count in WORKERS))
    return Table("Sums of integers, top-1 %", columns, rows)


def _layers(results: Results) -> Table:
    rows = []
    for model in results.models("layers"):
        for row in sorted(results.rows["layers", model], key=_by_scheme):
            h = [_number(results.h(model, row.layers, device)) for device in DEVICES]
            rows.append((MODEL_NAMES[model], row.layers, f"{row.values['rho_layers']:.3f}", _spread(row.final),
                         _signed(results.lost(row)), *h))  # fmt: skip
    columns = ("model", "scheme", "rho", "top-1 %", "points lost", *(f"h, {name}" for name in DEVICES.values()))
    return Table("Layers in fewer numbers", columns, rows)


def _products(results: Results) -> Table:
    rows = []
    for model in results.models("products"):
        for row in sorted(results.rows["products", model], key=lambda row: -row.rho):
            h = [_number(results.h(model, row.layers, device)) for device in DEVICES]
            rows.append((
                MODEL_NAMES[model], row.layers, row.codec, str(row.values["workers"]),
                _small(row.values["rho_layers"]), _small(_nominal(row)), _small(row.rho), _spread(row.final),
                _signed(results.lost(row)), *h,
            ))  # fmt: skip
    columns = ("model", "layers", "codec", "workers", "rho of the layers", "rho of the values", "rho of the bytes",
               "top-1 %", "points lost", *(f"h, {name}" for name in DEVICES.values()))  # fmt: skip
    return Table("Both", columns, rows)


def _nominal(row: Row) -> float:
    """Numbers times their bits: what is left of ``rho`` when tensors are so large that headers do not count."""
    bits = row.codec.partition(":")[2].partition(",")[0]
    return float(row.values["rho_layers"]) * (float(bits) / 32 if bits else 1.0)


def _search(results: Results) -> Table:
    rows = []
    for model in results.models("search"):
        for row in sorted(results.rows["search", model], key=lambda row: -row.top1):
            held = f"{row.values['held_loss'][-1]:.3f}"
            rows.append((row.layers, row.codec, _changes(row), _small(row.rho), f"{row.top1:.2f}", held))
    return Table("How the products were found", ("layers", "codec", "else", "rho", "top-1 %", "loss, held out"), rows)


def _changes(row: Row) -> str:
    """What is not as usual."""
    usual = {"lr": 0.05, "decay": 5e-4, "carry": True, "at_renewal": "spend"}
    names = {"lr": "rate", "decay": "decay", "carry": "scales", "at_renewal": "momentum"}
    words = {False: "settled first", "forget": "forgotten at renewals"}
    changed = {name: row.values[name] for name, value in usual.items() if row.values[name] != value}
    return ", ".join(f"{names[name]} {words.get(value, value)}" for name, value in changed.items())


def _steps(results: Results) -> Table:
    """What a step costs where nothing was trained: layers of AlexNet's size."""
    rows = []
    cases = {(case, scheme): None for _, case, scheme in results.steps if case not in results.models("layers")}
    for case, scheme in cases:
        found = [results.steps.get((device, case, scheme)) for device in DEVICES]
        rho = next(one["rho"] for one in found if one is not None)
        h = [_number(None if one is None else one["h"]) for one in found]
        rows.append((MODEL_NAMES.get(case, case), scheme, f"{rho:.3f}", *h))
    columns = ("model or layer", "scheme", "rho", *(f"h, {name}" for name in DEVICES.values()))
    return Table("What a step costs", columns, rows)


def _codecs(results: Results) -> Table:
    rows = []
    for device, codec in results.codecs:
        one = results.codecs[device, codec]
        each = [1e9 * one[name] / one["values"] for name in ("encode_s", "decode_s")]
        rows.append((DEVICES[device], codec, *(f"{ns:.2f}" for ns in each), f"{one['error']:.3f}"))
    columns = ("on", "codec", "encode, ns a value", "decode, ns a value", "error of one sender")
    return Table("What a codec costs", columns, rows)


def _bounds(results: Results) -> Table:
    """The least multiple of the ideal time that is feasible, for every way to train a model."""
    rows = []
    for device, name in DEVICES.items():
        for model, layers, codec, rho, numel, dense in _ways(results):
            h, step = results.h(model, layers, device), results.dense_step_s(model, device)
            if h is None or step is None:
                continue
            cells = []
            for rate, _ in RATES:
                for crowd in CROWDS:
                    bound = Bound(workers=crowd, nbytes=4 * dense, step_s=step, bandwidth=rate / 8)
                    total = bound.with_encoding(h, results.coding_s(codec, numel, device))
                    cells.append(_cell(bound.r_min(rho, total), crowd))
            how = f"{layers} × {'float32' if codec == 'none' else codec}"
            rows.append((f"{MODEL_NAMES.get(model, model)}, {name}", how, _small(rho), f"{h:.2f}", *cells))
    columns = ("model", "how", "rho", "h", *(f"{rate}, {crowd}" for _, rate in RATES for crowd in CROWDS))
    return Table("Where the bound is met", columns, rows)


def _ways(results: Results) -> Iterator[tuple[str, str, str, float, int, int]]:
    """Model, layers, codec, rho, numbers sent and numbers of the dense model: trained ones, then AlexNet's."""
    for model in results.models("sums", "layers", "products"):
        some = [row for part in ("sums", "layers", "products") for row in results.rows.get((part, model), [])]
        seen = set()
        for row in sorted(some, key=lambda row: -row.rho):
            key = (row.layers, row.codec)
            if key not in seen:
                seen.add(key)
                values = row.values
                yield model, row.layers, values["codec"], row.rho, values["numel"], values["numel_dense"]
    for (device, case, scheme), values in results.steps.items():
        if case == "alexnet" and device == "cpu":
            yield case, scheme, "none", values["rho"], values["numel_compressed"], values["numel"]
            for codec in ("ef|thc:4", "ef|thc:1"):
                bits = int(codec[-1])
                rho = values["rho"] * (bits / 32 + 1 / 1024)
                yield case, scheme, codec, rho, values["numel_compressed"], values["numel"]


def _cell(r: float, crowd: int) -> str:
    """The least multiple; in brackets where even one node is faster."""
    return f"{r:.3g}" if r < crowd else f"({r:.3g})"


def _compared(results: Results) -> Table:
    runs = [run for some in results.rows.values() for row in some for run in row.runs]
    compared, other = (sum(run[name] for run in runs) for name in ("frames_compared", "frames_other"))
    rows = [(str(len(runs)), f"{compared:,}", str(other))] if compared else []
    return Table("Frames compared with what was computed", ("runs", "frames made", "of them other"), rows)


# -------------------------------------------------------------------------------------------------------------- words


def _by_scheme(row: Row) -> tuple[str, float]:
    return str(row.values["layers"]).partition(":")[0], -float(row.values["rho_layers"])


def _top1(results: Results, row: Row | None) -> str:
    if row is None:
        return "–"
    lost = results.lost(row)
    return f"{row.top1:.2f}" + ("" if lost is None or row.codec == "float32" else f" ({-lost:+.2f})")


def _spread(values: Sequence[float]) -> str:
    mean = f"{fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ({', '.join(f'{one:.2f}' for one in values)})"


def _small(rho: float) -> str:
    return f"{rho:.3g}"


def _signed(points: float | None) -> str:
    return "–" if points is None else f"{points:+.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
