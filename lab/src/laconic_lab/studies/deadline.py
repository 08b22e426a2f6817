"""The time at which a call of a study ends although work is left; the same call continues later."""

from __future__ import annotations

import time
from pathlib import Path

from laconic.errors import ConfigError, LaconicError

__all__ = ["Deadline", "OutOfTimeError"]


class OutOfTimeError(LaconicError):
    """The time of a call is over. What was done is kept, and the same call continues."""


class Deadline:
    """A number of minutes from now on; without a number it never passes.

    >>> Deadline().passed, Deadline(60).passed, Deadline(0).passed
    (False, False, True)
    """

    def __init__(self, minutes: float | None = None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def passed(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def require(self, records: Path | None) -> None:
        """Raise ``ConfigError`` if the call could not continue: without a folder nothing is kept."""
        if self._end is not None and records is None:
            raise ConfigError("--minutes needs --records: without a folder of Records nothing could continue")

    def check(self) -> None:
        """Raise ``OutOfTimeError`` after the deadline; to be called where everything that was done is kept."""
        if self.passed:
            raise OutOfTimeError("the time is over; all that was done is kept, and the same command continues")
