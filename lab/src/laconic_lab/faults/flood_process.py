"""Controls the process that floods a server with connections."""

from __future__ import annotations

import json
import subprocess
import sys

from laconic.errors import LaconicError
from laconic_lab.faults import flood_client

__all__ = ["FloodProcess"]


class FloodProcess:
    """A running ``flood_client``; see there for the requests."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        command = [sys.executable, "-S", "-E", flood_client.__file__, host, port]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def request(self, **request: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def report(self) -> dict[str, int]:
        """Wait for the last request and return its result."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LaconicError("the flood process has died")
        result: dict[str, int] = json.loads(line)
        return result

    def close(self) -> None:
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
        self._process.kill()
        self._process.wait()
