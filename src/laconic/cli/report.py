"""``laconic report``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.options import Json, option
from laconic.cli.output import examples, print_json, print_stderr, print_text
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
        typer.Argument(
            metavar="RUN…", help="Folders of laconic train --run-dir, files of Records, or folders of these."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    title: Annotated[str, option("Heading of the page.")] = "laconic report",
    price_hour: Annotated[float, option("Price of one machine for an hour.", metavar="PRICE")] = 0.0,
    price_gb: Annotated[float, option("Price of a gigabyte sent.", metavar="PRICE")] = 0.0,
    json: Json = False,
) -> None:
    """Write one HTML file about runs and Records, which opens offline.

    A table of runs with accuracy, bytes, times, speed-up and cost; interactive
    plots, whose rows can be downloaded as CSV; claims of papers beside the
    findings; and sliders for the planner.
    """
    from laconic.report import Prices, build, gather, write_page

    for name, price in (("--price-hour", price_hour), ("--price-gb", price_gb)):
        if not 0 <= price < float("inf"):
            raise ConfigError(f"{name} must be finite and at least 0, got {price:g}")
    if output.is_dir():
        raise ConfigError(f"expected a file for the page, {output} is a folder: name a file in it")
    sources = gather(paths)
    page = build(
        sources.records, title=title, command=_command(paths, output, title, price_hour, price_gb),
        prices=Prices(price_hour, price_gb), skipped=sources.skipped,
    )  # fmt: skip
    try:
        write_page(page.html, output)
    except FileError as error:
        raise ConfigError(str(error)) from None
    nbytes = output.stat().st_size
    if json:
        print_json({"path": str(output), "bytes": nbytes, "runs": page.runs, "records": len(sources.records),
                    "claims": page.claims, "plots": list(page.plots), "skipped": list(page.skipped)})  # fmt: skip
        return
    for line in page.skipped:
        print_stderr(f"laconic: not shown: {line}")
    runs = f"{page.runs} run{'s' * (page.runs != 1)}, " if page.runs else ""
    print_text(f"wrote {output}: {runs}{len(page.plots)} plots, {show_bytes(nbytes)}; open it in a browser")


def _command(paths: list[Path], output: Path, title: str, price_hour: float, price_gb: float) -> str:
    """Return the command line that writes the same page."""
    words = ["laconic", "report", *map(str, paths), "-o", str(output)]
    words += ["--title", title] if title != "laconic report" else []
    words += ["--price-hour", f"{price_hour:g}"] if price_hour else []
    words += ["--price-gb", f"{price_gb:g}"] if price_gb else []
    return shlex.join(words)


def register(app: typer.Typer) -> None:
    app.command("report", epilog=examples(*EXAMPLES))(report)
