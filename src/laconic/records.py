"""Record: one measurement with the machine, versions, seed and commit it came from; JSON lines in and out."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from laconic.errors import FileError

__all__ = ["Record", "commit", "machine", "read", "versions", "write"]


@lru_cache(maxsize=1)
def machine() -> dict[str, Any]:
    """What the figures were measured on, as far as the system tells; no names of hosts or people."""
    model, flags = platform.processor() or platform.machine(), set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
                break
    import torch

    found: dict[str, Any] = {"cpu": model, "cores": os.cpu_count(), "system": platform.system()}
    found["vector"] = "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else platform.machine()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    import torch

    from laconic._version import __version__

    return {"laconic": __version__, "torch": torch.__version__, "python": platform.python_version()}


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The commit of the checkout this package lies in, ``-dirty`` when it has local changes; None when installed."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # An installed copy may lie inside somebody else's repository: only our own checkout counts.
    if git("ls-files", "--error-unmatch", "records.py") is None:
        return None
    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}-dirty" if head and git("status", "--porcelain", "--", "..") else head


@dataclass(frozen=True)
class Record:
    """One measurement.

    Args:
        kind: What was measured, e.g. ``bench.codec``.
        values: The figures and settings; units are in the names (``encode_s``, ``nbytes``).
        seed: The seed it ran with.
    """

    kind: str
    values: Mapping[str, Any]
    seed: int = 0
    machine: Mapping[str, Any] = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    commit: str | None = field(default_factory=commit)
    at: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> Record:
        return cls(**json.loads(line))


def write(records: Iterable[Record], path: Path) -> None:
    """Replace ``path`` by these records, one a line."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(record.to_json() + "\n" for record in records), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise FileError(f"cannot write records to {path}: {error.strerror or error}") from error


def read(path: Path) -> list[Record]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [Record.from_json(line) for line in lines if line.strip()]
    except OSError as error:
        raise FileError(f"cannot read records: {error}") from error
    except (ValueError, TypeError) as error:
        raise FileError(f"{path} does not hold records, one JSON object a line: {error}") from error
