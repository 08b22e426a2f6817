"""``laconic codecs``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from laconic.cli.options import Json
from laconic.cli.output import examples, print_json, print_table
from laconic.tables import Table

__all__ = ["EXAMPLES", "codecs", "register"]

EXAMPLES = ("laconic codecs", "laconic codecs --json")


def codecs(json: Json = False) -> None:
    """List the stages that codec specs are made of.

    Stages are joined by '|', as in ef|topk:0.01|qsgd:4: channels first, then
    at most one selector, then at most one cast or quantizer. Arguments come
    in the order shown, or by name: qsgd:bits=4,bucket=1024.
    """
    from laconic.catalog import CATALOG_NUMEL, catalog

    entries = catalog()
    if json:
        print_json({"measured_on": f"{CATALOG_NUMEL} gaussian float32", "stages": [asdict(entry) for entry in entries]})
        return
    columns = ("name", "kind", "arguments and defaults", "bias", "summable", "what", "example", "bits per value")
    rows = [
        (
            entry.name, entry.kind,
            ", ".join(f"{name}={_show(value)}" for name, value in entry.arguments.items()) or "-", entry.bias or "-",
            "yes" if entry.summable else "no", entry.summary, entry.example,
            "-" if entry.bits_per_value is None else f"{entry.bits_per_value:.3g}",
        )
        for entry in entries
    ]  # fmt: skip
    caption = f"bits per value: a frame of {CATALOG_NUMEL:,} gaussian float32 with default arguments"
    print_table(Table(columns, rows, text_columns=len(columns) - 1, caption=caption))


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def register(app: typer.Typer) -> None:
    app.command("codecs", epilog=examples(*EXAMPLES))(codecs)
