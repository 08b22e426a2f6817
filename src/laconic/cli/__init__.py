"""The ``laconic`` command: arguments in, one call, text or JSON out."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from laconic.cli import interrupts

__all__ = ["main"]


def main() -> None:
    """Run the console script."""
    interrupts.install()
    try:
        from laconic.cli.app import app  # loads the lab's commands, whose modules import others of this package

        app(prog_name="laconic")
    except KeyboardInterrupt:
        _end(130)
    except SystemExit as end:
        if interrupts.received:
            _end(end.code if isinstance(end.code, int) else 1)
        raise


def _end(code: int) -> NoReturn:
    """End the process at once, without the seconds that torch takes to shut down: everything is closed."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue  # the reader of the pipe was interrupted, too
    os._exit(code)
