"""From Records to tables: table 1, the curves with the paper's settings and with measured ones, and the planner's word
against real runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from laconic.plan import Naive, Training, Update
from laconic.plan.jang2017 import ALEXNET, GIGABIT, GZIP, NODES, PAPER_TABLE, WORKERS
from laconic.records import Record, read
from laconic_lab.studies.claims import Claim
from laconic_lab.studies.jang2017 import runs
from laconic_lab.studies.jang2017.claims import CLAIMS
from laconic_lab.studies.jang2017.study import KERNELS, PARTS, STEP, TABLE
from laconic_lab.studies.tables import Table, read_all

__all__ = ["Finding", "Results", "findings", "load", "tables"]

LAYERS = "layers/cpu.jsonl"
"""Where h and rho of laconic's layers are, beside the study's folder."""


def load(folder: Path) -> list[Record]:
    """All Records of the study that a folder keeps, and those of the layers beside it."""
    found = read_all(folder, PARTS)
    layers = folder.parent / LAYERS
    return found + (read(layers) if layers.exists() else [])


@dataclass(frozen=True)
class Measured:
    """A compressed AlexNet."""

    scheme: str
    rho: float
    h: float


class Results:
    """Records by what they are of."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.rows = [r.values for r in records if r.kind == TABLE]
        self.steps = {(r.values["model"], r.values["device"]): r.values for r in records if r.kind == STEP}
        self.kernels = {r.values["device"]: r.values for r in records if r.kind == KERNELS}
        self.runs = [r.values for r in records if r.kind == runs.RUN]
        self.calibrations = [r.values for r in records if r.kind == runs.CALIBRATION]
        self.layers = [
            Measured(r.values["scheme"], r.values["rho"], r.values["h"])
            for r in records
            if r.kind == "bench.layers" and r.values["case"] == "alexnet" and r.values["device"] == "cpu"
        ]

    def row(self, what: str, way: str) -> Mapping[str, Any] | None:
        return next((row for row in self.rows if (row["what"], row["way"]) == (what, way)), None)

    @property
    def gzip_here(self) -> Naive | None:
        """Gzip as fast as it is here."""
        row = self.row("alexnet", "gzip")
        return None if row is None else Naive(
            row["compressed_nbytes"] / row["nbytes"], row["compress_s"], row["decompress_s"]
        )  # fmt: skip

    def reader(self) -> Training | None:
        """The line reader, 20 iterations, by its step on this machine."""
        one = self.steps.get(("reader", "cpu"))
        return None if one is None else Training(4 * one["numel"], one["step_s"], GIGABIT, every=20)


# ------------------------------------------------------------------------------------------------------------ claims


@dataclass(frozen=True)
class Finding:
    claim: Claim
    measured: float
    how: str

    @property
    def verdict(self) -> str:
        claim, x = self.claim, self.measured
        if claim.relation == "=":
            return "yes" if abs(x - claim.value) <= max(claim.close, 1e-9) else "no"
        return "yes" if (x > claim.value if claim.relation == ">" else x < claim.value) else "no"

    def values(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "key": claim.key, "what": claim.what, "section": claim.section, "relation": claim.relation,
            "paper": claim.value, "measured": self.measured, "how": self.how, "verdict": self.verdict,
        }  # fmt: skip


def findings(results: Results) -> list[Finding]:
    found: dict[str, tuple[float, str]] = {
        "crossover": (ALEXNET.crossover, "the formula, C = 0.6 s"),
        "gzip_loses": (
            sum(ALEXNET.naive(m, GZIP, server_decompressions=1).total > ALEXNET.vanilla(m).total
                for m in range(1, NODES + 1)),
            "the formula, with the reading that is best for gzip",
        ),
        "h_16": (_largest_h(0.5), "the formula"),
    }  # fmt: skip
    row = results.row("alexnet", "gzip")
    if row is not None:
        found["gzip_weights"] = (row["nbytes"] / row["compressed_nbytes"], "fresh weights, zlib level 6")
        seconds = row["compress_s"] + row["decompress_s"]
        found["gzip_slow"] = (seconds / (row["nbytes"] / GIGABIT), "this machine, one thread, one Gbit/s")
    if "cpu" in results.kernels:
        groups = results.kernels["cpu"]["groups"]
        found["gemm"] = (groups["convolution"] + groups["matrix product"], "torch's profiler, CPU")
    if results.layers:
        best = min(results.layers, key=lambda one: one.h)
        found["measured_h"] = (best.h, f"{best.scheme}, rho {best.rho:.3f}: faster than the dense model")
    return [Finding(claim, *found[claim.key]) for claim in CLAIMS if claim.key in found]


def _largest_h(rho: float) -> float:
    """Of 16 workers: 1 + k (1 - rho)."""
    return 1 + ALEXNET.bound(WORKERS).slope * (1 - rho)


