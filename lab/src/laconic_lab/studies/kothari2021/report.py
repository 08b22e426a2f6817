"""From Records to tables: the paper's four, what ours adds, and which claims hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from laconic.records import Record
from laconic_lab.studies.claims import Claim, measured
from laconic_lab.studies.intervals import Interval, mean_interval
from laconic_lab.studies.kothari2021 import timetables
from laconic_lab.studies.kothari2021.claims import CLAIMS, PAPER_ACCURACY, PAPER_MB
from laconic_lab.studies.kothari2021.experiments import METHOD_NAMES, MODES, PARTS
from laconic_lab.studies.kothari2021.times import LINKS, TIME
from laconic_lab.studies.kothari2021.timetables import MODEL_NAMES, place
from laconic_lab.studies.tables import Table, read_all

__all__ = ["ROUND", "RUN", "TIME", "Finding", "Results", "Row", "findings", "load", "tables"]

RUN, ROUND = "kothari2021.run", "kothari2021.round"


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
    def name(self) -> str:
        return str(self.values["name"])

    @property
    def seeds(self) -> list[int]:
        return [run["seed"] for run in self.runs]

    @property
    def final(self) -> list[float]:
        """Top-1 after the last epoch, by seed."""
        return [run["accuracy"][-1] for run in self.runs]

    @property
    def best(self) -> list[float]:
        return [max(run["accuracy"]) for run in self.runs]

    @property
    def bytes_per_iteration(self) -> float:
        """Both directions, all workers; iterations without an exchange count."""
        return fmean(sum(run["push_bytes"]) + sum(run["pull_bytes"]) for run in self.runs) / self.iterations

    @property
    def iterations(self) -> int:
        return int(self.values["iterations"])

    def curve(self, name: str) -> list[float]:
        """The mean over seeds, epoch by epoch."""
        return [fmean(some) for some in zip(*(run[name] for run in self.runs), strict=True)]

    def bytes_by_epoch(self) -> list[float]:
        """Sent and received until each epoch's end."""
        total, found = 0.0, []
        for pushed, pulled in zip(self.curve("push_bytes"), self.curve("pull_bytes"), strict=True):
            total += pushed + pulled
            found.append(total)
        return found


