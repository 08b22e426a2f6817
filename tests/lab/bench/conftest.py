from __future__ import annotations

from cli_runner import run, work_dir

__all__ = ["run", "work_dir"]
