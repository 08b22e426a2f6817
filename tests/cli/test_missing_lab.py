"""The commands of laconic-lab if that distribution is not installed."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from cli_runner import assert_error
from laconic.cli import codecs, plugins
from laconic.cli.app import _Group


@pytest.fixture
def app_without_lab(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    app = typer.Typer(name="laconic", cls=_Group)
    codecs.register(app)
    plugins.register(app)
    return app


@pytest.mark.parametrize(
    "command", ["bench", "bench ddp --ranks 2", "bench --help", "study oland2015", "lab up", "lab", "study --part map"]
)
def test_lab_command_prints_how_to_install_it(app_without_lab: typer.Typer, command: str) -> None:
    result = CliRunner().invoke(app_without_lab, command.split(), prog_name="laconic")
    assert_error(result, 2, f"laconic {command.split()[0]}", "pip install laconic-lab")


def test_help_lists_the_lab_commands(app_without_lab: typer.Typer) -> None:
    shown = CliRunner().invoke(app_without_lab, ["--help"], prog_name="laconic").stdout
    assert all(f" {name} " in shown for name in ("bench", "study", "lab")) and "pip install laconic-lab" in shown
