"""Table 1, the paper's curves with its settings and with measured ones, and predictions against real runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from laconic.plan import Update
from laconic.plan.evidence import model_error
from laconic.plan.formulas import exceeds_error
from laconic.plan.jang2017 import ALEXNET, GZIP, PAPER_TABLE, WORKERS
from laconic_lab.studies.jang2017.cells import CODECS, HELD_OUT
from laconic_lab.studies.jang2017.results import Results
from laconic_lab.studies.jang2017.runs import all_cells, calm_cell
from laconic_lab.studies.tables import Table, make_table

__all__ = ["make_tables"]


def make_tables(results: Results) -> list[Table]:
    """Return all tables but the one of claims."""
    shown = [_table1(results)] if results.rows else []
    shown += [_figure4(results), _figure5(results), _figure6a(results), _figure6bc(), _figure7(results)]
    if results.readers:
        rows = [(one.scheme, f"{one.rho:.3f}", f"{one.h:.2f}") for one in results.readers]
        shown.append(make_table("The reader with compressed LSTMs", ("scheme", "rho", "h, one CPU thread"), rows))
    if results.kernels:
        shown.append(_kernels(results))
    if results.runs:
        shown += [_summary(results), _runs(results), _choices(results)]
    return shown


def _table1(results: Results) -> Table:
    rows = []
    for what, (nbytes, ratio, compress_s, decompress_s) in PAPER_TABLE.items():
        rows.append([what, "gzip, paper", _mb(nbytes), f"{1 / ratio:.3f}", f"{compress_s:.4g}", f"{decompress_s:.4g}",
                     f"{nbytes / compress_s / 1e6:.3g}", ""])  # fmt: skip
    for row in results.rows:
        lost = "" if row["lossless"] else f"{row['relative_squared_error']:.2g}"
        rows.append([
            row["what"], row["way"], _mb(row["nbytes"]), f"{row['compressed_nbytes'] / row['nbytes']:.3f}",
            f"{row['compress_s']:.3g}", f"{row['decompress_s']:.3g}",
            f"{row['nbytes'] / row['compress_s'] / 1e6:.3g}", lost,
        ])  # fmt: skip
    columns = ["what", "by", "MB", "compressed / original", "compress, s", "decompress, s", "MB/s in", "squared error"]
    return make_table("Table 1", columns, rows)


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f}"


SHOWN = (1, 2, 4, 8, 12, 16, 20, 25)


def _figure4(results: Results) -> Table:
    reader = results.reader()
    rows = []
    for m in SHOWN:
        row = [str(m), *_pair(ALEXNET.vanilla(m))]
        if reader is not None:
            row += _pair(reader.vanilla(m))
        rows.append(row)
    crossing = ["they cross at", f"{ALEXNET.crossover:.1f}", ""]
    if reader is not None:
        crossing += [f"{reader.crossover:.1f}", ""]
    columns = ["workers", "AlexNet T_cmt, s", "T_inf, s", *(["reader T_cmt, s", "T_inf, s"] if reader else [])]
    return make_table("Figure 4", columns, [*rows, crossing])


def _pair(update: Update) -> list[str]:
    return [f"{update.compute:.3g}", f"{update.transfer:.3g}"]


def _figure5(results: Results) -> Table:
    measured_gzip = results.gzip_here
    rows = []
    for m in SHOWN:
        best, worst = ALEXNET.naive(m, GZIP, server_decompressions=1), ALEXNET.naive(m, GZIP)
        row = [str(m), f"{ALEXNET.vanilla(m).total:.3g}", f"{best.total:.3g}", f"{worst.total:.3g}"]
        if measured_gzip is not None:
            row.append(f"{ALEXNET.naive(m, measured_gzip).total:.3g}")
        rows.append(row)
    columns = ["workers", "vanilla, s", "gzip, server decompresses one, s", "gzip, all of them, s",
               *(["the same with gzip as fast as here, s"] if measured_gzip else [])]  # fmt: skip
    return make_table("Figure 5", columns, rows)


def _figure6a(results: Results) -> Table:
    columns = ["workers", "ideal", "vanilla", "rho 0.2, h 1", "rho 0.5, h 1",
               *(f"{layer.scheme}: rho {layer.rho:.3f}, h {layer.h:.2f}" for layer in results.layers)]  # fmt: skip
    rows = []
    for m in SHOWN:
        updates = [ALEXNET.ideal(m), ALEXNET.vanilla(m), *(ALEXNET.homomorphic(m, rho=r, h=1.0) for r in (0.2, 0.5)),
                   *(ALEXNET.homomorphic(m, rho=layer.rho, h=layer.h) for layer in results.layers)]  # fmt: skip
        rows.append([str(m), *(f"{ALEXNET.speed_up(update):.2f}" for update in updates)])
    return make_table("Figure 6a", columns, rows)


def _figure6bc() -> Table:
    rows = [
        [f"{h:.1f}", *(f"{ALEXNET.homomorphic(WORKERS, rho=rho, h=h).total:.2f}" for rho in (0.2, 0.5))]
        for h in (1 + i / 10 for i in range(11))
    ]
    rows.append(["vanilla", *([f"{ALEXNET.vanilla(WORKERS).total:.2f}"] * 2)])
    return make_table("Figures 6b and 6c", ["h, 16 workers", "rho 0.2, s", "rho 0.5, s"], rows)


def _figure7(results: Results) -> Table:
    reader = results.reader()
    columns = ["workers", "vanilla", "gzip", "h 1.3, rho 0.2"]
    columns += [f"{layer.scheme} (measured)" for layer in results.layers]
    columns += ["reader: vanilla", "reader: h 1.5, rho 0.5"] if reader else []
    columns += [f"reader: {one.scheme} (measured)" for one in results.readers] if reader else []
    rows = []
    for m in SHOWN:
        row = [str(m), *(f"{update.total:.3g}" for update in (
            ALEXNET.vanilla(m), ALEXNET.naive(m, GZIP), ALEXNET.homomorphic(m, rho=0.2, h=1.3),
            *(ALEXNET.homomorphic(m, rho=layer.rho, h=layer.h) for layer in results.layers)))]  # fmt: skip
        if reader is not None:
            row += [f"{reader.vanilla(m).total:.3g}", f"{reader.homomorphic(m, rho=0.5, h=1.5).total:.3g}"]
            row += [f"{reader.homomorphic(m, rho=one.rho, h=one.h).total:.3g}" for one in results.readers]
        rows.append(row)
    return make_table("Figure 7", columns, rows)


def _kernels(results: Results) -> Table:
    devices = sorted(results.kernels)
    groups = list(next(iter(results.kernels.values()))["groups"])
    rows = [
        [group, *(f"{100 * results.kernels[device]['groups'][group]:.1f} %" for device in devices)] for group in groups
    ]
    names = [f"{device}, batch {results.kernels[device]['batch']}" for device in devices]
    return make_table("Figures 3 and 8", ["operation", *names], rows)


def _error(run: Mapping[str, Any]) -> float:
    return float(run["predicted_s"] / run["measured_s"] - 1)


def _by_setting(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str], list[Mapping[str, Any]]]:
    """Group runs that differ only in their codec; a setting without all codecs shows no best one.

    Local steps are left out: what they give up decides about them.
    """
    groups: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for run in (run for run in runs if run["codec"] in CODECS):
        groups.setdefault((run["engine"], run["workers"], run["rate"]), []).append(run)
    return {key: group for key, group in groups.items() if {run["codec"] for run in group} >= set(CODECS)}


def _calm_runs(results: Results) -> list[Mapping[str, Any]]:
    """Return the runs over valid links on a calm machine; the others are shown but are no evidence."""
    return [run for run in results.runs if run["valid"] and calm_cell(run)]


def _summary(results: Results) -> Table:
    calm = _calm_runs(results)
    rows = [
        ["cells run", str(len(all_cells())), str(len(results.runs))],
        ["of these on a calm machine (other processes used at most 15 % of the cores)", "all", str(len(calm))],
    ]
    held_out = [run for run in calm if run["rate"] in HELD_OUT]
    for name, runs in (
        ("calm cells", calm),
        ("calm cells over links that the model was not changed for", held_out),
        ("all cells", results.runs),
    ):
        if runs:
            errors = [abs(_error(run)) for run in runs]
            choices = [_choice(group) for group in _by_setting(runs).values()]
            good = sum(choice["behind"] <= 0.05 for choice in choices)
            rows += [
                [f"{name}: median error of an iteration's time", "at most 8 %", f"{100 * median(errors):.1f} %"],
                [f"{name}: worst error", "at most 25 %", f"{100 * max(errors):.1f} %"],
                [f"{name}, settings with all codecs: the recommended one is the best, or within 5 % of it",
                 "90 % of 20", f"{good} of {len(choices)}"],
            ]  # fmt: skip
    shaped = [abs(_error(run)) for run in calm if run["rate"] != "unshaped"]
    if shaped:
        rows.append([
            "calm cells over links of a limited rate: worst error", "at most 25 %", f"{100 * max(shaped):.1f} %"
        ])  # fmt: skip
    unshaped = [_choice(group) for key, group in _by_setting(calm).items() if key[2] == "unshaped"]
    if unshaped:
        good = sum(choice["behind"] <= 0.05 for choice in unshaped)
        rows.append(["calm cells over unshaped links: the same", "all", f"{good} of {len(unshaped)}"])
    return make_table("Predicted and measured: summary", ["what", "goal", "here"], rows)


def _runs(results: Results) -> Table:
    rows = []
    for run in results.runs:
        low, high = run["measured_quartiles_s"]
        rows.append([
            run["engine"], str(run["workers"]), run["rate"], run["codec"],
            f"{(run['measured_push'] or run['predicted_push']) / 1e6:.3g}",
            f"{1e3 * run['predicted_s']:.4g}", f"{1e3 * run['measured_s']:.4g}",
            f"{1e3 * low:.4g} to {1e3 * high:.4g}", f"{100 * _error(run):+.1f} %", _other_load(run),
        ])  # fmt: skip
    columns = ["engine", "workers", "link", "codec", "push, MB", "predicted, ms", "measured, ms", "quartiles, ms",
               "error", "other processes' share of the cores"]  # fmt: skip
    return make_table("Predicted and measured", columns, rows)


def _other_load(run: Mapping[str, Any]) -> str:
    return "?" if run["others"] is None else f"{100 * run['others']:.0f} %"


def _choice(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the planner's rule chooses by the predictions (quality aside), and the measured best."""
    chosen, plain = min(group, key=lambda run: run["predicted_s"]), next(run for run in group if run["codec"] == "none")
    if not exceeds_error(plain["predicted_s"], chosen["predicted_s"], model_error(plain["engine"])):
        chosen = plain
    best = min(group, key=lambda run: run["measured_s"])
    return {
        "chosen": chosen["codec"], "best": best["codec"], "behind": chosen["measured_s"] / best["measured_s"] - 1,
        "gain": plain["measured_s"] / chosen["measured_s"],
    }  # fmt: skip


def _choices(results: Results) -> Table:
    rows = []
    for (engine, workers, rate), group in _by_setting(results.runs).items():
        choice = _choice(group)
        rows.append([engine, str(workers), rate, choice["chosen"], choice["best"],
                     f"{100 * choice['behind']:.1f} %", f"{choice['gain']:.2f}"])  # fmt: skip
    columns = ["engine", "workers", "link", "recommended", "measured best", "behind it", "times as fast as none"]
    return make_table("Recommended and best", columns, rows)
