"""The exceptions of laconic.

::

    LaconicError
      ConfigError (ValueError)      a codec spec, a flag or a policy is wrong
      InputError (ValueError)       a tensor or buffer has a wrong dtype, shape or size
        NonFiniteError              it holds a NaN or an infinity
      FrameError (ValueError)       bytes are not a valid frame
      FileError (OSError)           a file is missing, damaged or cannot be written
      WrongResultError              the result of a benchmark is wrong

Messages say what was expected, what was given, where, and what to do. Bytes from other processes raise ``FrameError``
only.
"""

from __future__ import annotations

__all__ = ["ConfigError", "FileError", "FrameError", "InputError", "LaconicError", "NonFiniteError", "WrongResultError"]


class LaconicError(Exception):
    """The base class of all exceptions of laconic."""


class ConfigError(LaconicError, ValueError):
    """A codec spec, flag or policy is wrong."""


class InputError(LaconicError, ValueError):
    """A tensor or buffer cannot be used."""


class NonFiniteError(InputError):
    """A tensor holds a NaN or an infinity, or a value too large for float32."""


class FrameError(LaconicError, ValueError):
    """Bytes are not a valid frame, or are damaged."""


class FileError(LaconicError, OSError):
    """A file is missing, damaged or cannot be written."""


class WrongResultError(LaconicError):
    """The result of a benchmark is wrong, so its time is not reported."""
