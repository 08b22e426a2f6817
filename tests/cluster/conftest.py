"""Fixtures of the cluster tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_peers import Peer

from laconic.cluster.certificates import new_job


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    """Return a factory of peers that are closed after the test."""
    made: list[Peer] = []

    def make(port: int, credentials: Any = None) -> Peer:
        made.append(Peer(port, credentials))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: to sync thousands of files on a disk would take minutes."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def job_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the certificates of a job with two workers; tests do not change them."""
    folder = tmp_path_factory.mktemp("certs") / "job"
    new_job(folder, name="digits", hosts=["ps.example.org", "10.0.0.5", "127.0.0.2"], workers=2)
    return folder
