"""Those who pester a server, seen from this side: their program is ``storm``."""

from __future__ import annotations

import json
import subprocess
import sys

from laconic.errors import LaconicError
from laconic_lab.faults import flood_client

__all__ = ["Besiegers"]


class Besiegers:
    """The program that pesters a server, and its orders; see ``storm``."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        command = [sys.executable, "-S", "-E", flood_client.__file__, host, port]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, **order: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def report(self) -> dict[str, int]:
        """What became of the last order, once it is carried out."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LaconicError("the besiegers have died")
        found: dict[str, int] = json.loads(line)
        return found

    def close(self) -> None:
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
        self._process.kill()
        self._process.wait()
