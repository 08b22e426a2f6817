"""An interrupt ends a command with exit code 130, even if a library turned it into another exception."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

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


BEGIN = """
import time
from laconic.cli import interrupts
interrupts.install()
try:
    print("ready", flush=True)
    time.sleep(60)
"""


def interrupted(rest: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Interrupt a program in its ``try`` block; return how it ended and after which seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + rest], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess([], process.returncode, out, err), time.monotonic() - began


def test_swallowed_interrupt_is_repeated() -> None:
    done, seconds = interrupted("except KeyboardInterrupt: pass\ntime.sleep(60)")
    assert done.stderr.count("stopping...") == 1 and "KeyboardInterrupt" in done.stderr.splitlines()[-1]
    assert done.returncode != 0 and seconds < 20


def test_clean_up_is_not_interrupted_again() -> None:
    done, seconds = interrupted("finally: time.sleep(1.5); print('clean')")
    assert done.stdout == "clean\n" and seconds > 1.4


def test_interrupt_is_not_repeated_for_a_command_that_ends_by_itself() -> None:
    done, _ = interrupted("except KeyboardInterrupt: interrupts.stop_repeating()\ntime.sleep(1.5); print('end')")
    assert done.stdout == "end\n" and done.returncode == 0