class Results:
    """Records by part, model and setting.

    Of a part run at several lengths or on several data, the one of most runs; of a changed setting, the newest.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.parts: dict[tuple[str, str], dict[str, Row]] = {}
        records = list(records)
        self.times = timetables.cells(record.values for record in records if record.kind == TIME)
        self.rounds = [record.values for record in records if record.kind == ROUND]
        groups: dict[tuple[str, str], dict[tuple[Any, ...], list[Mapping[str, Any]]]] = {}
        for record in records:
            if record.kind == RUN:
                values = record.values
                study = (values["data"], values["epochs"])
                groups.setdefault((values["part"], values["model"]), {}).setdefault(study, []).append(values)
        for key, some in groups.items():
            rows = self.parts.setdefault(key, {})
            for run in max(some.values(), key=len):
                row = rows.setdefault(_label(run), Row([]))
                if row.runs and row.values.get("options") != run.get("options"):
                    row.runs.clear()
                row.runs.append(run)
            for row in rows.values():
                row.runs.sort(key=lambda run: run["seed"])

    def row(self, model: str, method: str, part: str = "accuracy") -> Row | None:
        return self.parts.get((part, model), {}).get(method)

    def rows(self, part: str, model: str) -> list[Row]:
        found = self.parts.get((part, model), {})
        return sorted(found.values(), key=lambda row: place(row.name))

    def models(self, part: str) -> list[str]:
        return [model for model in MODEL_NAMES if (part, model) in self.parts]

    def loss(self, row: Row) -> list[float]:
        """Points of top-1 below method 1 of the same seed; below its mean where it has no such seed."""
        baseline = self.row(row.values["model"], "1")
        if baseline is None:
            return []
        by_seed = dict(zip(baseline.seeds, baseline.final, strict=True))
        mean = fmean(baseline.final)
        return [by_seed.get(seed, mean) - final for seed, final in zip(row.seeds, row.final, strict=True)]

    def less(self, row: Row) -> float | None:
        """How many times fewer bytes than method 1."""
        baseline = self.row(row.values["model"], "1")
        return None if baseline is None else baseline.bytes_per_iteration / row.bytes_per_iteration


def _label(run: Mapping[str, Any]) -> str:
    if run["part"] == "workers":
        return f"{run['name']}/{run['workers']}/{run['mode']}"
    return str(run["name"])


# ------------------------------------------------------------------------------------------------------------- claims


@dataclass(frozen=True)
class Finding:
    """A claim and what was measured of it."""

    claim: Claim
    measured: Interval
    on: str

    @property
    def verdict(self) -> str:
        claim, (mean, low, high, runs) = self.claim, self.measured
        if claim.relation == "=":
            inside = abs(mean - claim.value) <= claim.close
            return "yes" if inside else "no"
        holds = high < claim.value if claim.relation == "<" else low > claim.value
        fails = low > claim.value if claim.relation == "<" else high < claim.value
        return ("yes" if holds else "no" if fails else "not seen") + (", one run" if runs == 1 else "")

    def values(self) -> dict[str, Any]:
        claim, (mean, low, high, runs) = self.claim, self.measured
        return {
            "claim": claim.what, "section": claim.section, "relation": claim.relation, "claimed": claim.value,
            "unit": claim.unit, "measured": mean, "low": low, "high": high, "runs": runs, "verdict": self.verdict,
            "on": self.on,
        }  # fmt: skip


def findings(results: Results) -> list[Finding]:
    """Of every claim that the Records speak of."""
    return [Finding(claim, *found) for claim, found in measured(CLAIMS, MEASURES, results)]


Measured = tuple[Interval, str] | None


def _on(row: Row) -> str:
    return f"{row.values['data']}, {row.values['epochs']} epochs, {_runs(len(row.runs))}"


def _runs(count: int) -> str:
    return f"{count} run{'s' if count != 1 else ''}"


def _mb(model: str, method: str) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        row = results.row(model, method)
        if row is None:
            return None
        mb = row.bytes_per_iteration / 1e6
        return Interval(mb, mb, mb, len(row.runs)), _on(row)

    return measure


def _top1(model: str, method: str) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        row = results.row(model, method)
        return None if row is None else (mean_interval(row.final), _on(row))

    return measure


def _same_bytes(results: Results) -> Measured:
    one, three = results.row("vgg11", "1"), results.row("vgg11", "3")
    if one is None or three is None:
        return None
    times = three.bytes_per_iteration / one.bytes_per_iteration
    return Interval(times, times, times, len(three.runs)), _on(three)


def _six_over_five(results: Results) -> Measured:
    five, six = results.row("vgg11", "5"), results.row("vgg11", "6")
    if five is None or six is None:
        return None
    fives, mean = dict(zip(five.seeds, five.final, strict=True)), fmean(five.final)
    over = [top1 - fives.get(seed, mean) for seed, top1 in zip(six.seeds, six.final, strict=True)]
    return mean_interval(over), _on(six)


def _lenet_loss(results: Results) -> Measured:
    rows = [row for row in results.rows("accuracy", "lenet5") if row.name in METHOD_NAMES and row.name != "2w"]
    losses = [(fmean(results.loss(row)), row) for row in rows if results.loss(row) and row.name != "1"]
    if not losses:
        return None
    most, row = max(losses, key=lambda pair: pair[0])
    return Interval(most, most, most, len(row.runs)), f"method {row.name}: {_on(row)}"


UNSHAPED = LINKS[0]
"""The paper's workers "are very near to each other"."""


def _calm(results: Results, model: str, method: str) -> timetables.Cell | None:
    """On a busy machine who computes more is slowed down more: no claim is judged by that."""
    cell = results.times.get((model, UNSHAPED, method))
    return cell if cell is not None and cell.calm else None


def _times(model: str, method: str, what: str) -> Callable[[Results], Measured]:
    """Of an iteration, over method 1's."""

    def measure(results: Results) -> Measured:
        own, first = (_calm(results, model, name) for name in (method, "1"))
        if own is None or first is None or not first.seconds(what):
            return None
        times = own.seconds(what) / first.seconds(what)
        return Interval(times, times, times, 1), "the server, unshaped"

    return measure


def _minutes_saved(results: Results) -> Measured:
    one, six = (_calm(results, "vgg11", name) for name in ("1", "6"))
    if one is None or six is None:
        return None
    saved = one.minutes() - six.minutes()
    return Interval(saved, saved, saved, 1), "the server, unshaped"


