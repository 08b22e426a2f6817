"""``laconic server`` and ``laconic worker``: the two roles of a run, on this host or on several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.output import examples

__all__ = ["EXAMPLES", "register", "server", "worker"]

EXAMPLES = ()


def server(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs, each with its config.json; in turn.")],
    host: Annotated[str, typer.Option("--host", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 0,
    certs: Annotated[Path | None, typer.Option("--certs", help="Folder of laconic certs new.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
) -> None:
    """Serve a run: hold its parameters, answer its workers, keep checkpoints."""
    from laconic.train.run import serve

    for run_dir in run_dirs:
        serve(run_dir, host=host, port=port, certs=certs, resume=resume)


def worker(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs, each with its config.json; in turn.")],
    number: Annotated[int, typer.Option("--worker", help="This worker's number, from 0 on.")],
    incarnation: Annotated[int, typer.Option("--incarnation", help="Grows with each start of this worker.")] = 0,
    address: Annotated[str | None, typer.Option("--server", help="host:port; by default told by the folder.")] = None,
    certs: Annotated[Path | None, typer.Option("--certs", help="Folder of laconic certs new.")] = None,
) -> None:
    """Train as one worker of a run."""
    from laconic.train.run import work

    for run_dir in run_dirs:
        work(run_dir, number, incarnation=incarnation, address=address, certs=certs)


def register(app: typer.Typer) -> None:
    app.command("server", epilog=examples(*EXAMPLES))(server)
    app.command("worker", epilog=examples(*EXAMPLES))(worker)
