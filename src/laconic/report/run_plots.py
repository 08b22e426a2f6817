"""The report's section about runs: a table and plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from laconic.records import check_same_length
from laconic.report.plots import Cell, Data, DataTable, Mark, Plot, Question, Section, number
from laconic.report.runs import Prices, Run, baselines
from laconic.report.summary import NOTHING, fixed, fraction
from laconic.report.verdicts import Candidate, Verdict, decide
from laconic.tables import Table

__all__ = ["overview", "section"]

TRACK_COLUMNS = ("iteration", "seconds", "loss", "bytes_sent", "bytes_received")
SMOOTH = 10
"""A point of the loss curve is the mean of so many: the loss of single batches varies a lot."""
POINTS = 1.0
"""A run may end so many points of accuracy below its baseline and still be recommended."""
CODECS = (("push", "codec_push"), ("pull", "codec_pull"))
SECONDS = (
    ("compute", "compute"), ("encode", "encode"), ("overlapped", "overlapped"), ("waiting", "communication"),
    ("apply", "apply"), ("total", "total"),
)  # fmt: skip

NOTES = (
    "MB are the frames of all workers, sent and received, counted where they leave. Seconds are those of the slowest "
    "worker; encoding may overlap with computing, waiting is the time that exchanges delayed it. One run each: small "
    "differences are chance."
)


def section(runs: Sequence[Run], prices: Prices) -> Section:
    """Return the section about runs: a table and all plots that their Records allow."""
    if not runs:
        return Section("runs", "Runs")
    table = overview(runs, prices)
    plots = [*_outcomes(runs, table.data), *_curves(runs), *_split(runs), *_layers(runs), *_staleness(runs)]
    return Section("runs", "Runs", _setting(runs), [table], plots, Question.SERVER, _verdicts(runs))


def _verdicts(runs: Sequence[Run]) -> list[Verdict]:
    """Return the run to repeat of each model, data and number of workers, if its baseline was measured, too."""
    groups: dict[str, list[Run]] = {}
    for run, baseline in zip(runs, (baselines(runs)[run.label] for run in runs), strict=True):
        groups.setdefault(baseline.label, []).append(run)
    decisions = []
    for label, group in groups.items():
        baseline = next(run for run in group if run.label == label)
        candidates = {run.label: _candidate(run, baseline) for run in group}
        plain = candidates.pop(label)
        others = [one for one in candidates.values() if one is not None]
        if plain is None or not others or str(baseline.values.get("method")) != "1":
            continue
        words = [str(baseline.values[key]) for key in ("model", "data") if baseline.values.get(key)]
        workers = f"{baseline.workers} worker{'s' * (baseline.workers != 1)}"
        server = f"Parameter server, {' on '.join(words)}" if words else "Parameter server"
        situation = f"{server}, {workers}, on the link of these runs"
        decisions.append(decide(situation, plain, others, f"{POINTS:g} point", any_link=True))
    return decisions


def _candidate(run: Run, baseline: Run) -> Candidate | None:
    """Return seconds, bytes and accuracy of a run; None if it lacks one of them."""
    seconds, accuracy, wanted = run.seconds("total"), run.accuracy, baseline.accuracy
    if not seconds or not run.iterations or accuracy is None or wanted is None:
        return None
    nbytes = None if run.nbytes is None else run.nbytes / run.iterations
    lost = f"accuracy {accuracy:.1f} % beside {wanted:.1f} %, one run each"
    return Candidate(_method(run), seconds / run.iterations, nbytes, lost, accuracy >= wanted - POINTS)


def _method(run: Run) -> str:
    method = str(run.values.get("method") or run.label)
    return f"method {method}" if method == run.label else f"{run.label} (method {method})"


def _setting(runs: Sequence[Run]) -> str:
    """Return a sentence about what all runs have in common."""

    def common(key: str) -> Any:
        values = {str(run.values.get(key)) for run in runs}
        return values.pop() if len(values) == 1 and runs[0].values.get(key) is not None else None

    parts = []
    if common("workers"):
        workers, servers = runs[0].workers, runs[0].servers
        parts.append(
            f"{servers} parameter server{'s' * (servers != 1)} and {workers} worker{'s' * (workers != 1)}, each a "
            "process"
        )
    if common("model") and common("data"):
        parts.append(f"{common('model')} on {common('data')}")
    if common("iterations"):
        parts.append(f"{runs[0].iterations:,} iterations each")
    return "; ".join(parts) + "." if parts else ""


# -------------------------------------------------------------------------------------------------------------- table


def overview(runs: Sequence[Run], prices: Prices) -> DataTable:
    """Return the table of runs, one row each."""
    base = baselines(runs)

    def times_less(run: Run, value: float | None, base_value: float | None) -> float | None:
        """Return how many times less an iteration of a run takes than one of its baseline."""
        if not value or not base_value:
            return None
        return (base_value / base[run.label].iterations) / (value / run.iterations)

    def fewer_bytes(run: Run) -> float | None:
        return times_less(run, run.nbytes, base[run.label].nbytes)

    def speed_up(run: Run) -> float | None:
        return times_less(run, run.seconds("total"), base[run.label].seconds("total"))

    def megabytes(run: Run) -> float | None:
        return None if run.nbytes is None else run.nbytes / 1e6

    def kilobytes(run: Run) -> float | None:
        return None if run.nbytes is None or not run.iterations else run.nbytes / run.iterations / 1e3

    texts = [_Column("run", lambda run: run.label, str)]
    texts += [_text_column("method")] if any(str(run.values.get("method")) != run.label for run in runs) else []
    texts += [
        _text_column(key) for key in ("model", "data", "workers") if len({str(r.values.get(key)) for r in runs}) > 1
    ]
    numbers = [
        _number_column("accuracy %", lambda run: run.accuracy, 1),
        _number_column("MB in all", megabytes, 2),
        _number_column("kB per iteration", kilobytes, 1),
        _Column("times fewer bytes", fewer_bytes, lambda times: fraction(1.0, times), "bytes, of the baseline"),
        *(_number_column(f"{heading} s", lambda run, part=part: run.seconds(part), 2)  # type: ignore[misc]
          for heading, part in SECONDS),
        _Column("speed-up", speed_up, lambda times: f"{times:.2f}×"),
        *([_number_column("cost", prices.cost, 4)] if prices else []),
        *([_number_column("restarts", lambda run: number(run.values.get("restarts")), 0)]
          if any(run.values.get("restarts") for run in runs) else []),
    ]  # fmt: skip
    numbers = [column for column in numbers if any(column.value(run) is not None for run in runs)]
    if any("what" in run.values for run in runs):
        last = [_text_column("what", "what it does")]
    else:
        last = [_text_column(key, heading) for heading, key in CODECS if any(key in run.values for run in runs)]
    columns = [*texts, *numbers, *last]
    data = Data(tuple(column.name for column in columns), [tuple(c.value(run) for c in columns) for run in runs])
    table = Table(
        [column.heading or column.name for column in columns],
        [[column.text(run) for column in columns] for run in runs],
        text_columns=len(texts), title="Runs side by side", caption=_caption(base, prices),
    )  # fmt: skip
    return DataTable("overview", table, data)


class _Column(NamedTuple):
    """A column of the table of runs: its value for the CSV, and the text of a value that is not None."""

    name: str
    value: Callable[[Run], Any]
    format: Callable[[Any], str]
    heading: str = ""

    def text(self, run: Run) -> str:
        value = self.value(run)
        return ("" if self.format is str else NOTHING) if value is None else self.format(value)


def _text_column(key: str, name: str = "") -> _Column:
    return _Column(name or key, lambda run: None if (value := run.values.get(key)) is None else str(value), str)


def _number_column(name: str, value: Callable[[Run], float | None], digits: int) -> _Column:
    return _Column(name, value, lambda figure: fixed(figure, digits))


def _caption(base: Mapping[str, Run], prices: Prices) -> str:
    if len({run.label for run in base.values()}) == 1:
        baseline = next(iter(base.values())).label
    else:
        baseline = "method 1 of the same model, data and workers, or the first"
    caption = f"{NOTES} The baseline of bytes and speed-up is {baseline}."
    if prices:
        caption += (
            f" Cost: {prices.hour:g} an hour for each worker and server for the duration of the run, and "
            f"{prices.gigabyte:g} a gigabyte."
        )
    return caption


# -------------------------------------------------------------------------------------------------------------- plots


def _outcomes(runs: Sequence[Run], data: Data) -> list[Plot]:
    """Return the accuracy at the end of each run, against bytes and time."""
    base = {run.label: run for run in baselines(runs).values()}
    marks = [Mark("y", run.accuracy, f"baseline: {label}") for label, run in base.items() if run.accuracy is not None]
    return [
        Plot(f"accuracy-{against}", f"Accuracy against {against}", f"Final accuracy on the test set against {meaning}.",
             "points", data, x, "accuracy %", series="run", log=log, marks=tuple(marks[:1]) if len(base) == 1 else (),
             better=(-1, 1))
        for against, x, meaning, log in (
            ("bytes", "MB in all", "the bytes that all workers sent and received", "x"),
            ("time", "total s", "the seconds of the slowest worker", ""),
        )
        if {"accuracy %", x} <= set(data.columns)
    ]  # fmt: skip


def _curves(runs: Sequence[Run]) -> list[Plot]:
    """Return loss, accuracy and bits along the run, of worker 0."""
    rows: list[tuple[Cell, ...]] = []
    bits: list[tuple[Cell, ...]] = []
    for run in runs:
        if run.tracks:
            rows += _track(run, run.tracks[0])
            bits += _bits(run, run.tracks[0])
    if not rows:
        return []
    plots = _accuracy_along_run(runs)
    data = Data(("run", "iteration", "epoch", "seconds", "MB", "loss", "loss, smoothed"), rows)
    about = f"Loss of worker 0; a point is the mean of the last {SMOOTH}."
    plots += [
        Plot("loss-bytes", "Training loss against bytes", f"{about} MB that it sent and received.", "line", data,
             "MB", "loss, smoothed", series="run", detail=("iteration",), log="x"),
        Plot("loss-time", "Training loss against time", about, "line", data, "seconds", "loss, smoothed",
             series="run", detail=("iteration",)),
    ]  # fmt: skip
    if bits:
        by_epoch = Data(("run", "epoch", "direction", "bits"), bits)
        plots.append(
            Plot("bits-epoch", "Bits per epoch", "Bits a parameter and iteration in worker 0's frames, averaged over "
                 "each epoch.", "line", by_epoch, "epoch", "bits", series="run", pick="direction", log="y")
        )  # fmt: skip
    return plots


def _accuracy_along_run(runs: Sequence[Run]) -> list[Plot]:
    """Return the accuracy of worker 0's model at some iterations, evaluated after the run."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        judged = run.tracks[0].get("judged") if run.tracks else None
        if judged:
            check_same_length(f"{run.label}, judged", **judged)
            names = ("iteration", "seconds", "bytes_sent", "bytes_received", "accuracy")
            rows += [
                (run.label, iteration, seconds, (sent + received) / 1e6, accuracy)
                for iteration, seconds, sent, received, accuracy in zip(*(judged[name] for name in names), strict=True)
            ]
    if not rows:
        return []
    data = Data(("run", "iteration", "seconds", "MB", "accuracy %"), rows)
    about = "Accuracy of worker 0's model on the test set at some iterations, evaluated after the run."
    return [
        Plot("accuracy-along-bytes", "Accuracy along the run, against bytes", f"{about} MB that it "
             "sent and received.", "line", data, "MB", "accuracy %", series="run", detail=("iteration",), log="x"),
        Plot("accuracy-along-time", "Accuracy along the run, against time", about, "line", data, "seconds",
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
    """Return the parts of the slowest worker's time; the rest is starting, evaluating and reporting."""
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
        Plot("time-split", "Where the time goes", "Time of the slowest worker. Encoding overlaps with computing or "
             "waiting.", "bars", data, "seconds", "run", series="part", stacked=True)
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
    plots = []
    if sizes:
        data = Data(("run", "layer", "values", "direction", "kB per exchange"), sizes)
        plots.append(
            Plot("layer-bytes", "Bytes per layer and direction", "Bytes of all workers in one exchange.", "bars", data,
                 "kB per exchange", "layer", series="direction", pick="run", detail=("values",))
        )  # fmt: skip
    if errors:
        lossy = next((str(label) for label, _, _, lost, _ in errors if lost), None)
        data = Data(("run", "layer", "values", "relative squared error", "frames measured"), errors)
        plots.append(
            Plot("slot-error", "Error per layer", "Squared norm of what a worker's frame leaves out over that of "
                 "everything it had to send, its residual included; the mean of some exchanges. 0: nothing is lost. "
                 "Stochastic rounding may add more than there was: above 1.", "bars", data, "relative squared error",
                 "layer", pick="run", begin=lossy, detail=("values", "frames measured"))
        )  # fmt: skip
    return plots


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
        Plot("staleness", "Staleness", "Updates between the pull of a gradient's worker and its own update.",
             "bars", data, "% of gradients", "updates", series="run", detail=("gradients",))
    ]  # fmt: skip
