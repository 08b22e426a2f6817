"""Plots of the study: the paper's curves with its settings and measured ones, and predictions against real runs."""

from __future__ import annotations

from collections.abc import Iterator

from laconic.plan.jang2017 import ALEXNET, ALEXNET_EPOCHS, GZIP, NODES, WORKERS
from laconic.report.plots import Cell, Data, Mark, Plot
from laconic_lab.studies.figures import Panel
from laconic_lab.studies.jang2017.claims import CLAIMS
from laconic_lab.studies.jang2017.results import Results

__all__ = ["FIGURES", "make_plots"]

FIGURES = {
    "figure4": (Panel("jang-figure4"),), "figure5": (Panel("jang-figure5"),),
    "figure6": (Panel("jang-figure6a"), Panel("jang-figure6bc")), "figure7": (Panel("jang-figure7"),),
    "kernels": (Panel("jang-kernels"),), "runs": (Panel("predicted-measured"),),
}  # fmt: skip

ALL = range(1, NODES + 1)
SHOWN = (1, 2, 4, 8, 12, 16, 20, 25)
SHARES = ("compute", "transfer", "compress", "decompress")


def make_plots(results: Results) -> list[Plot]:
    """Return the paper's figures, table 1, AlexNet's operations, and predictions against measurements."""
    formulas = [_figure4(results), _figure5(), *_figure6(results), _figure7(results)]
    return [*_predictions(results), *_table1(results), *_kernels(results), *formulas]


def _figure4(results: Results) -> Plot:
    reader = results.reader()
    trainings = [("AlexNet, 200 iterations", ALEXNET)]
    trainings += [] if reader is None else [("line reader, 20 iterations", reader)]
    rows: list[tuple[Cell, ...]] = []
    for name, training in trainings:
        for workers in ALL:
            update = training.vanilla(workers)
            rows += [(name, "T_cmt", workers, update.compute), (name, "T_inf", workers, update.transfer)]
    data = Data(("training", "time", "workers", "s an update"), rows)
    return Plot("jang-figure4", "Figure 4", "By the paper's formula: seconds of an update that computing and "
                "transferring take.", "line", data, "workers", "s an update", series="time", pick="training",
                log="y")  # fmt: skip


def _figure5() -> Plot:
    rows: list[tuple[Cell, ...]] = []
    for workers in SHOWN:
        for name, update in (("vanilla", ALEXNET.vanilla(workers)), ("gzip", ALEXNET.naive(workers, GZIP))):
            rows += [(f"{workers}, {name}", share, getattr(update, share)) for share in SHARES]
    data = Data(("workers and method", "share", "s an update"), rows)
    return Plot("jang-figure5", "Figure 5: AlexNet, gzip in every update", "By the paper's formula, with table 1's "
                "times.", "bars", data, "s an update", "workers and method", series="share",
                stacked=True)  # fmt: skip


def _compressed(results: Results) -> Iterator[tuple[str, float, float]]:
    """Yield name, rho and h of each compressed AlexNet that was measured."""
    yield from ((f"{layer.scheme} (measured)", layer.rho, layer.h) for layer in results.layers)


