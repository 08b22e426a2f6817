"""Files that survive a power failure, and errors of the system as ``FileError``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laconic.errors import FileError, LaconicError

__all__ = ["os_error_as_file_error", "sync_folder"]


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, if the system can sync folders."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def os_error_as_file_error(action: str) -> Iterator[None]:
    """Raise ``FileError`` instead of an ``OSError`` inside the block: "cannot <action>: <reason>"."""
    try:
        yield
    except LaconicError:
        raise
    except OSError as error:
        raise FileError(f"cannot {action}: {error.strerror or error}") from None
