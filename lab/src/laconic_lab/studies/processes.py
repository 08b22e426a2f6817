"""``laconic server`` and ``laconic worker`` on hosts of a network, for studies that measure real ones."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from laconic.train.roles import SUPERVISED

if TYPE_CHECKING:
    from laconic_lab.bench.cluster.processes import Network

__all__ = ["Lines", "listen", "started"]

Lines = queue.SimpleQueue[tuple[int, str | None]]
"""What workers say, by their number; None when one has ended."""


@contextmanager
def started(net: Network, host: int, arguments: Sequence[str], out: int) -> Iterator[subprocess.Popen[Any]]:
    """A role on a host, one thread each; there as long as the block."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, SUPERVISED: "1"}
    program = [sys.executable, "-m", "laconic", *arguments]
    process = net.start(host)(program, stdout=out, text=True, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def listen(number: int, process: subprocess.Popen[Any], lines: Lines) -> None:
    """Put what a worker prints where it can be waited for."""
    threading.Thread(target=_read, args=(number, process, lines), daemon=True).start()


def _read(number: int, process: subprocess.Popen[Any], lines: Lines) -> None:
    assert process.stdout is not None
    with process.stdout as out:
        for line in out:
            lines.put((number, line))
    lines.put((number, None))
