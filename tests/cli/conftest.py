from __future__ import annotations

from pathlib import Path

import pytest
from command import Run, tensors
from safetensors.torch import save_file
from typer.testing import CliRunner

from laconic.cli.app import app


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run() -> Run:
    """The command in this process."""
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args], prog_name="laconic")


@pytest.fixture
def model(here: Path) -> Path:
    path = here / "model.safetensors"
    save_file(tensors(), path, metadata={"format": "pt"})
    return path
