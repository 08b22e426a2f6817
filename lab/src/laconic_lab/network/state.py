"""The registry of existing labs: one JSON file each, in a private folder below the system's temporary folder.

The file exists from before the first namespace is created until after the last is deleted, so that a lab whose owner
was killed can be found and removed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError, FileError
from laconic_lab.network.hosts import Host

__all__ = ["check_name", "claim", "forget", "known", "load", "unique_name"]

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a lab's name must be 1 to 32 lower-case letters, digits and dashes, got {name!r}")


def unique_name(prefix: str) -> str:
    """Return a name that no other lab has, for programs that may run several times at once."""
    return f"{prefix}-{secrets.token_hex(3)}"


def claim(name: str, **values: Any) -> None:
    """Register a lab; ``ConfigError`` if the name is taken."""
    try:
        with _path(name).open("x") as file:
            json.dump({"name": name, **values}, file)
    except FileExistsError:
        raise ConfigError(
            f"lab {name!r} exists already: remove it with `laconic lab down --name {name}`, or choose another name"
        ) from None


def load(name: str) -> dict[str, Any]:
    try:
        saved = json.loads(_path(name).read_text())
        return {
            "owner": saved["owner"],
            "congestion": saved["congestion"],
            "hosts": [Host(**host) for host in saved["hosts"]],
        }
    except FileNotFoundError:
        others = ", ".join(known()) or "none"
        raise ConfigError(f"there is no lab {name!r} (up: {others}): start one with `laconic lab up`") from None
    except (ValueError, TypeError, KeyError) as error:
        raise FileError(
            f"{_path(name)} cannot be read ({error}): remove the lab with `laconic lab down --name {name}`"
        ) from None


def forget(name: str) -> None:
    _path(name).unlink(missing_ok=True)


def known() -> list[str]:
    """Return the names of all registered labs."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def _path(name: str) -> Path:
    check_name(name)
    return _folder() / f"{name}.json"


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / "laconic-lab"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    # Root acts on the files in it, so no other user may write there.
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise FileError(f"{folder} belongs to another user, or others may write there: remove it, or set TMPDIR")
    return folder