# ------------------------------------------------------------------------------------------------------------ tables


def tables(results: Results) -> list[Table]:
    found = [_claims(results)]
    if results.rows:
        found.append(_table1(results))
    found += [_figure4(results), _figure5(results), _figure6a(results), _figure6bc(), _figure7(results)]
    if results.kernels:
        found.append(_kernels(results))
    if results.runs:
        found += [_summary(results), _runs(results), _choices(results)]
    return found


def _claims(results: Results) -> Table:
    sign = {"=": "", ">": "more than ", "<": "less than "}
    rows = [
        [one.claim.what, one.claim.section, f"{sign[one.claim.relation]}{one.claim.value:g}{_unit(one.claim)}",
         f"{one.measured:.3g}{_unit(one.claim)}", one.how, one.verdict]
        for one in findings(results)
    ]  # fmt: skip
    return Table("Claims", ["claim", "where", "paper", "here", "how", "holds"], rows)


def _unit(claim: Claim) -> str:
    return f" {claim.unit}" if claim.unit else ""


def _table1(results: Results) -> Table:
    rows = []
    for what, (nbytes, ratio, there, back) in PAPER_TABLE.items():
        rows.append([what, "gzip, paper", _mb(nbytes), f"{1 / ratio:.3f}", f"{there:.4g}", f"{back:.4g}",
                     f"{nbytes / there / 1e6:.3g}", ""])  # fmt: skip
    for row in results.rows:
        lost = "" if row["lossless"] else f"{row['relative_squared_error']:.2g}"
        rows.append([
            row["what"], row["way"], _mb(row["nbytes"]), f"{row['compressed_nbytes'] / row['nbytes']:.3f}",
            f"{row['compress_s']:.3g}", f"{row['decompress_s']:.3g}",
            f"{row['nbytes'] / row['compress_s'] / 1e6:.3g}", lost,
        ])  # fmt: skip
    columns = ["what", "by", "MB", "compressed / original", "compress, s", "decompress, s", "MB/s in", "squared error"]
    return Table("Table 1", columns, rows)


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
    cross = ["they cross at", f"{ALEXNET.crossover:.1f}", ""]
    if reader is not None:
        cross += [f"{reader.crossover:.1f}", ""]
    columns = ["workers", "AlexNet T_cmt, s", "T_inf, s", *(["reader T_cmt, s", "T_inf, s"] if reader else [])]
    return Table("Figure 4", columns, [*rows, cross])


def _pair(update: Update) -> list[str]:
    return [f"{update.compute:.3g}", f"{update.transfer:.3g}"]


def _figure5(results: Results) -> Table:
    here = results.gzip_here
    rows = []
    for m in SHOWN:
        best, all_of_them = ALEXNET.naive(m, GZIP, server_decompressions=1), ALEXNET.naive(m, GZIP)
        row = [str(m), f"{ALEXNET.vanilla(m).total:.3g}", f"{best.total:.3g}", f"{all_of_them.total:.3g}"]
        if here is not None:
            row.append(f"{ALEXNET.naive(m, here).total:.3g}")
        rows.append(row)
    columns = ["workers", "vanilla, s", "gzip, server decompresses one, s", "gzip, all of them, s",
               *(["the same with gzip as fast as here, s"] if here else [])]  # fmt: skip
    return Table("Figure 5", columns, rows)


def _figure6a(results: Results) -> Table:
    columns = ["workers", "ideal", "vanilla", "rho 0.2, h 1", "rho 0.5, h 1",
               *(f"{one.scheme}: rho {one.rho:.3f}, h {one.h:.2f}" for one in results.layers)]  # fmt: skip
    rows = []
    for m in SHOWN:
        updates = [ALEXNET.ideal(m), ALEXNET.vanilla(m), *(ALEXNET.homomorphic(m, rho=r, h=1.0) for r in (0.2, 0.5)),
                   *(ALEXNET.homomorphic(m, rho=one.rho, h=one.h) for one in results.layers)]  # fmt: skip
        rows.append([str(m), *(f"{ALEXNET.speed_up(one):.2f}" for one in updates)])
    return Table("Figure 6a", columns, rows)


def _figure6bc() -> Table:
    rows = [
        [f"{h:.1f}", *(f"{ALEXNET.homomorphic(WORKERS, rho=rho, h=h).total:.2f}" for rho in (0.2, 0.5))]
        for h in (1 + i / 10 for i in range(11))
    ]
    rows.append(["vanilla", *([f"{ALEXNET.vanilla(WORKERS).total:.2f}"] * 2)])
    return Table("Figures 6b and 6c", ["h, 16 workers", "rho 0.2, s", "rho 0.5, s"], rows)