MEASURES: dict[str, Callable[[Results], Measured]] = {
    "vgg_1_mb": _mb("vgg11", "1"),
    "vgg_3_as_1": _same_bytes,
    "vgg_6_mb": _mb("vgg11", "6"),
    "vgg_1_top1": _top1("vgg11", "1"),
    "vgg_5_top1": _top1("vgg11", "5"),
    "vgg_6_over_5": _six_over_five,
    "lenet_loss": _lenet_loss,
    "vgg_2w": _top1("vgg11", "2w"),
    "vgg_comm_5": _times("vgg11", "5", "communication_s"),
    "vgg_comm_6": _times("vgg11", "6", "communication_s"),
    "vgg_minutes_6": _minutes_saved,
    "lenet_time_6": _times("lenet5", "6", "total_s"),
}


# ------------------------------------------------------------------------------------------------------------- tables


def tables(results: Results) -> list[Table]:
    """All that the Records allow."""
    found = [_claims(results), _top_1(results)]
    found += [timetables.links(results.times), timetables.compute_and_communication(results.times), _cost(results)]
    found.append(timetables.end_to_end(results.times))
    found += [_ours(results), _ingredients(results), _frontier(results), _workers(results), _resnet50(results)]
    found.append(_compared(results))
    return [table for table in found if table.rows]


def _number(mean: float, low: float, high: float) -> str:
    digits = 3 if abs(mean) < 10 else 2
    return f"{mean:.{digits}f}" + (f" ({low:.{digits}f} to {high:.{digits}f})" if low < high else "")


def _claims(results: Results) -> Table:
    rows = []
    for one in findings(results):
        claim, (mean, low, high, _) = one.claim, one.measured
        relation = f"{claim.relation} " if claim.relation != "=" else ""
        claimed = f"{relation}{claim.value:g}{f' {claim.unit}' if claim.unit else ''}"
        rows.append((claim.what, claim.section, claimed, _number(mean, low, high), one.verdict, one.on))
    return Table("What the paper claims", ("claim", "section", "paper", "measured (95 %)", "verdict", "on"), rows)


def _spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, and the values themselves where there are several."""
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({', '.join(f'{one:.{digits}f}' for one in values)})"


def _top_1(results: Results) -> Table:
    rows = []
    for model in results.models("accuracy"):
        for row in results.rows("accuracy", model):
            loss, less = results.loss(row), results.less(row)
            rows.append((
                MODEL_NAMES[model], row.name, PAPER_ACCURACY.get((model, row.name), ""), _spread(row.final),
                "" if row.name == "1" or not loss else f"{-fmean(loss):+.2f}", f"{fmean(row.best):.2f}",
                f"{row.bytes_per_iteration / 1e6:.4g}", "" if less is None else f"{less:,.4g}",
            ))  # fmt: skip
    columns = (
        "model", "method", "paper, %", "top-1 % (by seed)", "points over method 1", "best epoch's %", "MB an iteration",
        "method 1's bytes over its",
    )  # fmt: skip
    return Table("Top-1 accuracy", columns, rows)


def _cost(results: Results) -> Table:
    """The paper's "average communication cost": megabytes, and seconds, which is what its formula gives."""
    rows = []
    for model in results.models("accuracy"):
        for row in results.rows("accuracy", model):
            paper = PAPER_MB.get((model, row.name))
            found = [results.times.get((model, link, row.name)) for link in LINKS]
            per = ["" if cell is None else f"{cell.seconds():.3g}" for cell in found]
            mb = f"{row.bytes_per_iteration / 1e6:.4g}"
            rows.append((MODEL_NAMES[model], row.name, "" if paper is None else f"{paper:g}", mb, *per))
    columns = ["model", "method", "paper, MB", "MB an iteration", "s an iteration", "at 1 Gbit/s", "at 100 Mbit/s"]
    while columns[-1] != "MB an iteration" and not any(row[len(columns) - 1] for row in rows):
        columns.pop()
    return Table("Average cost of an iteration", columns, [row[: len(columns)] for row in rows])


GOALS = (
    ("vgg11", "laconic", 285, 0.2),
    ("vgg11", "laconic-min", 1000, 0.5),
    ("lenet5", "laconic", 1, 0.2),
    ("lenet5", "laconic-min", 1, 0.2),
)


