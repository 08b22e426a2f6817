"""An interrupt ends a command as one, whatever became of the exception on its way up."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from laconic.cli import app as module


def raising() -> typer.Typer:
    app = typer.Typer(cls=module._Group)

    @app.command()
    def read() -> None:
        raise ValueError("could not determine the shape of object type 'torch.storage.UntypedStorage'")

    @app.command()
    def other() -> None: ...

    return app


def test_an_error_after_an_interrupt_is_the_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_interrupts", [2])
    done = CliRunner().invoke(raising(), ["read"])
    assert done.exit_code == 130 and "interrupted" in done.output


def test_an_error_of_its_own_is_not() -> None:
    done = CliRunner().invoke(raising(), ["read"])
    assert isinstance(done.exception, ValueError)
