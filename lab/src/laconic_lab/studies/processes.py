"""``laconic server`` and ``laconic worker`` as processes on hosts of an emulated network."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from laconic.errors import LaconicError
from laconic.train.supervision import SUPERVISED

if TYPE_CHECKING:
    from laconic_lab.bench.cluster.processes import Network
    from laconic_lab.network import Link

__all__ = ["WorkerReports", "measured_links", "role_process"]

log = logging.getLogger("laconic")

LINK_TRIES = 3
"""How often links are measured until all are valid."""


def measured_links(net: Network) -> list[Link]:
    """Return the measured links of a network; a warning names each that does not carry what it should."""
    for _ in range(LINK_TRIES):
        links = list(net.measure())
        if all(link.valid for link in links):
            break
    for link in links:
        if not link.valid:
            log.warning("the link carries %s: measurements over it are marked as not valid", link)
    return links


@contextmanager
def role_process(net: Network, host: int, arguments: Sequence[str], out: int) -> Iterator[subprocess.Popen[Any]]:
    """Run a role with one thread on a host; the process is killed at the end of the block."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, SUPERVISED: "1"}
    program = [sys.executable, "-m", "laconic", *arguments]
    process = net.start(host)(program, stdout=out, text=True, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class WorkerReports:
    """The JSON lines that workers print after each exchange, in the order of arrival."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()

    def listen(self, worker: int, process: subprocess.Popen[Any]) -> None:
        """Start a thread that reads the output of a worker."""
        threading.Thread(target=self._read, args=(worker, process), daemon=True).start()

    def _read(self, worker: int, process: subprocess.Popen[Any]) -> None:
        assert process.stdout is not None
        with process.stdout as out:
            for line in out:
                self._lines.put((worker, line))
        self._lines.put((worker, None))

    def next(self, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Return the number of a worker and its next report."""
        try:
            worker, line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise LaconicError(f"no worker has finished an exchange in {timeout_s:.0f} s") from None
        if line is None:
            raise LaconicError(f"worker {worker} has ended too early; its messages are above")
        return worker, json.loads(line)
