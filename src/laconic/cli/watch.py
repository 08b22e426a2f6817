"""``laconic watch``."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.cli.output import examples, print_json, stdout_console
from laconic.errors import ConfigError, FileError

if TYPE_CHECKING:
    from laconic.watch.tensorboard import TensorBoard
    from laconic.watch.view import View, Watcher

__all__ = ["EXAMPLES", "register", "watch"]

EXAMPLES = (
    "laconic watch run --once",
    "laconic watch run --json",
    "laconic watch run --once --tensorboard boards/run",
    "laconic watch run",
    "laconic watch run --wait --web --port 8080",
)

RUNS = Path("runs")
"""Where laconic train puts runs that were given no folder."""


def watch(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="The run's folder.", show_default="the newest in runs/")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="As a page on this host, until Ctrl-C.")] = False,
    host: Annotated[str, typer.Option("--host", metavar="H", help="Of --web: an address of loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Of --web: 0 takes a free one.", min=0, max=65535)] = 0,
    wait: Annotated[bool, typer.Option("--wait", help="For a run that is not there yet.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print how it is now, and end.")] = False,
    every: Annotated[float, typer.Option("--every", metavar="S", help="Seconds between two looks.", min=0.05)] = 0.5,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="DIR", help="Also write TensorBoard's event files here.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object of how it is now; of --web: where it is.")
    ] = False,
) -> None:
    """Show a run while it goes on: loss, bytes, workers, staleness, faults.

    Reads what the run's server writes to its folder, so it may be started and
    stopped at any time and disturbs nobody; of workers on other hosts it knows
    what they tell their server. Ends with the run. A run that has ended is
    shown as it ended. --web has Prometheus metrics, too, at /metrics.
    """
    from laconic.watch.tensorboard import TensorBoard
    from laconic.watch.view import Watcher
    from laconic.watch.web import check_loopback

    check_loopback(host, option="--host")
    if web and once:
        raise ConfigError("--web stays and --once ends: give one of them")
    watcher = Watcher(run or _newest())
    if not wait and watcher.look().phase == "absent":
        raise FileError(f"{watcher.run_dir} is no run folder: it has no config.json (--wait waits for it)")
    board = TensorBoard(tensorboard) if tensorboard is not None else None
    try:
        if web:
            _serve(watcher, host, port, every, board, json)
        elif json or once:
            view = _begun(watcher, every)
            _tell(board, view)
            _print(view, json)
        else:
            _follow(watcher, every, board)
    finally:
        if board is not None:
            board.close()


def _newest() -> Path:
    """The run that was begun last, where nobody says which."""
    found = sorted(RUNS.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("which run? Name its folder: there is none in runs/")
    return found[-1].parent


def _begun(watcher: Watcher, every: float) -> View:
    """How it is, once it is there."""
    while (view := watcher.look()).phase == "absent":
        time.sleep(every)
    return view


def _tell(board: TensorBoard | None, view: View) -> None:
    if board is not None:
        board.show(view)


def _print(view: View, json: bool) -> None:
    if json:
        print_json(view.to_json())
    else:
        from laconic.watch.terminal import frame

        console = stdout_console()
        console.print(frame(view, width=console.width))


def _follow(watcher: Watcher, every: float, board: TensorBoard | None) -> None:
    """Until it is over; where stdout is no terminal only its end is printed."""
    from rich.live import Live

    from laconic.watch.terminal import frame

    console = stdout_console()
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            view = watcher.look()
            _tell(board, view)
            live.update(frame(view, width=console.width), refresh=console.is_terminal)
            if view.over:
                return
            time.sleep(every)


def _serve(watcher: Watcher, host: str, port: int, every: float, board: TensorBoard | None, json: bool) -> None:
    from laconic.watch.web import Site

    with Site(watcher.look, host, port) as site, suppress(KeyboardInterrupt):  # which is how one leaves
        if json:
            print_json({"run": str(watcher.run_dir), "url": site.url})
        else:
            print(f"{watcher.run_dir} is shown at {site.url} until Ctrl-C", flush=True)
        while True:
            time.sleep(every)
            if board is not None:
                board.show(site.look())


def register(app: typer.Typer) -> None:
    app.command("watch", epilog=examples(*EXAMPLES))(watch)
