"""Which labs are up: one JSON file each, in a folder under the system's temporary one that only its owner may enter.

The file is there from before the first namespace to after the last: a lab whose owner was killed can be found and
removed.
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
        raise ConfigError(f"a lab's name is of small letters, digits and dashes, at most 32, got {name!r}")


def unique_name(prefix: str) -> str:
    """A name that no other lab has: for programs of which several may run at once."""
    return f"{prefix}-{secrets.token_hex(3)}"


def claim(name: str, **values: Any) -> None:
    """Take a name, or refuse if there is such a lab."""
    try:
        with _path(name).open("x") as file:
            json.dump({"name": name, **values}, file)
    except FileExistsError:
        raise ConfigError(
            f"there is a lab {name!r} already: remove it by `laconic lab down --name {name}`, or take another name"
        ) from None


def load(name: str) -> dict[str, Any]:
    try:
        found = json.loads(_path(name).read_text())
        return {
            "owner": found["owner"],
            "congestion": found["congestion"],
            "hosts": [Host(**host) for host in found["hosts"]],
        }
    except FileNotFoundError:
        others = ", ".join(known()) or "none"
        raise ConfigError(f"there is no lab {name!r} (up: {others}): start it by `laconic lab up`") from None
    except (ValueError, TypeError, KeyError) as error:
        raise FileError(
            f"{_path(name)} cannot be read ({error}): remove the lab by `laconic lab down --name {name}`"
        ) from None


def forget(name: str) -> None:
    _path(name).unlink(missing_ok=True)


def known() -> list[str]:
    """The names taken."""
    return sorted(path.stem for path in _folder().glob("*.json"))


def _path(name: str) -> Path:
    check_name(name)
    return _folder() / f"{name}.json"


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / "laconic-lab"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # What it says is run as root: it must be ours.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise FileError(f"{folder} belongs to another user, or others may write there: remove it, or set TMPDIR")
    return folder
