"""Everything laconic raises on purpose.

::

    LaconicError
      ConfigError (ValueError)      a codec spec, a flag or a policy is wrong
      InputError (ValueError)       a tensor or buffer cannot be taken: its dtype, shape, size
        NonFiniteError              it holds a NaN or an infinity
      FrameError (ValueError)       bytes from outside are not a frame we can read
      FileError (OSError)           a file is missing, damaged or cannot be written
      WrongResultError              a benchmark met a wrong answer, and a fast wrong answer is no result

Messages say what was expected, what came, where, and what to do next. Bytes from outside raise ``FrameError`` and
nothing else.
"""

from __future__ import annotations

__all__ = ["ConfigError", "FileError", "FrameError", "InputError", "LaconicError", "NonFiniteError", "WrongResultError"]


class LaconicError(Exception):
    """The root of the tree: catch it to catch all of them."""


class ConfigError(LaconicError, ValueError):
    """A codec spec, flag or policy does not make sense."""


class InputError(LaconicError, ValueError):
    """A tensor or buffer handed in cannot be used."""


class NonFiniteError(InputError):
    """A tensor holds a NaN or an infinity, or a value too large for float32."""


class FrameError(LaconicError, ValueError):
    """Bytes that are not a frame, or no longer one."""


class FileError(LaconicError, OSError):
    """A file that is missing, damaged or cannot be written."""


class WrongResultError(LaconicError):
    """A measurement whose result is wrong: it is not reported."""
