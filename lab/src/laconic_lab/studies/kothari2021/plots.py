"""Plots of the study, and which of them its page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from laconic.report.plots import Cell, Data, Mark, Plot
from laconic_lab.studies.figures import Panel
from laconic_lab.studies.kothari2021.claims import CLAIMS
from laconic_lab.studies.kothari2021.results import LINK_NAMES, MODEL_NAMES, Results, Row

__all__ = ["FIGURES", "make_plots"]

FIGURES = {
    "epochs": (Panel("kothari-lenet5-epochs", 3), Panel("kothari-vgg11-epochs", 30)),
    "bytes": (Panel("kothari-lenet5-bytes", 3), Panel("kothari-vgg11-bytes", 30)),
    "time": (Panel("kothari-lenet5-time", 3), Panel("kothari-vgg11-time", 30)),
    "frontier": (Panel("kothari-lenet5-frontier", 1.2), Panel("kothari-vgg11-frontier", 13)),
    "ingredients": (Panel("kothari-ingredients", 20, "VGG"), Panel("kothari-ingredients-bytes", None, "VGG")),
}

_CLAIMED = {claim.key: claim.value for claim in CLAIMS}
TOP1_MARKS = tuple(Mark("y", _CLAIMED[f"vgg_{method}_top1"], f"paper, method {method}") for method in "15")
BYTES_MARKS = tuple(Mark("x", 1e3 * _CLAIMED[f"vgg_{method}_mb"], f"paper, {method}") for method in "16")


def make_plots(results: Results) -> list[Plot]:
    """Return accuracy by epochs, bytes and time, the frontier, the ingredients, and more workers."""
    curves = [plot for model in results.models("accuracy") for plot in _curves(results, model)]
    curves += [_frontier(results, model) for model in results.models("accuracy")]
    return [*curves, *_ingredients(results), *_workers(results), *_time_shares(results)]


def _curves(results: Results, model: str) -> list[Plot]:
    methods = results.rows("accuracy", model)
    rows: list[tuple[Cell, ...]] = []
    timed_rows: list[tuple[Cell, ...]] = []
    for row in methods:
        for run in row.runs:
            megabytes = [nbytes / 1e6 for nbytes in Row.bytes_by_epoch(run)]
            for epoch, (top1, sent) in enumerate(zip(run["accuracy"], megabytes, strict=True), 1):
                rows.append((row.name, run["seed"], epoch, sent, top1))
        for (timed_model, link, method), timed in results.times.items():
            if (timed_model, method) != (model, row.name) or not timed.valid:
                continue
            busy = "" if timed.calm else " (busy)"
            minutes = timed.seconds() * row.iterations / row.values["epochs"] / 60
            timed_rows += [
                (LINK_NAMES[link] + busy, row.name, run["seed"], epoch, epoch * minutes, top1)
                for run in row.runs
                for epoch, top1 in enumerate(run["accuracy"], 1)
            ]
    caption = f"{MODEL_NAMES[model]}, {methods[0].values['data']}"
    marks = TOP1_MARKS if model == "vgg11" else ()
    data = Data(("method", "seed", "epoch", "MB", "top-1 %"), rows)
    shown = [
        Plot(f"kothari-{model}-epochs", f"{caption}: accuracy by epoch", "A line for each seed.", "line", data, "epoch",
             "top-1 %", series="method", group="seed", detail=("MB",), marks=marks),
        Plot(f"kothari-{model}-bytes", f"{caption}: accuracy by bytes", "After each epoch, on the test set; MB sent "
             "and received so far by all workers; a line for each seed.", "line", data, "MB", "top-1 %",
             series="method", group="seed", detail=("epoch",), log="x", marks=marks),
    ]  # fmt: skip
    if timed_rows:
        data = Data(("link", "method", "seed", "epoch", "minutes", "top-1 %"), timed_rows)
        shown.append(
            Plot(f"kothari-{model}-time", MODEL_NAMES[model], "Accuracy after each epoch by the time that server and "
                 "workers took for as many iterations over that link.", "line", data, "minutes", "top-1 %",
                 series="method", group="seed", pick="link", detail=("epoch",), log="x", marks=marks)
        )  # fmt: skip
    return shown


def _kilobytes(run: Mapping[str, Any]) -> float:
    return float(Row.bytes_by_epoch(run)[-1] / run["iterations"] / 1e3)


def _frontier(results: Results, model: str) -> Plot:
    rows: list[tuple[Cell, ...]] = []
    for experiment in ("accuracy", "frontier"):
        for row in results.rows(experiment, model):
            series = row.name if experiment == "accuracy" else "other settings"
            rows += [(series, row.name, run["seed"], _kilobytes(run), run["accuracy"][-1]) for run in row.runs]
    data = Data(("method", "setting", "seed", "kB per iteration", "last top-1 %"), rows)
    return Plot(f"kothari-{model}-frontier", f"{MODEL_NAMES[model]}: how few bytes suffice", "Last accuracy of each "
                "run by its bytes in both directions of all workers.", "points", data, "kB per iteration",
                "last top-1 %", series="method", detail=("setting", "seed"), log="x", better=(-1, 1),
                marks=BYTES_MARKS if model == "vgg11" else ())  # fmt: skip


def _ingredients(results: Results) -> list[Plot]:
    rows: list[tuple[Cell, ...]] = []
    for model in results.models("ingredients"):
        base = results.row(model, "laconic-min")
        for row in [*([base] if base is not None else []), *results.rows("ingredients", model)]:
            run = row.runs[0]
            rows.append((MODEL_NAMES[model], row.name, run["accuracy"][-1], _kilobytes(run)))
    if not rows:
        return []
    names = [str(row[0]) for row in rows]
    most = max(names, key=names.count)
    data = Data(("model", "setting", "last top-1 %", "kB per iteration"), rows)
    about = "laconic-min with one ingredient changed at a time, the first seed of each."
    return [
        Plot("kothari-ingredients", "Accuracy without one ingredient", about, "bars", data, "last top-1 %", "setting",
             pick="model", begin=most, detail=("kB per iteration",), zero=False),
        Plot("kothari-ingredients-bytes", "Bytes without one ingredient", about, "bars", data, "kB per iteration",
             "setting", pick="model", begin=most, detail=("last top-1 %",)),
    ]  # fmt: skip


def _workers(results: Results) -> list[Plot]:
    rows: list[tuple[Cell, ...]] = [
        (run["name"], run["mode"], run["workers"], f"{run['mode']}, {run['workers']} workers", run["accuracy"][-1],
         run.get("staleness_mean"), run.get("staleness_most"))
        for row in results.rows("workers", "lenet5")
        for run in row.runs
    ]  # fmt: skip
    if not rows:
        return []
    columns = ("method", "mode", "workers", "setting", "top-1 %", "staleness, mean", "staleness, most")
    data = Data(columns, rows)
    # A bar for each setting: its first seed.
    first = Data(columns, list({(row[0], row[3]): row for row in reversed(rows)}.values())[::-1])
    return [
        Plot("kothari-workers", "More workers", "Accuracy by workers and mode.", "points", data, "workers", "top-1 %",
             series="mode", pick="method", detail=("staleness, mean", "staleness, most")),
        Plot("kothari-staleness", "Staleness", "Mean number of updates that a gradient missed.", "bars", first,
             "staleness, mean", "setting", pick="method", detail=("staleness, most", "top-1 %")),
    ]  # fmt: skip


SHARES: Sequence[tuple[str, str]] = (("compute", "compute_s"), ("wait", "communication_s"), ("apply", "apply_s"))


def _time_shares(results: Results) -> list[Plot]:
    rows: list[tuple[Cell, ...]] = [
        (f"{MODEL_NAMES[model]}, {LINK_NAMES[link]}", method, share, 1e3 * timed.seconds(name))
        for (model, link, method), timed in results.times.items()
        if timed.valid
        for share, name in SHARES
    ]
    if not rows:
        return []
    data = Data(("model and link", "method", "share", "ms per iteration"), rows)
    return [
        Plot("kothari-times", "Shares of an iteration's time", "Server and workers over links of these rates.", "bars",
             data, "ms per iteration", "method", series="share", pick="model and link", stacked=True)
    ]  # fmt: skip
