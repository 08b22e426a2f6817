"""``laconic certs new`` and ``laconic certs show``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.output import examples, results, show_json

if TYPE_CHECKING:
    from laconic.cluster.security import Certificate

__all__ = ["EXAMPLES", "new", "register", "show"]

NEW = (
    "laconic certs new certs --job digits --host ps.example.org --host 10.0.0.5 --workers 4",
    "laconic certs new lab --job lab --host 10.0.0.5 --workers 2 --days 7 --json",
)
SHOW = ("laconic certs show certs", "laconic certs show certs --json")
EXAMPLES = NEW + SHOW

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a job's certificates.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def new(
    folder: Folder,
    job: Annotated[str, typer.Option(metavar="NAME", help="The job's name.")],
    host: Annotated[
        list[str],
        typer.Option(metavar="H", help="A name or address by which workers reach the server; may be given again."),
    ],
    workers: Annotated[int, typer.Option(metavar="N", help="How many workers there are.")],
    days: Annotated[int, typer.Option(metavar="D", help="How long the certificates are good.")] = 365,
    json: Json = False,
) -> None:
    """Make a job's certificates: a CA, one for the server, one per worker.

    Private keys are readable by you alone. Copy to each host ca.pem and the
    .pem and .key of its member, and nothing else. The CA's key is not kept:
    a job that grows is made anew. A folder that holds anything is refused.
    """
    from laconic.cluster.security import new_job

    found = new_job(folder, name=job, hosts=host, workers=workers, days=days)
    if json:
        show_json(_as_json(folder, found))
        return
    _print(found)
    console = results()
    console.print(f"wrote {folder}. To the server's host: ca.pem, server.pem, server.key", markup=False)
    console.print("To the host of worker 0: ca.pem, worker-0.pem, worker-0.key; and so on", markup=False)


def show(folder: Folder, json: Json = False) -> None:
    """Show whose certificates a folder holds, until when and for which hosts.

    The exit code is 1 if any of them could not be used.
    """
    from laconic.cluster.security import certificates
    from laconic.errors import FileError

    found = certificates(folder)
    if not found:
        raise FileError(f"{folder} holds a CA's certificate and no other: copy those of its members there")
    if json:
        show_json(_as_json(folder, found))
    else:
        _print(found)
    if any(certificate.fault for certificate in found):
        raise typer.Exit(1)


def _as_json(folder: Path, found: tuple[Certificate, ...]) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "certificates": [
            {
                "file": certificate.file,
                "job": certificate.identity and certificate.identity.job,
                "role": certificate.identity and certificate.identity.role,
                "worker": certificate.identity and certificate.identity.worker,
                "hosts": certificate.hosts,
                "since": certificate.since and certificate.since.isoformat(),
                "until": certificate.until and certificate.until.isoformat(),
                "fault": certificate.fault,
            }
            for certificate in found
        ],
    }


def _print(found: tuple[Certificate, ...]) -> None:
    from rich.table import Table

    table = Table("job", "who", "until (UTC)", "hosts", "state")
    for certificate in found:
        table.add_row(
            certificate.identity.job if certificate.identity else "?",
            certificate.identity.name if certificate.identity else certificate.file,
            f"{certificate.until:%Y-%m-%d %H:%M}" if certificate.until else "?",
            ", ".join(certificate.hosts) or "-",
            "see below" if certificate.fault else "good",
        )
    console = results()
    console.print(table, markup=False)
    for certificate in found:
        if certificate.fault:  # a sentence with a path in it: too long for a column
            console.print(certificate.fault, markup=False, soft_wrap=True)


def _root(context: typer.Context) -> None:
    """Certificates of a job, for servers and workers on several hosts.

    On one host none are needed: there traffic stays on loopback.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def register(app: typer.Typer) -> None:
    group = typer.Typer(rich_markup_mode="rich")
    group.callback(invoke_without_command=True)(_root)
    group.command("new", epilog=examples(*NEW))(new)
    group.command("show", epilog=examples(*SHOW))(show)
    app.add_typer(group, name="certs", epilog=examples(*EXAMPLES))
