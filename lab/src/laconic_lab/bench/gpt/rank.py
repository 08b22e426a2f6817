"""One rank of the GPT benchmark; a program whose argument is JSON. Rank 0 prints JSON lines.

Every method starts from the same weights and reads the same windows. A task is one of:

- ``check``: LocalSGD without compression and local steps must give the loss of DDP.
- ``loss``: train all steps and evaluate on the way. Nothing is timed, so the link does not matter.
- ``time``: take the first steps, or all, without evaluations; time each and count its bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective import differing
from laconic.errors import WrongResultError
from laconic_lab.bench.gpt.methods import METHODS, Method, Trainer, evaluate, steps_of
from laconic_lab.bench.gpt.settings import build_gpt
from laconic_lab.bench.gpt.text import load_text
from laconic_lab.network.paced_sockets import paced_bytes

__all__ = ["TextRank", "main", "run_tasks"]

CHECK_STEPS = 6
CHECK_TOLERANCE = 1e-4
"""Relative difference of losses that rounding may cause: the same sums are taken in another order."""
COMPUTE_STEPS = 3


def main(options: dict[str, Any]) -> None:
    run_tasks(Rank, options, int(options["ranks"]))


class TaskRank(Protocol):
    """A rank that runs tasks and tells the parent process about them."""

    def tell(self, what: dict[str, Any]) -> None: ...

    def run(self, task: dict[str, Any]) -> dict[str, Any]: ...


def run_tasks(rank_type: Callable[[dict[str, Any]], TaskRank], options: dict[str, Any], ranks: int) -> None:
    """Join the other ranks over gloo and run the tasks of the options, each announced and answered."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=options["store"], rank=options["rank"], world_size=ranks)
    rank = rank_type(options)
    for task in options["tasks"]:
        rank.tell({"begin": task})
        rank.tell({"result": rank.run(task)})
    dist.barrier()
    dist.destroy_process_group()
    rank.tell({"end": True})


class SteppedTraining(Protocol):
    """A training of a rank, step by step."""

    def step(self, windows: Tensor) -> None: ...

    def finish(self) -> None: ...


class TextRank:
    """A rank whose trainings read windows of a text, other ones than the other ranks.

    Args:
        longest: Steps of the longest training.
    """

    def __init__(self, options: dict[str, Any], ranks: int, longest: int) -> None:
        self.options, self.ranks = options, ranks
        self.rank, self.context = int(options["rank"]), int(options["context"])
        folder = options.get("data_dir")
        self.text = load_text(None if folder is None else Path(folder))
        seed = int(options["seed"]) * 1009 + self.rank
        self.starts = self.text.windows(self.context, int(options["batch"]), longest, seed)
        self.held_out = self.text.evaluation(self.context, int(options["eval_windows"]))

    def tell(self, what: dict[str, Any]) -> None:
        if self.rank == 0:
            print(json.dumps(what), flush=True)

    def windows(self, step: int) -> Tensor:
        return self.text.batch(self.starts[step], self.context)

    def loss_curve(self, trainer: SteppedTraining, steps: int, loss: Callable[[], float]) -> list[list[float]]:
        """Take all steps and finish; return [step, loss] before the first step and on the way."""
        curve = [[0, loss()]]
        for step in range(1, steps + 1):
            trainer.step(self.windows(step - 1))
            if step % int(self.options["eval_every"]) == 0 and step < steps:
                curve.append([step, loss()])
            self.tell({"step": step})
        trainer.finish()
        return curve


