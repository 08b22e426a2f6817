"""Ctrl-C and SIGTERM: acknowledged at once, and no traceback."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["install", "received", "stop_repeating"]

REPEAT_S = 0.5

received: list[int] = []
"""SIGINTs received so far."""


def install() -> None:
    """Handle signals. Called before anything slow is imported, so that Ctrl-C works from the start."""
    # By default SIGTERM ends a process without its finally blocks, and partial files would remain.
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise it is ignored, as under nohup
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    received.append(number)
    if len(received) == 1:
        start = "\n" if sys.stderr.isatty() else ""  # after the terminal's ^C, or the progress bar
        os.write(2, f"{start}laconic: stopping...\n".encode())  # print may be the very function that was interrupted
        signal.signal(signal.SIGALRM, _repeat)
        signal.setitimer(signal.ITIMER_REAL, REPEAT_S, REPEAT_S)
    raise KeyboardInterrupt


def _repeat(number: int, frame: object) -> None:
    """Interrupt again if a library has swallowed the first interrupt, as extensions do while they are imported.

    While an exception is handled, the command is being ended: cleaning up must not be interrupted.
    """
    if sys.exc_info()[0] is None:
        raise KeyboardInterrupt


def stop_repeating() -> None:
    """Go on after an interrupt: the caller has caught it and ends by itself."""
    signal.setitimer(signal.ITIMER_REAL, 0)


def _terminate(number: int, frame: object) -> None:
    sys.exit(128 + number)