def _ours(results: Results) -> Table:
    rows = []
    for model, method, factor, points in GOALS:
        row = results.row(model, method)
        if row is None or not results.loss(row):
            continue
        less, (mean, low, high, runs) = results.less(row), mean_interval(results.loss(row))
        assert less is not None
        met = ("yes" if less >= factor and mean <= points else "no") + (", one run" if runs == 1 else "")
        bytes_goal = f"at most 1/{factor:,}" if factor > 1 else "any"
        rows.append((
            MODEL_NAMES[model], method, bytes_goal, f"1/{less:,.0f}", f"at most {points:g}",
            _number(mean, low, high), _runs(runs), met,
        ))  # fmt: skip
    columns = (
        "model", "method", "goal: bytes", "of method 1's", "goal: points lost", "lost (95 %)", "over", "met",
    )  # fmt: skip
    return Table("Fewer bytes without losing accuracy", columns, rows)


def _beside(results: Results, part: str, base: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for model in results.models(part):
        reference = results.row(model, base)
        shown = ([reference] if reference is not None else []) + results.rows(part, model)
        for row in shown:
            less, loss = results.less(row), results.loss(row)
            rows.append((
                MODEL_NAMES[model], row.name, _spread(row.final), "" if not loss else f"{-fmean(loss):+.2f}",
                _kilobytes(row.bytes_per_iteration), "" if less is None else f"{less:,.0f}",
            ))  # fmt: skip
    return rows


def _kilobytes(nbytes: float) -> str:
    """Four digits, and never an exponent.

    >>> _kilobytes(147_704_896), _kilobytes(477_350)
    ('147,705', '477.4')
    """
    return f"{nbytes / 1e3:,.0f}" if nbytes >= 1e7 else f"{nbytes / 1e3:,.4g}"


COLUMNS = ("model", "setting", "top-1 %", "points over method 1", "kB an iteration", "method 1's bytes over its")


def _ingredients(results: Results) -> Table:
    return Table("What each ingredient is worth", COLUMNS, _beside(results, "ingredients", "laconic-min"))


def _frontier(results: Results) -> Table:
    rows = _beside(results, "frontier", "laconic")
    rows.sort(key=lambda row: (row[0], -float(row[4].replace(",", ""))))
    return Table("Fewer and fewer bytes", COLUMNS, rows)


def _workers(results: Results) -> Table:
    """A row for each method and number of workers, the modes beside each other."""
    crowds: dict[tuple[str, int], dict[str, Row]] = {}
    for row in results.rows("workers", "lenet5"):
        crowds.setdefault((row.name, row.values["workers"]), {})[row.values["mode"]] = row
    rows = []
    for (name, count), modes in crowds.items():
        found = [modes.get(mode) for mode in MODES]
        kilobytes = [row.bytes_per_iteration / 1e3 for row in modes.values()]
        rows.append((
            name, str(count), f"{fmean(kilobytes):,.4g}", *("" if row is None else _top1_of(row) for row in found),
            *("" if row is None else _staleness(row) for row in found[1:]),
        ))  # fmt: skip
    columns = (
        "method", "workers", "kB an iteration", *(f"{mode}, top-1 %" for mode in MODES),
        *(f"{mode}: staleness, mean and most" for mode in MODES[1:]),
    )  # fmt: skip
    return Table("Four and eight workers", columns, rows)


def _top1_of(row: Row) -> str:
    return "diverged" if row.values["diverged"] else _spread(row.final)


def _staleness(row: Row) -> str:
    return f"{row.values['staleness_mean']:.2f}, {row.values['staleness_most']}"


def _resnet50(results: Results) -> Table:
    rounds = sorted(results.rounds, key=lambda values: place(values["name"]))
    first = next((values["bytes_per_iteration"] for values in rounds if values["name"] == "1"), None)
    rows = [
        (
            values["name"],
            f"{values['bytes_per_iteration'] / 1e6:.4g}",
            "" if first is None else f"{first / values['bytes_per_iteration']:,.4g}",
            *(f"{1e3 * values[name]:.1f}" for name in ("encode_s", "aggregate_s", "answer_s", "decode_s")),
        )
        for values in rounds
    ]
    columns = (
        "method", "MB an iteration", "method 1's bytes over its", "encode, ms an exchange", "server: mean",
        "server: encode", "decode",
    )  # fmt: skip
    return Table("ResNet-50's gradients", columns, rows)


def _compared(results: Results) -> Table:
    compared = other = runs = 0
    for rows in results.parts.values():
        for row in rows.values():
            for run in row.runs:
                if run.get("frames_compared"):
                    runs, compared, other = runs + 1, compared + run["frames_compared"], other + run["frames_other"]
    rows_ = [(f"{runs:,}", f"{compared:,}", f"{other:,}")] if runs else []
    return Table("Frames made and compared", ("runs", "frames compared", "that differ in value or size"), rows_)
