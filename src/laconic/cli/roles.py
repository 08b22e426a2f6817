"""``laconic server`` and ``laconic worker``: the two roles of a run, on this host or on several."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.cli.options import option
from laconic.cli.output import examples, print_json, print_stderr
from laconic.errors import ConfigError

__all__ = ["EXAMPLES", "SERVER", "WORKER", "Metrics", "check_grpc", "register", "serve_metrics", "server", "worker"]

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
    list[Path], typer.Argument(metavar="RUN_DIR", help="Folders of runs, each with its config.json; one after another.")
]

Metrics = Annotated[
    str | None,
    typer.Option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics at /metrics; loopback only."),
]


def server(
    run_dirs: RunDirs,
    index: Annotated[int, option("Index of this server, from 0.", metavar="I", min=0)] = 0,
    host: Annotated[str, option("Address to listen on; all but loopback need --certs.", metavar="H")] = "127.0.0.1",
    port: Annotated[int, option("0 takes a free port.", min=0, max=65535)] = 0,
    certs: Annotated[Path | None, option("The server's files of laconic certs new.", metavar="DIR")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    metrics: Metrics = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Serve a run: hold its parameters, answer its workers, save checkpoints.

    laconic train starts a server and its workers on one host. On several:

    1. Write the run's folder:
      laconic train … --workers 2 --run-dir run --prepare

    2. Make certificates; --host is the server's address:
      laconic certs new certs --job digits --host 10.0.0.5 --workers 2

    3. Copy run/config.json to every host, and the certificates that this
    command names.

    4. Start the server with --host, --port and --certs, and a worker on each
    other host with --server and --certs; it waits a minute for the server.

    The server ends when all iterations are done and the workers have left, or
    on SIGTERM. In both cases it saves a checkpoint in RUN_DIR/checkpoints, and
    --resume continues from it. RUN_DIR/events.jsonl is the event log.
    """
    from laconic.train.server_process import serve

    check_grpc()
    _check_free(host, port)
    started: list[Path] = []
    try:
        with serve_metrics(started, metrics):
            for run_dir in run_dirs:
                started.append(run_dir)
                serve(run_dir, index=index, host=host, port=port, certs=certs, resume=resume)
    except KeyboardInterrupt:
        if json:
            _print_views(started)
        raise
    if json:
        _print_views(started)


def worker(
    run_dirs: RunDirs,
    number: Annotated[int, typer.Option("--worker", metavar="N", help="Number of this worker, from 0.")],
    incarnation: Annotated[
        int | None, option("Must grow with each start of this worker.", "the time", metavar="N", min=0)
    ] = None,
    addresses: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            metavar="HOST:PORT",
            help="The server's address; repeat it for several servers.",
            show_default="read from the folder",
        ),
    ] = None,
    patience: Annotated[float, option("Seconds to retry a server that does not answer.", metavar="S", min=0)] = 60.0,
    certs: Annotated[Path | None, option("This worker's files of laconic certs new.", metavar="DIR")] = None,
    device: Annotated[str, option("Where this worker trains and encodes: cpu, cuda or auto.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, and no lines.")] = False,
) -> None:
    """Train as one worker of a run, and print a JSON line after each exchange.

    On the server's host --server may be left out: the server writes its address
    to the folder. On another host the folder needs only config.json, a copy of
    the server's; data sets are read from --data-dir of laconic train or from
    $LACONIC_DATA. laconic server --help explains the setup.

    To restart a worker that has died, run the same command: the server rejects
    what its previous process still sends, and tells it where to continue.
    """
    from laconic.train.run import Config
    from laconic.train.worker_process import work

    check_grpc()
    for address in addresses or ():
        _check_address(address)
    for run_dir in run_dirs:
        workers = Config.load(run_dir).job.workers
        if not 0 <= number < workers:
            raise ConfigError(f"--worker must be from 0 to {workers - 1} in {run_dir}, got {number}")
    last: dict[str, dict[str, Any]] = {}
    options: dict[str, Any] = {"report": lambda line: last.update({line["run_dir"]: line})} if json else {}
    for run_dir in run_dirs:
        work(
            run_dir, number, incarnation=incarnation, addresses=addresses or None, certs=certs, patience=patience,
            device=device, **options,
        )  # fmt: skip
    if json:
        print_json({"worker": number, "runs": list(last.values())})


@contextmanager
def serve_metrics(runs: Sequence[Path], address: str | None) -> Iterator[None]:
    """Serve Prometheus metrics of the last of these runs inside the block; do nothing without an address."""
    if address is None:
        yield
        return
    from laconic.watch.metrics import check_prometheus
    from laconic.watch.view import View, Watcher
    from laconic.watch.web import WatchServer, split_address

    host, port = split_address(address, option="--metrics")
    check_prometheus("--metrics")
    watchers: dict[Path, Watcher] = {}

    def read_view() -> View:
        return watchers.setdefault(runs[-1], Watcher(runs[-1])).view()

    with WatchServer(read_view, host, port, page=False) as server:
        print_stderr(f"metrics at {server.url}metrics")
        yield


def _print_views(run_dirs: Sequence[Path]) -> None:
    """Print what servers left in the folders of their runs."""
    from laconic.watch.view import Watcher

    keys = ("run", "phase", "version", "received", "sent", "faults", "summary")
    views = [Watcher(run_dir).view() for run_dir in run_dirs]
    print_json({"runs": [{key: getattr(view, key) for key in keys} for view in views]})


def check_grpc() -> None:
    """Raise an error if gRPC is missing, before anything starts."""
    if find_spec("grpc") is None:
        raise ConfigError("servers and workers need gRPC: pip install 'laconic[cluster]'")


def _check_free(host: str, port: int) -> None:
    """Raise a one-line error if the address cannot be listened on; gRPC's own message has several lines."""
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
