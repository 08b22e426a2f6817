"""An interrupt ends a command with exit code 130, even if a library turned it into another exception."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from laconic.cli import app as module
from laconic.cli import interrupts


def failing_app() -> typer.Typer:
    app = typer.Typer(cls=module._Group)

    @app.command()
    def read() -> None:
        raise ValueError("could not determine the shape of object type 'torch.storage.UntypedStorage'")

    @app.command()
    def other() -> None: ...

    return app


def test_error_after_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "received", [2])
    done = CliRunner().invoke(failing_app(), ["read"])
    assert done.exit_code == 130 and "interrupted" in done.output


def test_error_without_an_interrupt_is_raised() -> None:
    done = CliRunner().invoke(failing_app(), ["read"])
    assert isinstance(done.exception, ValueError)
