from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from alone import ALONE
from typer.testing import CliRunner, Result

from laconic.cli.app import app
from laconic_lab.network import Link, labs, remove, unique_name


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "there is no root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    for program in ("ip", "tc"):
        if shutil.which(program, path=path) is None:
            return f"there is no {program}"
    # In a container root may be root by name only.
    space = unique_name("try")
    tried = subprocess.run(["ip", "netns", "add", space], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", space], capture_output=True)
    return None if tried.returncode == 0 else f"namespaces cannot be made here: {' '.join(tried.stderr.split())}"


@pytest.fixture(scope="session")
def privileged() -> None:
    """Root that may make namespaces, ip and tc."""
    if missing := _missing():
        pytest.skip(f"no network namespaces: {missing}")


@pytest.fixture
def tun(privileged: None) -> None:
    if not Path("/dev/net/tun").exists():
        pytest.skip("no /dev/net/tun")


@pytest.fixture
def nft(privileged: None) -> None:
    if shutil.which("nft") is None and shutil.which("nft", path="/usr/sbin:/sbin") is None:
        pytest.skip("no nft (install nftables)")


@pytest.fixture
def name(privileged: None) -> Iterator[str]:
    """A lab's name that is free, and nothing of it left after the test, whatever happened."""
    chosen = unique_name("test")
    yield chosen
    remove(chosen)


@pytest.fixture
def settled() -> Callable[[Callable[[], Link]], Link]:
    """Measures until the link is valid, five times at most: a machine busy with something else measures that."""

    def measured(measure: Callable[[], Link]) -> Link:
        seen = []
        while len(seen) < 5:
            seen.append(measure())
            if seen[-1].valid:
                return seen[-1]
        pytest.fail(f"no link is valid: {', '.join(map(str, seen))}")

    return measured


@pytest.fixture
def run() -> Callable[..., Result]:
    """The command in this process."""
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args], prog_name="laconic")


@pytest.fixture
def script() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A process of its own that knows the lab and not torch."""
    started = []

    def start(code: str, *args: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", ALONE + code, *args]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def left() -> Callable[[str], list[str]]:
    """What is left of a lab: files, namespaces, processes."""

    def look(name: str) -> list[str]:
        remaining = [lab for lab in labs() if lab == name]
        lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
        return remaining + [line for line in lines if f"laconic-{name}-" in line]

    return look