def _figure7(results: Results) -> Table:
    reader = results.reader()
    columns = ["workers", "vanilla", "gzip", "h 1.3, rho 0.2"]
    columns += [f"{one.scheme} (measured)" for one in results.layers]
    columns += ["reader: vanilla", "reader: h 1.5, rho 0.5"] if reader else []
    rows = []
    for m in SHOWN:
        row = [str(m), *(f"{one.total:.3g}" for one in (
            ALEXNET.vanilla(m), ALEXNET.naive(m, GZIP), ALEXNET.homomorphic(m, rho=0.2, h=1.3),
            *(ALEXNET.homomorphic(m, rho=one.rho, h=one.h) for one in results.layers)))]  # fmt: skip
        if reader is not None:
            row += [f"{reader.vanilla(m).total:.3g}", f"{reader.homomorphic(m, rho=0.5, h=1.5).total:.3g}"]
        rows.append(row)
    return Table("Figure 7", columns, rows)


def _kernels(results: Results) -> Table:
    devices = sorted(results.kernels)
    groups = list(next(iter(results.kernels.values()))["groups"])
    rows = [
        [group, *(f"{100 * results.kernels[device]['groups'][group]:.1f} %" for device in devices)] for group in groups
    ]
    names = [f"{device}, batch {results.kernels[device]['batch']}" for device in devices]
    return Table("Figures 3 and 8", ["operation", *names], rows)


# -------------------------------------------------------------------------------------------- predicted and measured


def _error(run: Mapping[str, Any]) -> float:
    return float(run["predicted_s"] / run["measured_s"] - 1)


def groups_of(some: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str], list[Mapping[str, Any]]]:
    """Cells that differ in their codec alone."""
    found: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for run in some:
        found.setdefault((run["engine"], run["workers"], run["rate"]), []).append(run)
    return found


def calm(results: Results) -> list[Mapping[str, Any]]:
    """Cells over good links while nobody else computed much: the others are shown, and are no evidence."""
    return [run for run in results.runs if run["valid"] and runs.calm_cell(run)]


def _summary(results: Results) -> Table:
    cells = calm(results)
    rows = [
        ["cells run", "24", str(len(results.runs))],
        ["of these while nobody else computed (15 % of the cores at most)", "all", str(len(cells))],
    ]
    for name, some in (("calm cells", cells), ("all cells", results.runs)):
        if some:
            errors = [abs(_error(run)) for run in some]
            choices = [_choice(group) for group in groups_of(some).values()]
            good = sum(one["behind"] <= 0.05 for one in choices)
            rows += [
                [f"{name}: median error of an iteration's time", "at most 10 %", f"{100 * median(errors):.1f} %"],
                [f"{name}: worst error", "at most 25 %", f"{100 * max(errors):.1f} %"],
                [f"{name}: the recommended codec is the best, or within 5 % of it", "90 % of settings",
                 f"{good} of {len(choices)}"],
            ]  # fmt: skip
    return Table("Predicted and measured: summary", ["what", "goal", "here"], rows)


def _runs(results: Results) -> Table:
    rows = []
    for run in results.runs:
        low, high = run["measured_quartiles_s"]
        rows.append([
            run["engine"], str(run["workers"]), run["rate"], run["codec"],
            f"{(run['measured_push'] or run['predicted_push']) / 1e6:.3g}",
            f"{1e3 * run['predicted_s']:.4g}", f"{1e3 * run['measured_s']:.4g}",
            f"{1e3 * low:.4g} to {1e3 * high:.4g}", f"{100 * _error(run):+.1f} %", _others(run),
        ])  # fmt: skip
    columns = ["engine", "workers", "cable", "codec", "push, MB", "predicted, ms", "measured, ms", "half of them",
               "error", "others' share of the cores"]  # fmt: skip
    return Table("Predicted and measured", columns, rows)


def _others(run: Mapping[str, Any]) -> str:
    return "?" if run["others"] is None else f"{100 * run['others']:.0f} %"


def _choice(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    chosen = min(group, key=lambda run: run["predicted_s"])
    best = min(group, key=lambda run: run["measured_s"])
    return {
        "chosen": chosen["codec"], "best": best["codec"], "behind": chosen["measured_s"] / best["measured_s"] - 1,
        "gain": next((run["measured_s"] for run in group if run["codec"] == "none"), float("nan"))
        / chosen["measured_s"],
    }  # fmt: skip


def _choices(results: Results) -> Table:
    rows = []
    for (engine, workers, rate), group in groups_of(results.runs).items():
        one = _choice(group)
        rows.append([engine, str(workers), rate, one["chosen"], one["best"], f"{100 * one['behind']:.1f} %",
                     f"{one['gain']:.2f}"])  # fmt: skip
    columns = ["engine", "workers", "cable", "recommended", "measured best", "behind it", "times as fast as none"]
    return Table("Recommended and best", columns, rows)
