"""Runs of ``laconic train`` and ``laconic demo`` as tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from laconic.records import Record, check_same_length
from laconic.report.plots import Cell, Data, Figures, Plot, Section, number
from laconic.report.summary import NOTHING, fixed, fraction

__all__ = ["SCHEMAS", "Prices", "Run", "presets", "runs_of", "section"]

SUMMARIES = ("train.run", "demo.method")


class RunSummary(TypedDict, total=False):
    """Fields of ``train.run`` and ``demo.method`` that are not merely printed; a run may lack any of them."""

    every: int | None
    iterations: int | None
    servers: int | None
    workers: int | None


class _Optional(TypedDict, total=False):
    judged: Judged
    iterations_per_epoch: float | None
    numel: int | None


class Track(_Optional):
    """Fields of ``train.track``: one worker's way through a run."""

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
TRACK_COLUMNS = ("iteration", "seconds", "loss", "bytes_sent", "bytes_received")
SMOOTH = 10
"""Points of a worker's own loss that one drawn is the mean of: a batch's loss jumps."""

NOTES = (
    "MB are frames of all workers, sent and received, counted where they leave. Seconds are those of the slowest "
    "worker; encoding may run beside computing, waiting is how long exchanges held it up. Of one run each: small "
    "differences are chance."
)


@dataclass(frozen=True)
class Prices:
    """Of an hour of one machine, and of a gigabyte sent, in any currency."""

    hour: float = 0.0
    gigabyte: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.hour or self.gigabyte)

    def cost(self, run: Run) -> float | None:
        """All workers and servers, for as long as the slowest took, and what they sent."""
        if run.seconds("total") is None and self.hour:
            return None
        hours = (run.seconds("total") or 0.0) / 3600
        return hours * (run.workers + run.servers) * self.hour + (run.nbytes or 0.0) / 1e9 * self.gigabyte


@dataclass
class Run:
    """One run: what it came to, and what its folder keeps beside that."""

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
        """In all."""
        rate = number(self.values.get("wire_bytes_per_iteration"))
        return number(self.values.get("wire_bytes")) if rate is None else rate * self.iterations

    def seconds(self, part: str) -> float | None:
        return number(self.values.get(f"{part}_s"))

    @property
    def setting(self) -> tuple[Any, ...]:
        """What runs must share to be compared."""
        return tuple(self.values.get(key) for key in ("model", "data", "workers"))


def runs_of(records: Sequence[Record]) -> list[Run]:
    """Runs by their names; what belongs to no run is an error of whoever wrote it, and left out."""
    runs: dict[str, Run] = {}
    for record in records:
        if record.kind in SUMMARIES:
            values = record.values
            base = str(values.get("run") or values.get("method") or "run")
            label, copies = base, 1
            while label in runs:
                copies += 1
                label = f"{base} ({copies})"
            runs[label] = Run(label, values)
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
        run.tracks.sort(key=lambda one: int(one.get("worker", 0)))
    return list(runs.values())


