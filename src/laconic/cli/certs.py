"""The commands ``laconic certs new``, ``laconic certs show`` and ``laconic certs deny``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.cli.options import Json, add_group, option
from laconic.cli.output import print_json, print_table, print_text
from laconic.tables import Table

if TYPE_CHECKING:
    from laconic.cluster.security import Certificate

__all__ = ["EXAMPLES", "deny", "new", "register", "show"]

NEW = (
    "laconic certs new certs --job digits --host ps.example.org --host 10.0.0.5 --workers 4",
    "laconic certs new lab --job lab --host 10.0.0.5 --workers 2 --days 7 --json",
)
SHOW = ("laconic certs show certs", "laconic certs show certs --json")
DENY = ("laconic certs deny certs worker-1", "laconic certs deny certs worker-2 worker-3 --json")
EXAMPLES = NEW + SHOW + DENY

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a job's certificates.")]


def new(
    folder: Folder,
    job: Annotated[str, option("The job's name.", metavar="NAME")],
    host: Annotated[
        list[str], option("A name or address by which workers reach the server; may be repeated.", metavar="H")
    ],
    workers: Annotated[int, option("Number of workers.", metavar="N")],
    days: Annotated[int, option("Days for which the certificates are valid.", metavar="D")] = 365,
    json: Json = False,
) -> None:
    """Make a job's certificates: a CA, one for the server, one per worker.

    Private keys are readable by you alone. Copy to each host ca.pem and the
    .pem and .key of its member, and nothing else. The CA's key is not kept:
    for more workers make new certificates. The folder must be empty.
    """
    from laconic.cluster.certificates import new_job

    certificates = new_job(folder, name=job, hosts=host, workers=workers, days=days)
    if json:
        print_json(_as_json(folder, certificates))
        return
    _print(certificates)
    print_text(
        f"wrote {folder}. To the server's host: ca.pem, server.pem, server.key",
        "To the host of worker 0: ca.pem, worker-0.pem, worker-0.key; and so on",
    )


def show(folder: Folder, json: Json = False) -> None:
    """Show the owner, expiry and hosts of each certificate in a folder.

    The exit code is 1 if any of them cannot be used.
    """
    from laconic.cluster.security import list_certificates as read_certificates
    from laconic.errors import FileError

    certificates = read_certificates(folder)
    if not certificates:
        raise FileError(f"{folder} contains a CA's certificate only: copy the members' certificates there")
    if json:
        print_json(_as_json(folder, certificates))
    else:
        _print(certificates)
    if any(certificate.fault for certificate in certificates):
        raise typer.Exit(1)


def deny(
    folder: Folder,
    members: Annotated[list[str], typer.Argument(metavar="WORKER...", help="Names such as worker-1.")],
    json: Json = False,
) -> None:
    """Deny workers: the server no longer accepts their certificates.

    Run it in the folder that the server's --certs names. It adds the
    certificates' SHA-256 to denied.txt there; a running server reads the
    file within a second, refuses these workers and ends their calls.
    """
    from laconic.cluster.deny_list import DENIED_FILE
    from laconic.cluster.deny_list import deny as add

    added = add(folder, members)
    if json:
        print_json({"folder": str(folder), "denied": added})
        return
    print_text(f"{', '.join(added) or 'nothing'} added to {folder / DENIED_FILE}")


def _as_json(folder: Path, certificates: tuple[Certificate, ...]) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "certificates": [
            {
                "file": certificate.file, "job": certificate.identity and certificate.identity.job,
                "role": certificate.identity and certificate.identity.role,
                "worker": certificate.identity and certificate.identity.worker, "hosts": certificate.hosts,
                "since": certificate.since and certificate.since.isoformat(),
                "until": certificate.until and certificate.until.isoformat(), "fault": certificate.fault,
            }
            for certificate in certificates
        ],
    }  # fmt: skip


def _print(certificates: tuple[Certificate, ...]) -> None:
    rows = [
        (
            certificate.identity.job if certificate.identity else "?",
            certificate.identity.name if certificate.identity else certificate.file,
            f"{certificate.until:%Y-%m-%d %H:%M}" if certificate.until else "?",
            ", ".join(certificate.hosts) or "-",
            "see below" if certificate.fault else "good",
        )
        for certificate in certificates
    ]
    print_table(Table(("job", "owner", "until (UTC)", "hosts", "state"), rows, text_columns=5))
    print_text(*(certificate.fault for certificate in certificates if certificate.fault))  # too long for a column


HELP = """Make, show and deny the certificates of a job whose server and workers run on several hosts.

A job on one host needs none: its traffic stays on loopback.
"""


def register(app: typer.Typer) -> None:
    add_group(app, "certs", HELP, {"new": (new, NEW), "show": (show, SHOW), "deny": (deny, DENY)})
