"""Run folders as servers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from laconic.watch.folder import CONFIG, STATUS, server_file
from laconic.watch.status import PARTS, Status, WorkerStatus
from laconic.watch.view import View, Watcher


def worker(iteration: int, loss: float | None, **values: Any) -> WorkerStatus:
    seconds = dict.fromkeys(PARTS, 1.0)
    options = {"state": "computing", "lives": 1, "seconds": seconds, "heard_at": 9.0} | values
    return WorkerStatus(iteration=iteration, loss=loss, **options)


def server(at: float, **values: Any) -> Status:
    return Status(at=at, **{"began_at": 0.0, "updates": 100, "iterations": 100, "workers": [worker(1, 1.0)]} | values)


class Folder:
    """A run's folder and its watcher."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, values: Any) -> None:
        self.path.mkdir(exist_ok=True)
        (self.path / name).write_text(json.dumps(values))

    def config(self, iterations: int = 100, servers: int = 1, mode: str = "sync", **values: Any) -> None:
        job = {"workers": 2, "mode": mode, "push": "topk:0.01|qsgd:4", "pull": "none"}
        self.write(CONFIG, {"model": "mlp", "iterations": iterations, "servers": servers, "job": job} | values)

    def status(self, status: Status, server: int = 0) -> None:
        self.write(server_file(STATUS, server), status.to_json())

    def point(self, at: float, iteration: int, **values: Any) -> dict[str, Any]:
        base = {"version": iteration, "loss": 1 / (1 + iteration), "received": 0, "sent": 0, "missed": 0, "faults": 0}
        return {"at": at, "iteration": iteration} | base | values

    def watcher(self, at: float = 1.0) -> Watcher:
        return Watcher(self.path, clock=lambda: at)

    def view(self, at: float = 1.0) -> View:
        return self.watcher(at).view()
