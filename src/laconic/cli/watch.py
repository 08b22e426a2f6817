"""``laconic watch``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.cli import interrupts
from laconic.cli.options import option
from laconic.cli.output import examples, print_json, stdout_console
from laconic.errors import ConfigError, FileError

if TYPE_CHECKING:
    from laconic.watch.view import View, Watcher

__all__ = ["EXAMPLES", "event_files", "register", "watch"]

EXAMPLES = (
    "laconic watch run --once", "laconic watch run --json", "laconic watch run --once --tensorboard boards/run",
    "laconic watch run", "laconic watch run --wait --web --port 8080",
)  # fmt: skip

RUNS = Path("runs")
"""Folder of the runs that ``laconic train`` starts without --run-dir."""


def watch(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="The run's folder.", show_default="the newest in runs/")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="Serve a page on this host until Ctrl-C.")] = False,
    host: Annotated[str, option("With --web: a loopback address.", metavar="H")] = "127.0.0.1",
    port: Annotated[int, option("With --web: 0 takes a free port.", min=0, max=65535)] = 0,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a run that does not exist yet.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print the current status and exit.")] = False,
    every: Annotated[float, option("Seconds between two updates.", metavar="S", min=0.05)] = 0.5,
    tensorboard: Annotated[Path | None, option("Also write TensorBoard's event files here.", metavar="DIR")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the current status as one JSON object; with --web: the address.")
    ] = False,
) -> None:
    """Show a run while it trains: loss, bytes, workers, staleness, faults.

    The command reads the files that the run's server writes to its folder, so
    it can be started and stopped at any time. Workers on other hosts report to
    their server. The command ends with the run; of a run that has ended it
    shows the last status. --web also serves Prometheus metrics at /metrics.
    """
    from laconic.watch.view import Watcher
    from laconic.watch.web import check_loopback

    check_loopback(host, option="--host")
    if web and once:
        raise ConfigError("--web serves until Ctrl-C and --once exits: give one of them")
    watcher = Watcher(run or _newest_run())
    if not wait and (view := watcher.view()).phase == "absent":
        reason = "; ".join(view.notes) or "it has no config.json (--wait waits for it)"
        raise FileError(f"{watcher.run_dir} is not a run folder: {reason}")
    with event_files(tensorboard) as write_events:
        if web:
            _serve(watcher, host, port, every, write_events, json)
        elif json or once:
            view = _wait_for_run(watcher, every)
            write_events(view)
            _print(view, json)
        else:
            _follow(watcher, every, write_events)


WriteEvents = Callable[["View"], None]


@contextmanager
def event_files(folder: Path | None) -> Iterator[WriteEvents]:
    """Return a function that writes what is new in a view to TensorBoard's event files; without a folder, a no-op."""
    if folder is None:
        yield lambda view: None
        return
    from laconic.watch.tensorboard import EventWriter

    writer = EventWriter(folder)
    try:
        yield writer.update
    finally:
        writer.close()


def _newest_run() -> Path:
    configs = sorted(RUNS.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise ConfigError("which run? Name its folder: there is none in runs/")
    return configs[-1].parent


def _wait_for_run(watcher: Watcher, every: float) -> View:
    while (view := watcher.view()).phase == "absent":
        time.sleep(every)
    return view


def _print(view: View, json: bool) -> None:
    if json:
        print_json(view.to_json())
    else:
        from laconic.watch.terminal import render

        console = stdout_console()
        console.print(render(view, width=console.width))


def _follow(watcher: Watcher, every: float, write_events: WriteEvents) -> None:
    """Show the run until it is over; if stdout is not a terminal, print only the last status."""
    from rich.live import Live

    from laconic.watch.terminal import render

    console = stdout_console()
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            view = watcher.view()
            write_events(view)
            live.update(render(view, width=console.width), refresh=console.is_terminal)
            if view.over:
                return
            time.sleep(every)


def _serve(watcher: Watcher, host: str, port: int, every: float, write_events: WriteEvents, json: bool) -> None:
    from laconic.watch.web import WatchServer

    with WatchServer(watcher.view, host, port) as server, _until_interrupted():
        if json:
            print_json({"run": str(watcher.run_dir), "url": server.url})
        else:
            print(f"{watcher.run_dir} is shown at {server.url} until Ctrl-C", flush=True)
        while True:
            time.sleep(every)
            write_events(server.view())


@contextmanager
def _until_interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        interrupts.stop_repeating()


def register(app: typer.Typer) -> None:
    app.command("watch", epilog=examples(*EXAMPLES))(watch)
