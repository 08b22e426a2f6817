"""``laconic unpack``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.cli.output import examples, progress_bar, results, show_json, size
from laconic.cli.pack import summary_json, summary_table, times_smaller
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from laconic.checkpoints import Summary
    from laconic.inspect import Explanation

__all__ = ["EXAMPLES", "register", "unpack"]

EXAMPLES = (
    "laconic unpack model.lac -o restored.safetensors",
    "laconic unpack --list model.lac",
    "laconic unpack --explain model.lac",
)


def unpack(
    source: Annotated[Path, typer.Argument(metavar="IN.lac", help="The file to read.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.safetensors", help="The file to write.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only say what the file holds.")] = False,
    explaining: Annotated[
        bool, typer.Option("--explain", help="Only say how each tensor was coded: entropy, levels, bits.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.safetensors if it exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode a .lac file into a safetensors file, or list what it holds, or explain how it was coded.

    Every checksum is verified before anything is written.
    """
    from laconic.checkpoints import explain_file, list_file, unpack_file

    if (listing or explaining) and output is not None:
        raise ConfigError("--list and --explain only look: drop them, or drop --output")
    if listing and explaining:
        raise ConfigError("--list and --explain are two views: choose one")
    if explaining:
        packets = explain_file(source)
        if json:
            show_json({"input": str(source), "packets": [asdict(packet) for packet in packets]})
        else:
            results().print(explanation_table(packets), markup=False)
        return
    if listing:
        summary = list_file(source)
        if json:
            show_json({"input": str(source)} | _json(summary))
        else:
            _print_list(summary)
        return
    if output is None:
        raise ConfigError("expected --output OUT.safetensors, or --list or --explain to only look")
    with progress_bar("unpack") as (bar, task):
        summary = unpack_file(
            source,
            output,
            force=force,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if json:
        show_json({"input": str(source), "output": str(output)} | _json(summary))
    else:
        _print(summary, output)


def _json(summary: Summary) -> dict[str, object]:
    found = summary_json(summary)
    del found["num_exempt"]  # a .lac file does not say which tensors were exempt, only how each was coded
    return found


def _print(summary: Summary, output: Path) -> None:
    console = results()
    ratio = times_smaller(summary.bytes_out, summary.bytes_in)
    console.print(summary_table(summary, "the .lac file was", ratio), markup=False)
    console.print(f"wrote {output}", markup=False)


def _print_list(summary: Summary) -> None:
    from rich.table import Table

    table = Table("name", "shape", "dtype", "codec")
    table.add_column("bytes", justify="right")
    for entry in summary.entries:
        table.add_row(
            entry.name, "×".join(map(str, entry.shape)) or "scalar", entry.dtype, entry.codec, f"{entry.nbytes:,}"
        )
    console = results()
    console.print(table, markup=False)
    console.print(
        f"{len(summary.entries)} tensors, {size(summary.bytes_in)}, "
        f"{times_smaller(summary.bytes_out, summary.bytes_in)} than unpacked ({size(summary.bytes_out)})"
        + (f"; annotations: {', '.join(summary.metadata)}" if summary.metadata else ""),
        markup=False,
    )


def explanation_table(packets: list[Explanation]) -> Table:
    """One row a packet. Bits of symbols and positions are per value sent; of frames also per value of the tensor."""
    from rich.table import Table

    caption = "bits of a symbol: its entropy, packed, coded; of a frame: per value sent, per value of the tensor"
    table = Table("name", "codec", caption=caption)
    bits = ("entropy", "packed", "coded", "positions", "per sent", "per value")
    for column in ("sent", "H", "N", "levels", *bits, "bytes"):
        table.add_column(column, justify="right")
    for packet in packets:
        details = packet.details
        measure = details.get("entropy_estimate", details.get("gradient_rms"))
        table.add_row(
            packet.name,
            packet.codec,
            f"{packet.kept:,}",
            _number(measure),
            _number(details.get("bits_wanted")),
            str(details.get("levels", "")),
            *map(_number, (packet.entropy, packet.bits_before, packet.bits_after, packet.position_bits)),
            _number(packet.bits_per_kept),
            _number(packet.bits_per_value),
            f"{packet.nbytes:,}",
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def register(app: typer.Typer) -> None:
    app.command("unpack", epilog=examples(*EXAMPLES))(unpack)
