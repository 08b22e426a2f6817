"""``laconic pack``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.complete import specs
from laconic.cli.options import Json, option
from laconic.cli.output import examples, print_json, print_table, print_text, progress_bar
from laconic.errors import ConfigError
from laconic.tables import Table
from laconic.units import show_bytes

if TYPE_CHECKING:
    from laconic.checkpoints import Summary

__all__ = ["EXAMPLES", "pack", "print_summary", "register", "summary_json", "times_smaller"]

EXAMPLES = (
    "laconic pack model.safetensors -o model.lac --codec uniform:8",
    "laconic pack model.safetensors -o m.lac --codec qsgd:8 --policy '*.w=bf16'",
)


def pack(
    source: Annotated[Path, typer.Argument(metavar="IN.safetensors", help="The file to compress.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.lac", help="The file to write.")],
    codec: Annotated[
        str, option("The codec of float tensors: see laconic codecs.", metavar="SPEC", autocompletion=specs)
    ],
    policy: Annotated[
        list[str] | None,
        option("Another codec for tensors whose name matches; the first match wins.", metavar="PATTERN=SPEC"),
    ] = None,
    seed: Annotated[int, option("Seed of all random choices.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.lac if it exists.")] = False,
    json: Json = False,
) -> None:
    """Compress a safetensors file into a .lac file.

    One-dimensional tensors and tensors of fewer than 4,096 values are stored
    unchanged unless a policy names them; integers and booleans always are.
    Names, shapes, dtypes and annotations are restored exactly.
    """
    from laconic.checkpoints import pack_file

    with progress_bar("pack") as (bar, task):
        summary = pack_file(
            source, output, codec, policy=_rules(policy or []), seed=seed, force=force,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    if json:
        print_json({"input": str(source), "output": str(output), "codec": codec} | summary_json(summary))
    else:
        print_summary(summary, output, "ratio", times_smaller(summary.bytes_in, summary.bytes_out))
        print_text(*_exemptions(summary, codec))


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
    """Return the ratio of two sizes in words, such as ``3.9x smaller``."""
    if abs(before / after - 1) < 0.005:
        return "same size"
    return f"{before / after:.3g}x smaller" if after <= before else f"{after / before:.3g}x larger"


def summary_json(summary: Summary) -> dict[str, Any]:
    return {
        "tensors": [asdict(entry) for entry in summary.entries], "num_tensors": len(summary.entries),
        "num_exempt": sum(bool(entry.note) for entry in summary.entries), "bytes_in": summary.bytes_in,
        "bytes_out": summary.bytes_out, "seconds": summary.seconds, "metadata": summary.metadata,
    }  # fmt: skip


def print_summary(summary: Summary, output: Path, ratio_heading: str, ratio: str) -> None:
    """Print one row with the sizes of both files, and the path that was written."""
    cells = (show_bytes(summary.bytes_in), show_bytes(summary.bytes_out), ratio, f"{summary.seconds:.2f} s")
    columns = ("tensors", "bytes in", "bytes out", ratio_heading, "time")
    print_table(Table(columns, [(str(len(summary.entries)), *cells)], text_columns=0))
    print_text(f"wrote {output}")


def _exemptions(summary: Summary, codec: str) -> list[str]:
    """Return one line for each reason why tensors have another codec than the requested one."""
    counts = Counter((entry.codec, entry.note) for entry in summary.entries if entry.note)
    return [
        f"{other} instead of {codec}: {'1 tensor that' if count == 1 else f'{count} tensors, each of which'} {note}"
        for (other, note), count in counts.items()
    ]


def register(app: typer.Typer) -> None:
    app.command("pack", epilog=examples(*EXAMPLES))(pack)
