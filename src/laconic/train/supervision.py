"""The relation of a server or worker process to the launcher that started it."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["SUPERVISED", "end_with_launcher", "is_supervised"]

SUPERVISED = "LACONIC_SUPERVISED"
"""Environment variable that a launcher sets: its processes end with it, and leave Ctrl-C to it."""


def is_supervised() -> bool:
    return SUPERVISED in os.environ


def end_with_launcher() -> None:
    """Ignore SIGINT, and receive SIGTERM when the launcher ends; do nothing without a launcher."""
    if not is_supervised():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG works even if the launcher is killed
    except (OSError, AttributeError):
        return  # not Linux: an orphan ends when its server or its workers do
    if os.getppid() == 1:  # the launcher ended before prctl
        os.kill(os.getpid(), signal.SIGTERM)
