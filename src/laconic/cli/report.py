"""``laconic report``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.output import examples, print_json, print_stderr, stdout_console
from laconic.errors import ConfigError, FileError
from laconic.units import show_bytes

__all__ = ["EXAMPLES", "register", "report"]

EXAMPLES = (
    "laconic report runs/demo -o report.html",
    "laconic report runs/one runs/two --price-hour 0.9 --price-gb 0.09",
    "laconic report results/kothari2021 results/jang2017/runs.jsonl -o studies.html --json",
)


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Folders of laconic train --run-dir, files of Records, folders of these."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option("--title", help="Of the page.")] = "laconic report",
    price_hour: Annotated[float, typer.Option("--price-hour", metavar="PRICE", help="Of one machine.")] = 0.0,
    price_gb: Annotated[float, typer.Option("--price-gb", metavar="PRICE", help="Of a gigabyte sent.")] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write one HTML file about runs and Records, which opens offline.

    A table of runs with accuracy, bytes, times, speed-up and cost; plots that
    can be hovered, walked through by keys and taken along as CSV; what papers
    claimed beside what was measured; and sliders that ask what if.
    """
    from laconic.report import Prices, build, gather, write_page

    for name, price in (("--price-hour", price_hour), ("--price-gb", price_gb)):
        if not 0 <= price < float("inf"):
            raise ConfigError(f"{name} must be a number, not below 0, got {price:g}")
    if output.is_dir():
        raise ConfigError(f"expected a file for the page, {output} is a folder: name a file in it")
    found = gather(paths)
    made = build(
        found.records, title=title, command=_command(paths, output, title, price_hour, price_gb),
        prices=Prices(price_hour, price_gb), skipped=found.skipped,
    )  # fmt: skip
    try:
        write_page(made.html, output)
    except FileError as error:
        raise ConfigError(str(error)) from None
    nbytes = output.stat().st_size
    if json:
        print_json({"path": str(output), "bytes": nbytes, "runs": made.runs, "records": len(found.records),
                   "claims": made.claims, "plots": list(made.plots), "skipped": list(made.skipped)})  # fmt: skip
        return
    for line in made.skipped:
        print_stderr(f"laconic: not shown: {line}")
    console = stdout_console()
    what = (
        f"{made.runs} run{'s' * (made.runs != 1)}, {len(made.plots)} plots" if made.runs else f"{len(made.plots)} plots"
    )
    console.print(f"wrote {output}: {what}, {show_bytes(nbytes)}; open it in a browser", markup=False, soft_wrap=True)


def _command(paths: list[Path], output: Path, title: str, price_hour: float, price_gb: float) -> str:
    words = ["laconic", "report", *map(str, paths), "-o", str(output)]
    words += ["--title", title] if title != "laconic report" else []
    words += ["--price-hour", f"{price_hour:g}"] if price_hour else []
    words += ["--price-gb", f"{price_gb:g}"] if price_gb else []
    return shlex.join(words)


def register(app: typer.Typer) -> None:
    app.command("report", epilog=examples(*EXAMPLES))(report)
