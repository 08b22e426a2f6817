from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_file import tensors
from safetensors.torch import save_file

from cli_runner import run, work_dir

__all__ = ["model", "run", "work_dir"]


@pytest.fixture
def model(work_dir: Path) -> Path:
    """Return the path of a safetensors file with one tensor of each kind."""
    path = work_dir / "model.safetensors"
    save_file(tensors(), path, metadata={"format": "pt"})
    return path
