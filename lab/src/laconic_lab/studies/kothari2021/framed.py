"""Steppers that make real frames.

``FrameStepper`` makes every frame. ``LocalFrameStepper`` makes those of exchanges after local steps, which
do not wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.train.task import Task
from laconic_lab.studies.kothari2021.rounds import FrameRounds
from laconic_lab.studies.kothari2021.settings import Setting
from laconic_lab.studies.kothari2021.stepper import LocalStepper
from laconic_lab.studies.stepper import EpochEnd, GraphStepper, Source, Stepper

__all__ = ["FrameStepper", "LocalFrameStepper"]


class LocalFrameStepper(LocalStepper):
    """Computes local steps, each as one CUDA graph on a GPU; every exchange is made of real frames.

    For exchanges that cannot be computed: of whole weights, and by other codecs.
    """

    def _prepare(self) -> None:
        super()._prepare()
        self.rounds = FrameRounds(self.job, self.tasks, self.shards, self.schedule)
        self._bases = [self.rounds.copy_of(worker) for worker in range(self.job.workers)]
        self._bytes = (0, 0)

    def _use(self, specs: tuple[str, str]) -> None:
        self._bytes = (self.rounds.bytes_sent, self.rounds.bytes_received)
        for channel in self.rounds.push:
            channel.spec = specs[0]
        self.rounds.pull.spec = specs[1]

    def _fill_keys(self) -> None:
        """Do nothing: frames get their seeds one by one."""

    def step(self) -> None:
        with self._on_stream():
            self._run_stage(0)
            self._count += 1
            if (self.done * self.per_epoch + self._count) % self.job.every == 0:
                self._exchange_frames()

    def _exchange_frames(self) -> None:
        for held in self.held:
            held.publish()
        self.rounds.finish(self._bases)
        for held in self.held:
            held.collect()
        self._bases = [self.rounds.copy_of(worker) for worker in range(self.job.workers)]

    def _stages(self) -> list[Callable[[], None]]:
        return [self._iterate]

    def _mutable(self) -> list[Tensor]:
        return [*GraphStepper._mutable(self), *self.velocities, *(held.flat for held in self.held)]

    def finish_epoch(self) -> EpochEnd:
        loss = self._mean_loss()
        _load_weights(self.task, self.rounds.server)
        self.shared.collect()
        sent, received = self.rounds.bytes_sent - self._bytes[0], self.rounds.bytes_received - self._bytes[1]
        return self.task, loss, sent, received

    def summary(self) -> dict[str, Any]:
        """Return the accuracy of the weights that the first worker holds."""
        self.held[0].publish()
        return {"worker_accuracy": self.evaluation.of(self.tasks[0])[0]}

    def state(self) -> dict[str, Tensor]:
        rounds = self.rounds
        state = {f"server/{name}": x for name, x in rounds.server.items()}
        state |= {f"pull/{name}": x for name, x in rounds.pull.state_dict().items()}
        for worker, held in enumerate(self.held):
            state |= {f"worker/{worker}": held.flat, f"velocity/{worker}": self.velocities[worker]}
            state |= {f"base/{worker}/{name}": x for name, x in self._bases[worker].items()}
            state |= {f"push/{worker}/{name}": x for name, x in rounds.push[worker].state_dict().items()}
        return state

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        rounds = self.rounds
        rounds.server = {name: state[f"server/{name}"].to(self.device) for name in rounds.names}
        rounds.pull.load_state_dict(_section(state, "pull/"))
        for worker, held in enumerate(self.held):
            held.flat.copy_(state[f"worker/{worker}"])
            held.publish()
            self.velocities[worker].copy_(state[f"velocity/{worker}"])
            rounds.push[worker].load_state_dict(_section(state, f"push/{worker}/"))
            for name, x in self._bases[worker].items():
                x.copy_(state[f"base/{worker}/{name}"])
        iteration = self.done * self.per_epoch
        self._iteration.fill_(iteration)
        rounds.sequence = iteration // self.job.every


class FrameStepper(Stepper):
    """Trains any synchronous job with real frames; the server's weights are evaluated."""

    setting: Setting

    def __init__(self, setting: Setting, seed: int, epochs: int, source: Source) -> None:
        super().__init__(setting, seed, epochs, source)
        tasks = [source.task(setting.model, seed, setting.holdout) for _ in range(self.job.workers)]
        self.rounds = FrameRounds(self.job, tasks, self.shards, self.schedule)
        self._iteration = 0
        self._loss: list[float] = []
        self._bytes = (0, 0)

    def begin_epoch(self) -> None:
        self._loss = []
        self._bytes = (self.rounds.bytes_sent, self.rounds.bytes_received)
        push, pull = self.setting.channels(self.done)
        for channel in self.rounds.push:
            channel.spec = push
        self.rounds.pull.spec = pull

    def step(self) -> None:
        self._iteration += 1
        if self._iteration % self.job.every == 0:
            self.rounds.exchange()
            self._loss.append(self.rounds.loss)

    def finish_epoch(self) -> EpochEnd:
        _load_weights(self.task, self.rounds.server)
        loss = float(np.mean(self._loss)) if self._loss else float("nan")
        sent, received = self.rounds.bytes_sent - self._bytes[0], self.rounds.bytes_received - self._bytes[1]
        return self.task, loss, sent, received

    def summary(self) -> dict[str, Any]:
        """Return the accuracy of the weights that the first worker holds; the server's may be others."""
        return {"worker_accuracy": self.evaluation.of(self.rounds.tasks[0])[0]}

    def state(self) -> dict[str, Tensor]:
        rounds = self.rounds
        state = {f"server/{name}": x for name, x in rounds.server.items()}
        state |= {f"memory/{name}": x for name, x in rounds.memory.state_dict().items()}
        state |= {f"pull/{name}": x for name, x in rounds.pull.state_dict().items()}
        for w in range(self.job.workers):
            state |= {f"worker/{w}/{name}": p.detach() for name, p in rounds.workers[w].items()}
            state |= {f"memories/{w}/{name}": x for name, x in rounds.memories[w].state_dict().items()}
            state |= {f"push/{w}/{name}": x for name, x in rounds.push[w].state_dict().items()}
        return state

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        rounds, device = self.rounds, self.source.device
        rounds.server = {name: state[f"server/{name}"].to(device) for name in rounds.names}
        rounds.memory.load_state_dict(_section(state, "memory/"))
        rounds.pull.load_state_dict(_section(state, "pull/"))
        for w in range(self.job.workers):
            for name, x in _section(state, f"worker/{w}/").items():
                rounds.workers[w][name].copy_(x)
            rounds.memories[w].load_state_dict(_section(state, f"memories/{w}/", device))
            rounds.push[w].load_state_dict(_section(state, f"push/{w}/"))
        self._iteration = self.done * self.per_epoch
        rounds.sequence = self._iteration // self.job.every


def _section(state: Mapping[str, Tensor], prefix: str, where: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {key[len(prefix) :]: x.to(where) for key, x in state.items() if key.startswith(prefix)}


@torch.no_grad()
def _load_weights(task: Task, weights: Mapping[str, Tensor]) -> None:
    for name, p in task.model.named_parameters():
        p.copy_(weights[name])
