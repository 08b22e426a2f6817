"""Loss and bytes of all methods, by experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from laconic_lab.studies.gpt.contexts import POSITIONS, SIGNS
from laconic_lab.studies.gpt.results import Results, Row
from laconic_lab.studies.gpt.selections import CHUNKS, PRICES
from laconic_lab.studies.gpt.settings import Setting
from laconic_lab.studies.tables import Table, make_table

__all__ = ["describe", "make_tables", "step_seconds"]

LINKS = ((100e6, 0.05, "100 Mbit/s, 50 ms"), (20e6, 0.1, "20 Mbit/s, 100 ms"))
PLAIN = Setting("")


def make_tables(results: Results) -> list[Table]:
    """Return all tables but the one of claims."""
    return [
        _methods(results, "frontier", "All methods, 7 M parameters"),
        _methods(results, "large", "30 M parameters"),
        _methods(results, "confirmation", "126 M parameters"),
        _methods(results, "workers", "Workers"),
        _methods(results, "ablations", "Ingredients, 7 M parameters"),
        _methods(results, "rates", "Learning rates, 7 M parameters"),
        _positions(results),
        _contexts(results),
        _selections(results),
        _compared(results),
    ]


def describe(row: Row) -> str:
    """Return what is particular to a setting, in the words of its fields."""
    values = row.values
    shown = [f"{values['optimizer']} {values['lr']:g}"]
    if row.is_local:
        down = "all frames" if values["gather"] else values["down"]
        shown.append(f"every {values['every']}, up {values['up']}, down {down}")
    for name in (
        "final",
        "momentum",
        "decay",
        "outer_lr",
        "outer_momentum",
        "outer_first",
        "outer_norm",
        "outer_flat",
        "carry",
        "fragments",
        "overlap",
        "settle",
        "averaged",
    ):
        if values.get(name, getattr(PLAIN, name)) != getattr(PLAIN, name):
            shown.append(f"{name.replace('_', ' ')} {values[name]:g}")
    if values.get("pace", PLAIN.pace) != PLAIN.pace:
        shown.append(f"pace by {values['pace']}")
    if values.get("overlap"):
        shown.append(f"merge {values['merge']}")
    return "; ".join(shown)


def _methods(results: Results, part: str, title: str) -> Table:
    rows: list[Sequence[str]] = []
    for row in results.of(part):
        values, beside = row.values, results.beside_adamw(row)
        rows.append((
            values["method"], describe(row), str(values["workers"]), f"{row.loss:.4f}", str(len(row.runs)),
            "–" if beside is None else f"{beside:+.1f}", f"1/{row.ratio:,.0f}" if row.ratio > 1 else "1",
            *(f"{values[way] / values['steps'] / 1e3:,.1f}" for way in ("up_bytes", "down_bytes")),
            *(f"{step_seconds(row, rate, latency_s):.3f}" for rate, latency_s, _ in LINKS),
        ))  # fmt: skip
    columns = (
        "method", "setting", "workers", "loss", "seeds", "% above AdamW-DDP", "bytes", "kB up a step", "kB down a step",
        *(f"s a step, {name}" for _, _, name in LINKS),
    )  # fmt: skip
    return make_table(title, columns, rows)


def step_seconds(row: Row, rate: float, latency_s: float) -> float:
    """Return the seconds of transmission a step: bytes of the busier direction, and a round trip for each exchange."""
    values = row.values
    busier = max(values["up_bytes"], values["down_bytes"]) / values["steps"]
    exchanges = values["fragments"] / values["every"] if row.is_local else 1.0
    return float(8 * busier / rate + 2 * latency_s * exchanges)


def _positions(results: Results) -> Table:
    rows = [
        (
            values["method"], values["size"], f"`{values['spec']}`", f"{values['bits_per_sent']:.2f}",
            f"{100 * values['arrived']:.1f} %",
        )
        for values in results.positions
    ]  # fmt: skip
    columns = ("training", "size", "codec", "bits a sent value", "squared norm sent")
    return make_table("Bits of a sent value", columns, rows)


def _by_group(results: Results, cell: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """Return a cell for each training and group of matrices, in the order of ``_groups``."""
    return [cell(values) for groups in results.contexts.values() for values in groups.values()]


def _groups(results: Results) -> list[str]:
    return [
        f"{method}, {size}: {group}" for (method, size), groups in results.contexts.items() for group in groups
    ]  # fmt: skip


def _contexts(results: Results) -> Table:
    rows = [
        (way[:-1], context, *_by_group(results, lambda values: _number(values[way].get(context))))  # noqa: B023
        for way, contexts in (("positions", POSITIONS), ("signs", SIGNS))
        for context in contexts
        if results.contexts
    ]
    return make_table("Bits by context", ("what is coded", "context", *_groups(results)), rows)


def _number(bits: float | None) -> str:
    return "–" if bits is None else f"{bits:.2f}"


def _selections(results: Results) -> Table:
    names = {"the largest values": None, **{f"the largest of each {chunk}": f"chunk {chunk}" for chunk in CHUNKS}}
    names |= {f"a bit must earn {price:g} of the least square": f"price {price:g}" for price in PRICES}
    names["any, if values were independent: the least information"] = "least information"

    def cell(values: Mapping[str, Any], name: str | None) -> str:
        if name is None:
            return f"{values['positions']['none']:.2f}, 100 %"
        bits, share = values["selections"][name]
        return f"{bits:.2f}, {100 * share:.1f} %"

    rows = [
        (shown, *_by_group(results, lambda values: cell(values, name)))  # noqa: B023
        for shown, name in names.items()
        if results.contexts
    ]
    return make_table("Bits by selection", ("selection", *_groups(results)), rows)


def _compared(results: Results) -> Table:
    runs = [run for rows in results.rows.values() for row in rows for run in row.runs]
    compared, differing = (sum(run[name] for run in runs) for name in ("frames_compared", "frames_other"))
    return make_table(
        "Frames", ("runs", "frames compared", "of these differ"), [(str(len(runs)), f"{compared:,}", str(differing))]
    )
