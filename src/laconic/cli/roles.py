"""``laconic server`` and ``laconic worker``: the two roles of a run, on this host or on several."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.output import examples, print_json, print_stderr
from laconic.errors import ConfigError, LaconicError

__all__ = ["EXAMPLES", "SERVER", "WORKER", "Metrics", "check_grpc", "expose", "register", "server", "worker"]

SERVER = (
    "laconic server run --host 10.0.0.5 --port 50051 --certs certs",
    "laconic server run --host 10.0.0.5 --port 50051 --certs certs --resume",
    "laconic server run --json",
    "laconic server run --metrics 127.0.0.1:9464",
)
WORKER = (
    "laconic worker run --worker 0 --server 10.0.0.5:50051 --certs certs",
    "laconic worker run --worker 0 --json",
    "laconic worker run --worker 1",
)
EXAMPLES = SERVER + WORKER

RunDirs = Annotated[
    list[Path], typer.Argument(metavar="RUN_DIR", help="Folders of runs, each with its config.json; in turn.")
]

Metrics = Annotated[
    str | None,
    typer.Option("--metrics", metavar="HOST:PORT", help="Tell Prometheus at /metrics there: on loopback only."),
]


def server(
    run_dirs: RunDirs,
    index: Annotated[
        int, typer.Option("--index", metavar="I", help="Which of several servers this is, from 0 on.", min=0)
    ] = 0,
    host: Annotated[
        str, typer.Option("--host", metavar="H", help="The address to listen on; any but loopback needs --certs.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 0,
    certs: Annotated[
        Path | None,
        typer.Option("--certs", metavar="DIR", help="The server's part of what laconic certs new made."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    metrics: Metrics = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Serve a run: hold its parameters, answer its workers, keep checkpoints.

    laconic train starts a server and its workers on one host. On several:

    1. Write the run's folder:
    laconic train … --workers 2 --run-dir run --prepare

    2. Make certificates, --host being the server's address:
    laconic certs new certs --job digits --host 10.0.0.5 --workers 2

    3. Copy run/config.json to every host, and of certs what that command says.

    4. Start the server there with --host, --port and --certs, and on the others
    a worker each with --server and --certs; it waits a minute for the server.

    Ends when all iterations are done and the workers have left, or on SIGTERM.
    Either way a checkpoint stays in RUN_DIR/checkpoints, from which --resume
    goes on. What happened is in RUN_DIR/events.jsonl.
    """
    from laconic.train.roles import serve

    check_grpc()
    _check_free(host, port)
    begun: list[Path] = []
    try:
        with expose(begun, metrics):
            for run_dir in run_dirs:
                begun.append(run_dir)
                serve(run_dir, index=index, host=host, port=port, certs=certs, resume=resume)
    except KeyboardInterrupt:
        if json:
            _sum_up(begun)
        raise
    if json:
        _sum_up(begun)


def worker(
    run_dirs: RunDirs,
    number: Annotated[int, typer.Option("--worker", metavar="N", help="This worker's number, from 0 on.")],
    incarnation: Annotated[
        int | None,
        typer.Option(
            "--incarnation", metavar="N", help="Grows with each start of this worker.", min=0, show_default="the time"
        ),
    ] = None,
    addresses: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="HOST:PORT",
            help="Where the server listens; of several, each in turn.",
            show_default="told by the folder",
        ),
    ] = None,
    patience: Annotated[
        float, typer.Option("--patience", metavar="S", help="Seconds to try a server that does not answer.", min=0)
    ] = 60.0,
    certs: Annotated[
        Path | None,
        typer.Option("--certs", metavar="DIR", help="This worker's part of what laconic certs new made."),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="Where this worker trains and encodes: cpu, cuda, or auto.")
    ] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and no lines.")] = False,
) -> None:
    """Train as one worker of a run, and print a JSON line after each exchange.

    On the server's host --server may be left out: the server writes its address
    to the folder. On another host the folder needs nothing but config.json, a
    copy of the server's, and data sets lie where --data-dir of laconic train
    or $LACONIC_DATA says. laconic server --help tells how to set all up.

    A worker that has died is started again by the same command: the server
    then refuses what is still under way from before, and says where to go on.
    """
    from laconic.train.roles import work
    from laconic.train.run import Config

    check_grpc()
    for address in addresses or ():
        _check_address(address)
    for run_dir in run_dirs:
        workers = Config.load(run_dir).job.workers
        if not 0 <= number < workers:
            raise ConfigError(f"{run_dir} has the workers 0 to {workers - 1}, there is no --worker {number}")
    last: dict[str, dict[str, Any]] = {}
    how: dict[str, Any] = {"report": lambda line: last.update({line["run_dir"]: line})} if json else {}
    for run_dir in run_dirs:
        work(
            run_dir, number, incarnation=incarnation, addresses=addresses or None, certs=certs, patience=patience,
            device=device, **how,
        )  # fmt: skip
    if json:
        print_json({"worker": number, "runs": list(last.values())})


@contextmanager
def expose(runs: Sequence[Path], address: str | None) -> Iterator[None]:
    """Metrics of the last of these runs for Prometheus, as long as it takes; nothing without an address."""
    if address is None:
        yield
        return
    from laconic.watch.view import View, Watcher
    from laconic.watch.web import Site, split_address

    watchers: dict[Path, Watcher] = {}

    def look() -> View:
        return watchers.setdefault(runs[-1], Watcher(runs[-1])).look()

    with Site(look, *split_address(address, option="--metrics"), page=False) as site:
        print_stderr(f"metrics at {site.url}metrics")
        yield


def _sum_up(run_dirs: Sequence[Path]) -> None:
    """What servers leave in the folders of their runs."""
    from laconic.watch.view import Watcher

    keys = ("run", "phase", "version", "received", "sent", "faults", "summary")
    views = [Watcher(one).look() for one in run_dirs]
    print_json({"runs": [{key: getattr(view, key) for key in keys} for view in views]})


def check_grpc() -> None:
    """Without it neither role can begin: said once, before anything starts."""
    if find_spec("grpc") is None:
        raise LaconicError("servers and workers talk by gRPC, which is not installed: pip install 'laconic[cluster]'")


def _check_free(host: str, port: int) -> None:
    """Says in a line what gRPC says in several."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(where)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --port, or one of this host's "
            "addresses for --host"
        ) from None


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--server must be host:port, such as 10.0.0.5:50051, got {address!r}")


def register(app: typer.Typer) -> None:
    app.command("server", epilog=examples(*SERVER))(server)
    app.command("worker", epilog=examples(*WORKER))(worker)
