"""The fuzz target of text files that somebody else wrote: Records, run folders, profiles, evidence, files of tune."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

import bend
from inputs import folder
from laconic.cluster.deny_list import DenyList
from laconic.errors import ConfigError, FileError
from laconic.plan.evidence import Evidence, counting, load_evidence, shipped_evidence
from laconic.plan.messages import Workload
from laconic.plan.profile import load as load_profile
from laconic.plan.recommend import PlanRequest, recommend
from laconic.records import Record
from laconic.report import gather
from laconic.train.run import CONFIG, Config
from laconic.tuning.search import Kept
from laconic.tuning.training import Outcome
from laconic.watch import terminal
from laconic.watch.status import PARTS, Status, WorkerStatus
from laconic.watch.view import Watcher

RUN_FILES = ("config.json", "status.json", "progress.jsonl", "accuracy.jsonl", "summary.json")
SETTINGS = {"model": "yours", "numel": 9, "workers": 2, "steps": 8}


def _is_json(value: Any) -> None:
    json.dumps(value, allow_nan=False).encode()


def _records(path: Path) -> None:
    for record in gather([path]).records:
        record.to_json().encode()


def _run_folder(name: str) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        run = path.parent
        for other, text in _run_texts().items():
            if other != name:
                (run / other).write_bytes(text)
        path.replace(run / name)
        view = Watcher(run, clock=lambda: 12.0).view()
        _is_json(view.to_json())
        console = Console(file=StringIO(), width=80, force_terminal=False)
        console.print(terminal.render(view, width=80))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert all(line.isprintable() for line in shown.splitlines()), "control codes in a terminal"

    return read


def _config(path: Path) -> None:
    path.replace(path.parent / CONFIG)
    Config.load(path.parent)


def _evidence(path: Path) -> None:
    evidence = load_evidence(path)
    for one in evidence:
        _is_json(one.values())
        assert math.isfinite(one.given_up) and one.text.isprintable()
    _plan(evidence=evidence)
    counting(evidence, every=1, model="mlp", numel=1000, workers=2)


def _profile(path: Path) -> None:
    _is_json(_plan(profile=load_profile(path)))


def _plan(**options: Any) -> Any:
    profile = options.pop("profile", None) or _shipped_profile()
    request = PlanRequest(
        profile, Workload.of_params(100_000), 0.01, codecs=["qsgd:4"], family="mlp",
        optimizer="momentum", **options,
    )  # fmt: skip
    return recommend(request, break_even=False).values()


def _tuned(path: Path) -> None:
    kept = Kept(path, SETTINGS)
    for outcome in kept.outcomes.values():
        _is_json(outcome.values())
        assert outcome.error >= 0 and outcome.growth >= 0
    kept.add(Outcome("none", 1.0, 1.0, 1.0))


def _denied(path: Path) -> None:
    assert all(len(one) == 64 for one in DenyList(path).denied)


READERS: tuple[Callable[[Path], None], ...] = (
    _records, *map(_run_folder, RUN_FILES), _config, _evidence, _profile, _tuned, _denied,
)  # fmt: skip


@cache
def _shipped_profile() -> Any:
    return load_profile("cpu")


@cache
def _run_texts() -> dict[str, bytes]:
    worker = WorkerStatus(
        iteration=3, loss=0.5, state="computing", lives=1, seconds=dict.fromkeys(PARTS, 1.0), heard_at=9.0
    )  # fmt: skip
    status = Status(at=10.0, began_at=0.0, updates=9, iterations=9, workers=[worker]).to_json()
    point = {"at": 1.0, "iteration": 2, "version": 2, "loss": 0.5, "received": 1, "sent": 2, "missed": 0, "faults": 0}
    config = {"model": "mlp", "data": "digits", "iterations": 9, "servers": 1, "method": "1",
              "job": {"workers": 2, "mode": "sync", "push": "qsgd:4", "pull": "none"}}  # fmt: skip
    accuracy = {"at": 2.0, "iteration": 2, "accuracy": 91.5, "examples": 100}
    summary = {"accuracy": 91.5, "loss": 0.1, "total_s": 5.0, "compute_s": 0.1, "wire_bytes": 100}
    values = (config, status, point, accuracy, summary)
    return {name: json.dumps(one).encode() + b"\n" for name, one in zip(RUN_FILES, values, strict=True)}


@cache
def file_seeds() -> list[bytes]:
    record = Record("demo.method", {"method": "1", "workers": 2, "accuracy": 91.0, "at": [1, 2.5]}, 0, {"cpu": "a"},
                    {"torch": "2"}, "abc", "2026-01-01")  # fmt: skip
    evidence: list[Evidence] = [one for one in shipped_evidence() if one.family == "mlp"][:2]
    profile = _shipped_profile().to_json()
    profile["codecs"] = {spec: profile["codecs"][spec] for spec in ("none", "bf16", "qsgd:4")}
    profile["models"] = dict(list(profile["models"].items())[:1])
    slot = {"codec": "qsgd:4", "error": 0.1, "growth": 1.0, "residual": 0.1}
    outcome = Outcome("qsgd:4", 0.5, 10.0, 0.1, {"w": slot})
    texts = [
        record.to_json().encode() + b"\n" + record.to_json().encode(), *_run_texts().values(),
        json.dumps(Config().to_json()).encode(),
        json.dumps({"format": "laconic evidence", "trainings": [one.values() for one in evidence]}).encode(),
        json.dumps(profile).encode(),
        json.dumps({"format": "laconic evidence", "settings": SETTINGS, "outcomes": [outcome.values()]}).encode(),
        b"# a comment\n" + b"ab:" * 31 + b"ab stolen\n" + b"0" * 64 + b"\n",
    ]  # fmt: skip
    return [bytes([number]) + text for number, text in enumerate(texts)]


def bend_file(data: bytes, rng: Any, scramble: bend.Scramble, room: int) -> bytes:
    """Change the JSON of a line, or the bytes, or read the file as another."""
    number, text = data[:1] or b"\0", data[1:]
    if rng.random() < 0.03:
        return bytes([rng.randrange(256)]) + text
    lines = text.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = bend.json_text(lines[at], rng, scramble)
    return number + b"\n".join(lines)


def check_file(data: bytes) -> bool:
    """A file is read, and what is made of it can be printed and written; or one line says why not."""
    with folder() as at:
        path = at / "file.json"
        path.write_bytes(data[1:])
        try:
            READERS[data[0] % len(READERS) if data else 0](path)
        except (FileError, ConfigError):
            return False
    return True