def _baselines(runs: Sequence[Run]) -> dict[str, Run]:
    """Of each run the one that it is compared with: method 1 of the same setting, or the first."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    found: dict[str, Run] = {}
    for some in groups.values():
        base = next((run for run in some if str(run.values.get("method")) == "1"), some[0])
        found |= {run.label: base for run in some}
    return found


def section(runs: Sequence[Run], prices: Prices) -> Section:
    """All that runs can show."""
    found = Section("runs", "Runs", _setting(runs))
    if not runs:
        return found
    table = overview(runs, prices)
    found.tables.append(table)
    plots = [*_outcomes(table.data), *_curves(runs), *_split(runs), *_layers(runs), *_staleness(runs)]
    found.plots += plots
    return found


def _setting(runs: Sequence[Run]) -> str:
    def common(key: str) -> Any:
        values = {str(run.values.get(key)) for run in runs}
        return values.pop() if len(values) == 1 and runs and runs[0].values.get(key) is not None else None

    words = []
    if common("workers"):
        workers, servers = runs[0].workers, runs[0].servers
        words.append(
            f"{servers} parameter server{'s' * (servers != 1)} and {workers} worker{'s' * (workers != 1)}, each a "
            "process of its own"
        )
    if common("model") and common("data"):
        words.append(f"{common('model')} on {common('data')}")
    if common("iterations"):
        words.append(f"{runs[0].iterations:,} iterations each")
    return "; ".join(words) + "." if words else ""


# -------------------------------------------------------------------------------------------------------------- table


CODECS = (("push", "codec_push"), ("pull", "codec_pull"))


def overview(runs: Sequence[Run], prices: Prices) -> Figures:
    """One row a run."""
    base = _baselines(runs)

    def less(run: Run) -> float | None:
        mine, whole = run.nbytes, base[run.label].nbytes
        return None if not mine or not whole else (whole / base[run.label].iterations) / (mine / run.iterations)

    def faster(run: Run) -> float | None:
        mine, whole = run.seconds("total"), base[run.label].seconds("total")
        return None if not mine or not whole else (whole / base[run.label].iterations) / (mine / run.iterations)

    Column = tuple[str, str, Callable[[Run], Cell], Callable[[Run], str]]  # noqa: N806 - it is a type

    def word(heading: str, key: str) -> Column:
        return (heading, heading, lambda run: _text(run.values.get(key)), lambda run: _text(run.values.get(key)) or "")

    def figure(heading: str, name: str, value: Callable[[Run], float | None], digits: int) -> Column:
        return heading, name, value, lambda run: fixed(value(run), digits)

    def seconds(heading: str, part: str) -> Column:
        return figure(f"{heading} s", f"{heading} s", lambda run: run.seconds(part), 2)

    def megabytes(run: Run) -> float | None:
        return None if run.nbytes is None else run.nbytes / 1e6

    def kilobytes(run: Run) -> float | None:
        return None if run.nbytes is None or not run.iterations else run.nbytes / run.iterations / 1e3

    words: list[Column] = [("run", "run", lambda run: run.label, lambda run: run.label)]
    words += [word("method", "method")] if any(str(r.values.get("method")) != r.label for r in runs) else []
    for key in ("model", "data", "workers"):
        words += [word(key, key)] if len({str(run.values.get(key)) for run in runs}) > 1 else []
    columns = [
        figure("accuracy %", "accuracy %", lambda run: run.accuracy, 1),
        figure("MB in all", "MB in all", megabytes, 2),
        figure("kB per iteration", "kB per iteration", kilobytes, 1),
        ("bytes, of the baseline", "times fewer bytes", less, lambda run: _of(less(run))),
        seconds("compute", "compute"), seconds("encode", "encode"), seconds("overlapped", "overlapped"),
        seconds("waiting", "communication"), seconds("apply", "apply"), seconds("total", "total"),
        ("speed-up", "speed-up", faster, lambda run: NOTHING if faster(run) is None else f"{faster(run):.2f}×"),
    ]  # fmt: skip
    if prices:
        columns.append(figure("cost", "cost", prices.cost, 4))
    if any(run.values.get("restarts") for run in runs):
        columns.append(figure("restarts", "restarts", lambda run: number(run.values.get("restarts")), 0))
    columns = [one for one in columns if any(one[2](run) is not None for run in runs)]
    if any("what" in run.values for run in runs):
        last: list[Column] = [word("what it does", "what")]
    else:
        last = [word(heading, key) for heading, key in CODECS if any(key in run.values for run in runs)]
    every = [*words, *columns, *last]
    data = Data(tuple(one[1] for one in every), [tuple(one[2](run) for one in every) for run in runs])
    rows = [tuple(one[3](run) for one in every) for run in runs]
    notes = NOTES
    if len({id(one) for one in base.values()}) == 1:
        notes += f" The baseline of bytes and speed-up is {next(iter(base.values())).label}."
    else:
        notes += " The baseline of bytes and speed-up is method 1 of the same model, data and workers, or the first."
    if prices:
        notes += (
            f" Cost: {prices.hour:g} an hour for each worker and server as long as the run took, and "
            f"{prices.gigabyte:g} a gigabyte."
        )
    return Figures("overview", "Runs side by side", tuple(one[0] for one in every), rows, len(words), data, notes)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _of(times: float | None) -> str:
    return NOTHING if times is None else fraction(1.0, times)


# -------------------------------------------------------------------------------------------------------------- plots


def _outcomes(data: Data) -> list[Plot]:
    found = []
    for ident, x, words in (
        ("accuracy-bytes", "MB in all", "what all workers sent and received"),
        ("accuracy-time", "total s", "the seconds of the slowest worker"),
    ):
        if {"accuracy %", x} <= set(data.columns):
            found.append(
                Plot(ident, f"Accuracy against {'bytes' if ident.endswith('bytes') else 'time'}",
                     f"Of each run at its end, on the test set, against {words}.",
                     "points", data, x, "accuracy %", series="run", log="x" if "MB" in x else "")
            )  # fmt: skip
    return found


def _curves(runs: Sequence[Run]) -> list[Plot]:
    """Along the run, of worker 0."""
    rows: list[tuple[Cell, ...]] = []
    bits: list[tuple[Cell, ...]] = []
    for run in runs:
        if run.tracks:
            rows += _track(run, run.tracks[0])
            bits += _bits(run, run.tracks[0])
    if not rows:
        return []
    found = _judged(runs)
    data = Data(("run", "iteration", "epoch", "seconds", "MB", "loss", "loss, smoothed"), rows)
    shown = f"Of worker 0; a point is the mean of the last {SMOOTH}."
    found += [
        Plot("loss-bytes", "Training loss against bytes", f"{shown} MB are its own, sent and received.", "line", data,
             "MB", "loss, smoothed", series="run", detail=("iteration",), log="x"),
        Plot("loss-time", "Training loss against time", shown, "line", data, "seconds", "loss, smoothed",
             series="run", detail=("iteration",)),
    ]  # fmt: skip
    if bits:
        by_epoch = Data(("run", "epoch", "direction", "bits"), bits)
        found.append(
            Plot("bits-epoch", "Bits per epoch", "Bits a parameter and iteration, of worker 0's frames, on average "
                 "over each epoch.", "line", by_epoch, "epoch", "bits", series="run", pick="direction", log="y")
        )  # fmt: skip
    return found


def _judged(runs: Sequence[Run]) -> list[Plot]:
    """Accuracy of worker 0's model on the way, judged when all was over."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        judged = run.tracks[0].get("judged") if run.tracks else None
        if judged:
            check_same_length(f"{run.label}, judged", **judged)
            sent = [a + b for a, b in zip(judged["bytes_sent"], judged["bytes_received"], strict=True)]
            rows += [
                (run.label, iteration, seconds, nbytes / 1e6, accuracy)
                for iteration, seconds, nbytes, accuracy in zip(
                    judged["iteration"], judged["seconds"], sent, judged["accuracy"], strict=True
                )
            ]
    if not rows:
        return []
    data = Data(("run", "iteration", "seconds", "MB", "accuracy %"), rows)
    shown = "Of worker 0's model at some points of the run, on the test set, judged after it."
    return [
        Plot("accuracy-along-bytes", "Accuracy along the run, against bytes", f"{shown} MB are its own, sent and "
             "received.", "line", data, "MB", "accuracy %", series="run", detail=("iteration",), log="x"),
        Plot("accuracy-along-time", "Accuracy along the run, against time", shown, "line", data, "seconds",
             "accuracy %", series="run", detail=("iteration",)),
    ]  # fmt: skip


