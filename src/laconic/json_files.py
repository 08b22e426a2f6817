"""JSON from files of unknown origin: bounded, and errors in one line."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from laconic.errors import FileError

__all__ = ["MAX_DEPTH", "open_regular", "parse_json", "read_json", "read_regular_text"]

MAX_DEPTH = 64
"""The most containers inside each other; none of our files has more than ten."""
MAX_NBYTES = 1 << 28
"""The most bytes of a file, many times those of any of ours."""
_MAX_DIGITS = 20
_LONG_NUMBER = re.compile(r"[0-9]{20}")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; ``OSError`` for a pipe or a device, which might never end."""
    # A pipe without a writer would block open itself.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular_text(path: Path) -> str:
    """Return the text of a regular file; ``ValueError`` if it is not UTF-8, ``OSError`` if it is too long."""
    with open_regular(path) as file:
        text = file.read(MAX_NBYTES + 1) if os.fstat(file.fileno()).st_size <= MAX_NBYTES else None
    if text is None or len(text) > MAX_NBYTES:
        raise OSError(errno.EFBIG, f"longer than {MAX_NBYTES >> 20} MiB", str(path))
    return text.decode("utf-8")


def parse_json(text: str, *, long_as_none: bool = False) -> Any:
    r"""Parse JSON of a stranger; ``ValueError`` in one short line if it is not acceptable.

    Besides what ``json.loads`` refuses: more than ``MAX_DEPTH`` containers inside each other, whole numbers of more
    than 64 bits, and text that is not Unicode (``"\ud800"``), all of which are errors of Python somewhere later.

    Args:
        text: The JSON.
        long_as_none: Read a whole number of more than 64 bits as None.
    """
    parse_int = partial(_parse_int, as_none=long_as_none) if _LONG_NUMBER.search(text) else None
    try:
        value = json.loads(text, parse_int=parse_int)
    except RecursionError:
        raise ValueError(f"more than {MAX_DEPTH} levels of nesting") from None
    if _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"more than {MAX_DEPTH} levels of nesting")
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a text holds half of a surrogate pair, which is not Unicode") from None
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    containers = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        items = (item for one in containers for item in (one.values() if isinstance(one, dict) else one))
        containers = [item for item in items if isinstance(item, dict | list)]
    return bool(containers)


def _parse_int(text: str, as_none: bool) -> int | None:
    if len(text) > _MAX_DIGITS + 1 or abs(int(text)) >= 1 << 64:
        if as_none:
            return None
        raise ValueError(f"a whole number of {len(text)} digits, more than 64 bits")
    return int(text)


def read_json(path: Path, *, long_as_none: bool = False) -> Any:
    """Read a JSON file; ``FileNotFoundError`` or ``NotADirectoryError`` if there is none, else ``FileError``."""
    try:
        return parse_json(read_regular_text(path), long_as_none=long_as_none)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise FileError(f"{path} is not JSON: {error}") from None
