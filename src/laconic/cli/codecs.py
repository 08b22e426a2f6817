"""``laconic codecs``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from laconic.cli.options import Json, Wide
from laconic.cli.output import examples, print_json, print_table, print_text
from laconic.tables import Table

if TYPE_CHECKING:
    from laconic.catalog import CatalogEntry

__all__ = ["EXAMPLES", "codecs", "register"]

EXAMPLES = ("laconic codecs", "laconic codecs --wide", "laconic codecs --json")


COLUMNS = ("stage", "kind", "bits", "bias", "what it does")
WIDE_COLUMNS = ("stage", "kind", "bits", "bias", "what it does", "arguments and defaults", "summable", "example")


def codecs(wide: Wide = False, json: Json = False) -> None:
    """List the stages that codec specs are made of.

    Stages are joined by '|', as in ef|topk:0.01|qsgd:4: channels first, then
    at most one selector, then at most one cast or quantizer. Arguments come
    in the order shown by --wide, or by name: qsgd:bits=4,bucket=1024.
    """
    from laconic.catalog import CATALOG_NUMEL, catalog

    entries = catalog()
    if json:
        print_json({"measured_on": f"{CATALOG_NUMEL} gaussian float32", "stages": [asdict(entry) for entry in entries]})
        return
    columns = WIDE_COLUMNS if wide else COLUMNS
    rows = [_cells(entry)[: len(columns)] for entry in entries]
    if wide:
        rows = [(*row[:3], entry.bias or "-", *row[4:]) for row, entry in zip(rows, entries, strict=True)]
    print_table(Table(columns, rows, text_columns=len(columns)), wide=wide)
    print_text(
        f"bits: per value, in a frame of {CATALOG_NUMEL:,} gaussian float32 with default arguments; of coders after "
        "uniform:8.",
        *(f"{entry.name}: {_by_shape(entry.bits_by_shape)}." for entry in entries if entry.bits_by_shape),
        *(f"{entry.name}: {entry.note}." for entry in entries if entry.note),
        *(() if wide else ("--wide shows arguments and examples.",)),
        wrap=True,
    )


def _cells(entry: CatalogEntry) -> tuple[str, ...]:
    bias = "-" if entry.bias is None else "biased" if entry.biased_by_default else entry.bias.partition(";")[0]
    return (
        entry.name, entry.kind, "-" if entry.bits_per_value is None else f"{entry.bits_per_value:.3g}", bias,
        entry.summary, ", ".join(f"{name}={_show(value)}" for name, value in entry.arguments.items()) or "-",
        "yes" if entry.summable else "no", entry.example,
    )  # fmt: skip


def _by_shape(bits: dict[str, float]) -> str:
    return "bits by shape: " + ", ".join(f"{shape} {value:.3g}" for shape, value in bits.items())


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def register(app: typer.Typer) -> None:
    app.command("codecs", epilog=examples(*EXAMPLES))(codecs)