def _figure6(results: Results) -> list[Plot]:
    speed_ups: list[tuple[Cell, ...]] = []
    assumed = [(f"rho {rho} (assumed, h 1 in 6a)", rho, 1.0) for rho in (0.2, 0.5)]
    for workers in ALL:
        updates = {"ideal": ALEXNET.ideal(workers), "vanilla": ALEXNET.vanilla(workers)}
        for name, rho, h in (*assumed, *_compressed(results)):
            updates[name] = ALEXNET.homomorphic(workers, rho=rho, h=h)
        speed_ups += [(name, workers, ALEXNET.speed_up(update)) for name, update in updates.items()]
    totals: list[tuple[Cell, ...]] = [
        (f"rho {rho} (assumed, h 1 in 6a)", 1 + i / 10, ALEXNET.homomorphic(WORKERS, rho=rho, h=1 + i / 10).total)
        for rho in (0.2, 0.5)
        for i in range(11)
    ]
    totals += [(name, h, ALEXNET.homomorphic(WORKERS, rho=rho, h=h).total) for name, rho, h in _compressed(results)]
    vanilla = Mark("y", ALEXNET.vanilla(WORKERS).total, "vanilla")
    return [
        Plot("jang-figure6a", "Figure 6a: speed-up over one node", "By the paper's formula, with assumed and with "
             "measured rho and h.", "line", Data(("method", "workers", "speed-up"), speed_ups), "workers", "speed-up",
             series="method"),
        Plot("jang-figure6bc", "Figures 6b and 6c: an update on 16 workers", "By the paper's formula.", "line",
             Data(("method", "h", "s an update"), totals), "h", "s an update", series="method", marks=(vanilla,)),
    ]  # fmt: skip


def _figure7(results: Results) -> Plot:
    rows: list[tuple[Cell, ...]] = []
    for workers in ALL:
        updates = {"vanilla": ALEXNET.vanilla(workers), "gzip": ALEXNET.naive(workers, GZIP)}
        for name, rho, h in (("rho 0.2, h 1.3 (assumed)", 0.2, 1.3), *_compressed(results)):
            updates[name] = ALEXNET.homomorphic(workers, rho=rho, h=h)
        rows += [(name, workers, ALEXNET.total(update, ALEXNET_EPOCHS) / 3600) for name, update in updates.items()]
    return Plot("jang-figure7", "Figure 7: AlexNet, 450,000 iterations", "By the paper's formula.", "line",
                Data(("method", "workers", "hours"), rows), "workers", "hours", series="method",
                log="y")  # fmt: skip


def _predictions(results: Results) -> list[Plot]:
    rows: list[tuple[Cell, ...]] = [
        (run["codec"], run["engine"], run["workers"], run["rate"], run["measured_s"], run["predicted_s"],
         100 * (run["predicted_s"] / run["measured_s"] - 1))
        for run in results.runs
    ]  # fmt: skip
    if not rows:
        return []
    data = Data(("codec", "engine", "workers", "link", "measured s", "predicted s", "error %"), rows)
    return [
        Plot("predicted-measured", "Predicted and measured iterations", "Seconds of an iteration. Lines: exact, and "
             "10 % off either way.", "points", data, "measured s", "predicted s", series="codec",
             detail=("engine", "workers", "link", "error %"), log="xy", diagonals=(0.9, 1.0, 1.1))
    ]  # fmt: skip


def _table1(results: Results) -> list[Plot]:
    rows: list[tuple[Cell, ...]] = [
        (row["what"], row["way"], row["nbytes"] / row["compressed_nbytes"], row["compress_s"], row["decompress_s"])
        for row in results.rows
    ]
    if not rows:
        return []
    data = Data(("what", "way", "times smaller", "compress s", "decompress s"), rows)
    marks = tuple(Mark("x", claim.value, "paper, gzip on AlexNet") for claim in CLAIMS if claim.key == "gzip_weights")
    return [
        Plot("jang-table1", "Table 1: how much smaller", "Original over compressed size.", "bars", data,
             "times smaller", "way", pick="what", detail=("compress s", "decompress s"), log="x", marks=marks)
    ]  # fmt: skip


def _kernels(results: Results) -> list[Plot]:
    rows: list[tuple[Cell, ...]] = [
        (device, group, 100 * share)
        for device, kernels in sorted(results.kernels.items())
        for group, share in kernels["groups"].items()
    ]
    if not rows:
        return []
    data = Data(("device", "operation", "% of a step"), rows)
    return [
        Plot("jang-kernels", "Operations in a step of AlexNet", "By torch's profiler.", "bars", data, "% of a step",
             "device", series="operation", stacked=True)
    ]  # fmt: skip
