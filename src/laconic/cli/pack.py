"""``laconic pack``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.complete import specs
from laconic.cli.output import examples, progress_bar, results, show_json, size
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from laconic.checkpoints import Summary

__all__ = ["EXAMPLES", "pack", "register", "summary_json", "summary_table", "times_smaller"]

EXAMPLES = (
    "laconic pack model.safetensors -o model.lac --codec uniform:8",
    "laconic pack model.safetensors -o m.lac --codec qsgd:8 --policy '*.w=bf16'",
)


def pack(
    source: Annotated[Path, typer.Argument(metavar="IN.safetensors", help="The file to compress.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.lac", help="The file to write.")],
    codec: Annotated[
        str,
        typer.Option(metavar="SPEC", help="The codec of float tensors: see laconic codecs.", autocompletion=specs),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=SPEC", help="Another codec for tensors named so; the first match wins."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides all randomness.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.lac if it exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compress a safetensors file into a .lac file.

    One-dimensional tensors and those under 4,096 values travel as they are
    unless a policy says otherwise; integers and booleans always do. Names,
    shapes, dtypes and annotations come back exactly.
    """
    from laconic.checkpoints import pack_file

    with progress_bar("pack") as (bar, task):
        summary = pack_file(
            source,
            output,
            codec,
            policy=_rules(policy or []),
            seed=seed,
            force=force,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if json:
        show_json({"input": str(source), "output": str(output), "codec": codec} | summary_json(summary))
    else:
        _print(summary, output, codec)


def _rules(texts: list[str]) -> dict[str, str]:
    rules: dict[str, str] = {}
    for text in texts:
        pattern, equals, spec = text.partition("=")
        if not equals or not pattern or not spec:
            raise ConfigError(f"--policy must be PATTERN=SPEC such as '*.bias=bf16', got {text!r}")
        if pattern in rules:
            raise ConfigError(f"--policy names the pattern {pattern!r} twice")
        rules[pattern] = spec
    return rules


def times_smaller(before: int, after: int) -> str:
    """A ratio that says which way it goes."""
    if abs(before / after - 1) < 0.005:
        return "same size"
    return f"{before / after:.3g}x smaller" if after <= before else f"{after / before:.3g}x larger"


def summary_json(summary: Summary) -> dict[str, Any]:
    return {
        "tensors": [asdict(entry) for entry in summary.entries],
        "num_tensors": len(summary.entries),
        "num_exempt": sum(bool(entry.note) for entry in summary.entries),
        "bytes_in": summary.bytes_in,
        "bytes_out": summary.bytes_out,
        "seconds": summary.seconds,
        "metadata": summary.metadata,
    }


def summary_table(summary: Summary, ratio_heading: str, ratio: str) -> Table:
    """One row: what went in, what came out, and the ratio between them, which says itself which way it goes."""
    from rich.table import Table

    table = Table("tensors", "bytes in", "bytes out", ratio_heading, "time")
    sizes = size(summary.bytes_in), size(summary.bytes_out)
    table.add_row(str(len(summary.entries)), *sizes, ratio, f"{summary.seconds:.2f} s")
    return table


def _print(summary: Summary, output: Path, codec: str) -> None:
    console = results()
    console.print(summary_table(summary, "", times_smaller(summary.bytes_in, summary.bytes_out)), markup=False)
    exempt = Counter((entry.codec, entry.note) for entry in summary.entries if entry.note)
    for (other, note), count in exempt.items():
        what = "1 tensor that" if count == 1 else f"{count} tensors, each of which"
        console.print(f"{other} instead of {codec}: {what} {note}", markup=False)
    console.print(f"wrote {output}", markup=False)


def register(app: typer.Typer) -> None:
    app.command("pack", epilog=examples(*EXAMPLES))(pack)
