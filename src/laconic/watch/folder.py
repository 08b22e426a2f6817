"""Names of the files in a run's folder.

::

    config.json         configuration of the run
    server.json         address of a server on this host
    events.jsonl        event log of the server; events.1.jsonl: the events before, if the run is long
    status.json         current status of the server
    progress.jsonl      status over time; points get rarer the longer the run takes
    accuracy.jsonl      accuracy of worker 0's model on some test examples, now and then
    checkpoints/        of the server
    workers/0/          state that only worker 0 has
    reports.jsonl       last report of each start of a worker
    track-0.json        worker 0's progress over time, and bytes and errors of its slots
    summary.json        written at the end
    records.jsonl       summary and tracks as Records, for `laconic report`

With several servers, the files of servers 1, 2, … carry the index: ``server-1.json``, ``events-1.jsonl``,
``checkpoints-1``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

__all__ = [
    "ACCURACY", "CHECKPOINTS", "CONFIG", "EVENTS", "PROGRESS", "RECORDS", "REPORTS", "SERVER", "STATUS", "SUMMARY",
    "WORKERS", "open_to_append", "server_file", "write_atomically",
]  # fmt: skip

CONFIG, SERVER, EVENTS, SUMMARY = "config.json", "server.json", "events.jsonl", "summary.json"
STATUS, PROGRESS, ACCURACY = "status.json", "progress.jsonl", "accuracy.jsonl"
REPORTS, RECORDS = "reports.jsonl", "records.jsonl"
CHECKPOINTS, WORKERS = "checkpoints", "workers"


def server_file(name: str, server: int) -> str:
    """Return the name of a file or folder of one of several servers.

    >>> server_file("events.jsonl", 0), server_file("events.jsonl", 2), server_file("checkpoints", 1)
    ('events.jsonl', 'events-2.jsonl', 'checkpoints-1')
    """
    if not server:
        return name
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{server}{dot}{suffix}"


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers, who poll for it, see all of it or the previous version."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def open_to_append(path: Path) -> TextIO:
    """Open a file of lines; a last line that a kill or a full disk cut off is ended first."""
    file = path.open("a+b")
    if file.tell() and not _ends_with_newline(path):
        file.write(b"\n")
    file.close()
    return path.open("a", encoding="utf-8")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