def _track(run: Run, track: Mapping[str, Any]) -> list[tuple[Cell, ...]]:
    per_epoch = number(track.get("iterations_per_epoch"))
    check_same_length(run.label, **{name: track[name] for name in TRACK_COLUMNS})
    losses = [number(loss) for loss in track["loss"]]
    rows: list[tuple[Cell, ...]] = []
    for i, (iteration, seconds) in enumerate(zip(track["iteration"], track["seconds"], strict=True)):
        last = [loss for loss in losses[max(0, i - SMOOTH + 1) : i + 1] if loss is not None]
        sent = track["bytes_sent"][i] + track["bytes_received"][i]
        rows.append((run.label, iteration, iteration / per_epoch if per_epoch else None, seconds, sent / 1e6,
                     losses[i], sum(last) / len(last) if last else None))  # fmt: skip
    return rows


def _bits(run: Run, track: Mapping[str, Any]) -> list[tuple[Cell, ...]]:
    per_epoch, numel = number(track.get("iterations_per_epoch")), number(track.get("numel"))
    if not per_epoch or not numel:
        return []
    rows: list[tuple[Cell, ...]] = []
    iterations = [0, *track["iteration"]]
    for direction, key in (("push", "bytes_sent"), ("pull", "bytes_received")):
        totals, begin = [0, *track[key]], 0
        for i in range(1, len(iterations)):
            whole = iterations[i] // per_epoch > iterations[begin] // per_epoch
            if (whole or i == len(iterations) - 1) and iterations[i] > iterations[begin]:
                steps = iterations[i] - iterations[begin]
                sent = 8 * (totals[i] - totals[begin]) / numel / steps
                rows.append((run.label, iterations[i] / per_epoch, direction, sent))
                begin = i
    return rows


