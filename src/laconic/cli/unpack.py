"""``laconic unpack``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.cli.options import Json, Wide, option
from laconic.cli.output import examples, print_json, print_table, print_text, progress_bar
from laconic.cli.pack import print_summary, summary_json, times_smaller
from laconic.errors import ConfigError
from laconic.tables import Table
from laconic.units import show_bytes

if TYPE_CHECKING:
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
    listing: Annotated[bool, typer.Option("--list", help="Only list the tensors of the file.")] = False,
    explaining: Annotated[
        bool, typer.Option("--explain", help="Only show how each tensor was coded: entropy, levels, bits.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.safetensors if it exists.")] = False,
    max_numel: Annotated[
        int | None,
        option(
            "The most values that the file may declare in total.",
            "2^24, and 1,024 for each of its bytes",
            metavar="N",
            min=1,
        ),
    ] = None,
    wide: Wide = False,
    json: Json = False,
) -> None:
    """Decode a .lac file into a safetensors file, or list its tensors, or explain how they were coded.

    Every checksum is verified before anything is written. A short file can
    declare a large tensor; one that declares more than --max-numel is refused.
    """
    from laconic.checkpoints import explain_file, list_file, unpack_file

    if (listing or explaining) and output is not None:
        raise ConfigError("--list and --explain write no file: drop them, or drop --output")
    if listing and explaining:
        raise ConfigError("--list and --explain are two views: choose one")
    if explaining:
        packets = explain_file(source, max_numel=max_numel)
        if json:
            print_json({"input": str(source), "packets": [asdict(packet) for packet in packets]})
        else:
            print_table(explanation_table(packets, wide=wide), wide=wide)
        return
    if listing:
        summary = list_file(source)
        if json:
            print_json({"input": str(source)} | _json(summary))
        else:
            _print_list(summary)
        return
    if output is None:
        raise ConfigError("expected --output OUT.safetensors, or --list or --explain to write no file")
    with progress_bar("unpack") as (bar, task):
        summary = unpack_file(
            source, output, force=force, max_numel=max_numel,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    if json:
        print_json({"input": str(source), "output": str(output)} | _json(summary))
    else:
        print_summary(summary, output, "the .lac file was", times_smaller(summary.bytes_out, summary.bytes_in))


def _json(summary: Summary) -> dict[str, object]:
    values = summary_json(summary)
    del values["num_exempt"]  # a .lac file stores the codec of each tensor, not whether it was exempt
    return values


def _print_list(summary: Summary) -> None:
    rows = [
        (entry.name, "×".join(map(str, entry.shape)) or "scalar", entry.dtype, entry.codec, f"{entry.nbytes:,}")
        for entry in summary.entries
    ]
    print_table(Table(("name", "shape", "dtype", "codec", "bytes"), rows, text_columns=4))
    ratio = times_smaller(summary.bytes_out, summary.bytes_in)
    annotations = f"; annotations: {', '.join(summary.metadata)}" if summary.metadata else ""
    print_text(
        f"{len(rows)} tensors, {show_bytes(summary.bytes_in)}, {ratio} than unpacked "
        f"({show_bytes(summary.bytes_out)}){annotations}"
    )


def explanation_table(packets: list[Explanation], *, wide: bool) -> Table:
    """Return one row for each packet: bits of symbols and positions per value sent, bits of frames per tensor value."""
    if not wide:
        short = [
            (
                packet.name, packet.codec, *map(_number, (packet.entropy, packet.bits_after, packet.bits_per_value)),
                f"{packet.nbytes:,}",
            )
            for packet in packets
        ]  # fmt: skip
        caption = "bits of a symbol: its entropy, coded; of a frame: per value of the tensor. --wide shows more."
        return Table(("name", "codec", "entropy", "coded", "per value", "bytes"), short, 2, caption=caption)
    rows = []
    for packet in packets:
        details = packet.details
        measure = details.get("entropy_estimate", details.get("gradient_rms"))
        bits = packet.entropy, packet.bits_before, packet.bits_after, packet.position_bits
        rows.append(
            (
                packet.name, packet.codec, f"{packet.kept:,}", *map(_number, (measure, details.get("bits_wanted"))),
                str(details.get("levels", "")), *map(_number, (*bits, packet.bits_per_kept, packet.bits_per_value)),
                f"{packet.nbytes:,}",
            )
        )  # fmt: skip
    bits_columns = ("entropy", "packed", "coded", "positions", "per sent", "per value")
    return Table(
        ("name", "codec", "sent", "H", "N", "levels", *bits_columns, "bytes"),
        rows,
        text_columns=2,
        caption="bits of a symbol: its entropy, packed, coded; of a frame: per value sent, per value of the tensor",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def register(app: typer.Typer) -> None:
    app.command("unpack", epilog=examples(*EXAMPLES))(unpack)
