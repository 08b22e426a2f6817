"""``laconic unpack``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.cli.output import examples, progress_bar, results, show_json, size
from laconic.cli.pack import summary_json, summary_table, times_smaller
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.checkpoints import Summary

__all__ = ["EXAMPLES", "register", "unpack"]

EXAMPLES = (
    "laconic unpack model.lac -o restored.safetensors",
    "laconic unpack --list model.lac",
)


def unpack(
    source: Annotated[Path, typer.Argument(metavar="IN.lac", help="The file to read.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.safetensors", help="The file to write.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only say what the file holds.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.safetensors if it exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode a .lac file into a safetensors file, or list what it holds.

    Every checksum is verified before anything is written.
    """
    from laconic.checkpoints import list_file, unpack_file

    if listing and output is not None:
        raise ConfigError("--list only looks: drop it, or drop --output")
    if listing:
        summary = list_file(source)
        if json:
            show_json({"input": str(source)} | _json(summary))
        else:
            _print_list(summary)
        return
    if output is None:
        raise ConfigError("expected --output OUT.safetensors, or --list to only look")
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


def register(app: typer.Typer) -> None:
    app.command("unpack", epilog=examples(*EXAMPLES))(unpack)