def _split(runs: Sequence[Run]) -> list[Plot]:
    """Where the seconds of the slowest worker went; what is left is starting, judging and telling."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        total = run.seconds("total")
        if total is None:
            continue
        known = {"computing": run.seconds("compute"), "waiting": run.seconds("communication"),
                 "applying": run.seconds("apply")}  # fmt: skip
        rest = max(0.0, total - sum(value or 0.0 for value in known.values()))
        rows += [(run.label, part, value) for part, value in (known | {"other": rest}).items() if value is not None]
    if not rows:
        return []
    data = Data(("run", "part", "seconds"), rows)
    return [
        Plot("time-split", "Where the time goes", "Of the slowest worker. Encoding happens while it computes or waits.",
             "bars", data, "seconds", "run", series="part", stacked=True)
    ]  # fmt: skip


def _layers(runs: Sequence[Run]) -> list[Plot]:
    sizes: list[tuple[Cell, ...]] = []
    errors: list[tuple[Cell, ...]] = []
    for run in runs:
        if run.slots is None:
            continue
        exchanges = max(1, int(run.slots["exchanges"]))
        for one in run.slots["slots"]:
            name, numel = str(one["slot"]), int(one["numel"])
            for direction, key in (("push", "sent"), ("pull", "received")):
                sizes.append((run.label, name, numel, direction, one[key] / exchanges / 1e3))
            if one["errors"]:
                errors.append((run.label, name, numel, sum(one["errors"]) / len(one["errors"]), len(one["errors"])))
    found = []
    if sizes:
        data = Data(("run", "layer", "values", "direction", "kB per exchange"), sizes)
        found.append(
            Plot("layer-bytes", "Bytes per layer and direction", "Of all workers together, an exchange.", "bars", data,
                 "kB per exchange", "layer", series="direction", pick="run", detail=("values",))
        )  # fmt: skip
    if errors:
        lossy = next((str(label) for label, _, _, lost, _ in errors if lost), None)
        data = Data(("run", "layer", "values", "share lost", "frames measured"), errors)
        found.append(
            Plot("slot-error", "Error per layer", "Squared norm of what a worker's frame leaves out over that of all "
                 "it had to send, what it remembered included; the mean of some exchanges. 0: nothing lost.", "bars",
                 data, "share lost", "layer", pick="run", begin=lossy, detail=("values", "frames measured"))
        )  # fmt: skip
    return found


def _staleness(runs: Sequence[Run]) -> list[Plot]:
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        missed = (run.staleness or {}).get("missed", {})
        total = sum(missed.values())
        rows += [(run.label, int(n), count, 100 * count / total) for n, count in missed.items()]
    if not rows:
        return []
    rows = [(label, f"{n} missed" if n else "none missed", count, share) for label, n, count, share in rows]
    data = Data(("run", "updates", "gradients", "% of gradients"), rows)
    return [
        Plot("staleness", "Staleness", "How many updates gradients missed: those between their worker's pull and their "
             "own.", "bars", data, "% of gradients", "updates", series="run", detail=("gradients",))
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ what if


def presets(runs: Sequence[Run], most: int = 12) -> list[dict[str, Any]]:
    """Where the what-if page can begin: the size, step time and rho that a run had."""
    found = []
    for run in runs:
        values = run.values
        numel, compute = number(values.get("numel")), run.seconds("compute")
        if not numel or not compute or not run.iterations or run.nbytes is None:
            continue
        every = int(values.get("every") or 1)
        exchanges = run.iterations / every
        found.append(
            {
                "name": run.label,
                "workers": run.workers,
                "nbytes": 4 * numel,
                # A minibatch of the model's is that of all workers together, on one node.
                "step_s": run.workers * compute / run.iterations,
                "every": every,
                "rho": min(1.0, run.nbytes / exchanges / run.workers / (8 * numel)),
            }
        )
    return found[:most]
