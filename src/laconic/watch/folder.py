"""A run's folder: the names of its files, for those who write them and those who only look.

::

    config.json         all that decides the run
    server.json         where the server of a run on this host listens
    events.jsonl        what happened, in order
    status.json         how the server sees its run now
    progress.jsonl      how it went so far, at moments that get rarer the longer it takes
    checkpoints/        of the server
    workers/0/          what only worker 0 remembers
    reports.jsonl       what each life of a worker told last
    track-0.json        worker 0's way through the run, and what slots took and lost
    summary.json        at the end
    records.jsonl       the same and all tracks, for `laconic report`

Of several servers the others' files bear their number: ``server-1.json``, ``events-1.jsonl``, ``checkpoints-1``.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "CHECKPOINTS",
    "CONFIG",
    "EVENTS",
    "PROGRESS",
    "RECORDS",
    "REPORTS",
    "SERVER",
    "STATUS",
    "SUMMARY",
    "WORKERS",
    "of_server",
    "write_whole",
]

CONFIG, SERVER, EVENTS, SUMMARY = "config.json", "server.json", "events.jsonl", "summary.json"
STATUS, PROGRESS = "status.json", "progress.jsonl"
REPORTS, RECORDS = "reports.jsonl", "records.jsonl"
CHECKPOINTS, WORKERS = "checkpoints", "workers"


def of_server(name: str, server: int) -> str:
    """The name of a server's file.

    >>> of_server("events.jsonl", 0), of_server("events.jsonl", 2), of_server("checkpoints", 1)
    ('events.jsonl', 'events-2.jsonl', 'checkpoints-1')
    """
    if not server:
        return name
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{server}{dot}{suffix}"


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing: readers poll for these files."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
