"""One of five workers pushes poison: robust means hold, the plain mean does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import TIMEOUT, core_of, job_of, open_session, train

from laconic.cluster.core import Core
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job
from laconic.cluster.protocol import Frame
from laconic.cluster.replies import Reply
from laconic.errors import ConfigError
from laconic.frames import decode, encode
from laconic.train import build_task

WORKERS, POISONER = 5, 2
ROBUST = ("clipped", "median", "trimmed:1")
SPARSE = {"push": "ef|topk:0.1", "pull": "none", "push_small": "none"}


class Poisoned(InProcessConnection):
    """The connection of a worker that pushes its gradient times a negative factor, as a dense frame."""

    factor = -100.0

    def exchange(self, sequence: int, frames: Iterable[tuple[int, Frame]], score: Callable[[], float]) -> Reply:
        if self.worker == POISONER:
            frames = [(slot, encode(self.factor * decode(frame), "none")) for slot, frame in frames]
        return super().exchange(sequence, frames, score)


def accuracy_of(link: Any, exchanges: int = 60, **options: Any) -> float:
    """Return the test accuracy in percent after a short training."""
    job = Job(**{"workers": WORKERS, "lr": 0.1, "momentum": 0.9, "seed": 1} | options)
    core, _ = train(job, exchanges, link=link)
    task = build_task("mlp", "digits", seed=job.seed)
    with torch.no_grad():
        for name, parameter in task.model.named_parameters():
            parameter.copy_(core.parameters[name])
    return float(task.evaluate()["accuracy"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SPARSE], ids=["dense", "sparse"])
def test_one_poisoner_of_five_breaks_the_mean_and_no_robust_mean(options: dict[str, Any]) -> None:
    clean = accuracy_of(InProcessConnection, **options)
    poisoned = {after: accuracy_of(Poisoned, after=after, **options) for after in ("mean", *ROBUST)}
    assert clean > 85 and poisoned["mean"] < 50, (clean, poisoned)
    assert all(poisoned[after] > clean - 10 for after in ROBUST), (clean, poisoned)


@pytest.mark.slow
@pytest.mark.parametrize("after", ROBUST)
def test_robust_mean_without_a_poisoner_trains_as_well(after: str) -> None:
    assert accuracy_of(InProcessConnection, after=after) > accuracy_of(InProcessConnection) - 3


def pushed(core: Core, values: list[float]) -> None:
    from waiting import in_threads

    def push(worker: int) -> None:
        frame = encode(torch.full((4,), values[worker]), "none")
        InProcessConnection(core, worker, timeout=TIMEOUT).exchange(core.version, [(0, frame)], lambda: 0.0)

    in_threads(*(lambda w=w: push(w) for w in range(len(values))))


@pytest.mark.parametrize("after, expected", [("median", 3.0), ("trimmed:1", 3.0), ("clipped", (1 + 2 + 3 + 3 + 3) / 5)])
@pytest.mark.parametrize("returns", ["weights", "gradients", "delta"])
def test_round_of_a_robust_mean(after: str, expected: float, returns: str) -> None:
    core = core_of(job_of(workers=5, after=after, returns=returns), {"w": torch.zeros(4)})
    for worker in range(5):
        open_session(core, worker)
    pushed(core, [1.0, 2.0, 3.0, 4.0, 1e30])
    assert core.parameters["w"].tolist() == pytest.approx([-expected] * 4) and core.version == 1
    pushed(core, [0.0] * 5)
    assert core.parameters["w"].tolist() == pytest.approx([-expected] * 4) and core.queued_nbytes == 0


@pytest.mark.parametrize("options", [
    {"mode": "async", "after": "median"}, {"after": "median", "backup": 1}, {"after": "average"},
    {"after": "trimmed:2", "workers": 4}, {"after": "median", "returns": "sum", "push": "thc:4", "push_small": "thc:4"},
], ids=str)  # fmt: skip
def test_impossible_combination_raises_config_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="after"):
        job_of(**{"workers": 5} | options)