class Rank(TextRank):
    def __init__(self, options: dict[str, Any]) -> None:
        self.steps = int(options["steps"])
        longest = max(self.steps, *(steps_of(name, self.steps, float(options["stretch"])) for name in METHODS))
        super().__init__(options, int(options["ranks"]), longest)

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        if task["part"] == "check":
            return self.check()
        method = METHODS[task["method"]]
        steps = steps_of(task["method"], self.steps, float(self.options["stretch"]))
        return self.train(method, steps) if task["part"] == "loss" else self.measure(method, steps, task["steps_timed"])

    def check(self) -> dict[str, Any]:
        """Compare LocalSGD that averages the update of each step with DDP, under SGD, whose updates are linear."""
        losses = []
        for method in (Method("DDP", "sgd"), Method("LocalSGD", "sgd", every=1)):
            trainer = self.trainer(method, CHECK_STEPS)
            for step in range(min(CHECK_STEPS, self.steps)):
                trainer.step(self.windows(step))
            trainer.finish()
            losses.append(self.final_loss(trainer))
        if not abs(losses[1] - losses[0]) <= CHECK_TOLERANCE * losses[0]:
            raise WrongResultError(
                f"LocalSGD(codec='none', every=1, outer='mean') ends at a loss of {losses[1]:.5f} and DDP at "
                f"{losses[0]:.5f}, but they must be equal"
            )
        return {"losses": losses}

    def train(self, method: Method, steps: int) -> dict[str, Any]:
        """Train all steps; return [step, loss] of the common model on the way, and of the result."""
        trainer = self.trainer(method, steps)
        curve = self.loss_curve(trainer, steps, lambda: self.loss(trainer))
        curve.append([steps, self.final_loss(trainer)])
        return {"curve": curve, "text_sha256": self.text.digest, "numel": trainer.numel}

    def measure(self, method: Method, steps: int, count: int) -> dict[str, Any]:
        """Take the first steps; return of each the seconds, those of waiting, and the bytes sent and received.

        Seconds are differences between the clocks of the slowest ranks, the rest are means over ranks.
        """
        start = count // 2 if method.hook == "powersgd" else None
        trainer = self.trainer(method, steps, start)
        compute = [trainer.compute_s(self.windows(step)) for step in range(COMPUTE_STEPS + 1)][1:]
        compute_s = sum(compute) / len(compute)
        dist.barrier()
        table = []
        for step in range(count):
            with self.timed() as row:
                trainer.step(self.windows(step))
            table.append([row.seconds, max(0.0, trainer.backward_s - compute_s), *row.nbytes])
            self.tell({"step": step + 1})
        waited_s = trainer.waited_s
        with self.timed() as row:
            trainer.finish()
        loss = self.final_loss(trainer)
        mean = torch.tensor([*table, [row.seconds, row.seconds, *row.nbytes]], dtype=torch.float64)
        if method.every:
            mean[:-1, 1] = waited_s / count  # LocalSGD counts the sum alone
        clock = mean[:, 0].cumsum(0)  # all clocks began after the same barrier
        dist.all_reduce(mean)
        mean /= self.ranks
        dist.all_reduce(clock, op=dist.ReduceOp.MAX)
        seconds = torch.diff(clock, prepend=torch.zeros(1, dtype=torch.float64))
        self.check_paced(method, mean, trainer.numel)
        return {
            "seconds": seconds[:-1].tolist(), "waited": mean[:-1, 1].tolist(), "sent": mean[:-1, 2].tolist(),
            "received": mean[:-1, 3].tolist(), "finish_s": float(seconds[-1]), "finish_nbytes": mean[-1, 2:].tolist(),
            "compute_s": compute_s, "powersgd_start": start, "loss": loss, "numel": trainer.numel,
        }  # fmt: skip

    def trainer(self, method: Method, steps: int, powersgd_start: int | None = None) -> Trainer:
        rates = {name: float(self.options[name]) for name in ("lr", "muon_lr")}
        return Trainer(method, build_gpt(self.options), steps, powersgd_start=powersgd_start, **rates)

    def loss(self, trainer: Trainer) -> float:
        with trainer.common_model() as model:
            return evaluate(model, self.held_out, self.rank, self.ranks)

    def final_loss(self, trainer: Trainer) -> float:
        """Return the loss of the result; raise ``WrongResultError`` unless all ranks have its bits."""
        if differ := differing(dict(trainer.model.named_parameters())):
            raise WrongResultError(f"{trainer.method.title}: ranks ended with different parameters: {differ[0]}")
        return evaluate(trainer.model, self.held_out, self.rank, self.ranks)

    def check_paced(self, method: Method, mean: Tensor, numel: int) -> None:
        """Raise unless the paced sockets carried the bytes that plain DDP must send."""
        least = 0.9 * 2 * (self.ranks - 1) / self.ranks * 4 * numel
        plain = not (method.every or method.hook or method.ours)
        if paced_bytes() is not None and plain and float(mean[:-1, 2].min()) < least:
            raise WrongResultError(
                f"paced sockets carried {float(mean[:-1, 2].min()):.0f} bytes in a step, plain DDP sends at least "
                f"{least:.0f}: this torch uses system calls that are not paced"
            )

    def timed(self) -> _Row:
        return _Row(str(self.options["interface"]))


class _Row:
    """Seconds, and bytes sent and received, of a ``with`` block."""

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self.seconds = 0.0
        self.nbytes: list[float] = []

    def __enter__(self) -> _Row:
        self._traffic = self.traffic()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self.nbytes = [now - before for now, before in zip(self.traffic(), self._traffic, strict=True)]

    def traffic(self) -> tuple[int, int]:
        """Return the bytes that this rank has sent and received.

        Paced sockets count what is sent. Ranks send to each other alone, so on average each receives as much. The
        interface of a rank's own namespace counts headers, too; loopback, which others use, is not counted.
        """
        if (paced := paced_bytes()) is not None:
            return paced, paced
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.interface != "lo":
                return int(numbers.split()[8]), int(numbers.split()[0])
        return 0, 0


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = given["interface"]
    main(given)
