"""Runs side by side: each a lane that takes a step when it is told, on a stream of its own where there are streams.

On a GPU an iteration is one CUDA graph, so that several lanes share the device without a wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from laconic.cluster.job import Job
from laconic.layers import compress
from laconic.optim import Schedule
from laconic.train.data import load
from laconic.train.data_shards import Shards
from laconic.train.examples import Batch, ImageExamples
from laconic.train.models import build_model
from laconic.train.task import Task, cross_entropy

__all__ = ["Curve", "GraphStepper", "Settled", "Source", "Stepper", "StepperSetting", "flattened"]


class Source:
    """Examples of a data set on a device, for as many tasks as there are."""

    def __init__(self, data: str, data_dir: Any, device: torch.device) -> None:
        self.name, self.device = data, device
        self.examples = ImageExamples.of(load(data, data_dir))
        for one in self.examples:
            one.inputs, one.targets = one.inputs.to(device), one.targets.to(device)
            one.mean, one.deviation = one.mean.to(device), one.deviation.to(device)

    def task(
        self,
        model: str,
        seed: int,
        holdout: float,
        layers: str | None = None,
        rules: Mapping[str, str] | None = None,
    ) -> Task:
        """A model of its own, its layers compressed by a scheme if one is given, but for those that rules speak of."""
        network = build_model(model, seed=seed)
        if layers is not None:
            network = compress(network, layers, policy=rules, init="fresh", seed=seed)
        train, test = self.examples
        network = network.to(self.device)
        return Task(f"{model}/{self.name}", network, train, test, cross_entropy, holdout=holdout, seed=seed)


class StepperSetting(Protocol):
    """What a setting tells a lane."""

    @property
    def model(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def holdout(self) -> float: ...
    @property
    def layers(self) -> str | None: ...
    @property
    def rules(self) -> Sequence[tuple[str, str]]: ...
    @property
    def name(self) -> str: ...
    def job(self, seed: int) -> Job: ...
    def schedule(self, iterations: int, per_epoch: int) -> Schedule: ...
    def key(self, experiment: str, epochs: int, seed: int) -> str: ...
    def values(self) -> dict[str, Any]: ...


@dataclass
class Curve:
    """What a run showed, epoch by epoch."""

    accuracy: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    held_loss: list[float] = field(default_factory=list)
    """On examples held out of training: what choices are made by."""
    train_loss: list[float] = field(default_factory=list)
    push_bytes: list[int] = field(default_factory=list)
    """Of all workers in that epoch."""
    pull_bytes: list[int] = field(default_factory=list)
    frames_compared: int = 0
    frames_other: int = 0
    """Sampled frames that were not as computed, in values or in size."""


Settled = tuple[Task, float, int, int]
"""A task with the weights to judge, the mean loss of the epoch, bytes pushed in it, bytes pulled."""


class Stepper(ABC):
    """One run.

    Args:
        setting: What is trained.
        seed: Of everything random.
        epochs: How many.
        source: The examples.
    """

    def __init__(self, setting: StepperSetting, seed: int, epochs: int, source: Source) -> None:
        self.setting, self.seed, self.epochs, self.source = setting, seed, epochs, source
        self.job: Job = setting.job(seed)
        self.task = source.task(setting.model, seed, setting.holdout, setting.layers, dict(setting.rules))
        self.shards = Shards(self.task.num_train, self.job.workers, setting.batch, seed)
        self.per_epoch = self.shards.iterations_per_epoch
        self.iterations = epochs * self.per_epoch // self.job.every * self.job.every
        self.schedule = setting.schedule(self.iterations, self.per_epoch)
        self.curve = Curve()
        self.done = 0
        """Epochs."""

    @abstractmethod
    def begin_epoch(self) -> None: ...

    @abstractmethod
    def step(self) -> None:
        """The next iteration; it may still be under way when this returns."""

    @abstractmethod
    def settle(self) -> Settled:
        """Wait for the epoch's end."""

    def end_epoch(self) -> None:
        task, loss, pushed, pulled = self.settle()
        found = task.evaluate()
        curve = self.curve
        curve.accuracy.append(found["accuracy"])
        curve.test_loss.append(found["loss"])
        curve.held_loss.append(task.judge())
        curve.train_loss.append(loss)
        curve.push_bytes.append(pushed)
        curve.pull_bytes.append(pulled)
        self.done += 1

    def summary(self) -> dict[str, Any]:
        """What else a Record shall say of the run."""
        return {}

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All that the next epoch depends on."""

    @abstractmethod
    def load(self, state: dict[str, Tensor]) -> None: ...


class GraphStepper(Stepper):
    """An iteration of all workers as work of the device alone; one model, where all workers hold the same weights.

    Args:
        samples: Exchanges, spread over the run, whose frames are made and compared.
        graph: Whether an iteration becomes a CUDA graph; by default on a GPU.
    """

    def __init__(
        self,
        setting: StepperSetting,
        seed: int,
        epochs: int,
        source: Source,
        *,
        samples: int = 4,
        graph: bool | None = None,
    ) -> None:
        super().__init__(setting, seed, epochs, source)
        self.device, self._batch = source.device, setting.batch
        self.graph = self.device.type == "cuda" if graph is None else graph
        self._stream = _stream(self.device)
        self._side = _stream(self.device)
        exchanges = self.iterations // self.job.every
        self._samples = set(np.linspace(0, exchanges - 1, samples, dtype=int).tolist()) if samples else set()
        model = self.task.model
        self._model_names = [name for name, p in model.named_parameters() if p.requires_grad]
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        self.names = self._order(shapes)
        self.slots = {name: shapes[name] for name in self.names}
        self.weights, self.parameters = flattened(self.task, self.names)
        self.velocity = torch.zeros_like(self.weights)
        self._iteration = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._in_epoch = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._loss = torch.zeros((), device=self.device)
        rates = [self.schedule(i) for i in range(self.iterations)]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=self.device)
        self._layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        self._inputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._replays: list[torch.cuda.CUDAGraph] = []
        self._count = 0
        """Iterations of this epoch."""
        self._prepare()

    def _order(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """The slots, as they shall lie in the flat tensors."""
        return list(shapes)

    def _prepare(self) -> None:
        """What else a kind of lane needs."""

    # ------------------------------------------------------------------------------------------------------- an epoch

    def begin_epoch(self) -> None:
        self._set_up()
        first = self.done * self.per_epoch
        for worker in range(self.job.workers):
            indices = [self.shards.indices(worker, first + i) for i in range(self.per_epoch)]
            batch = self.task.batch(torch.cat(indices))
            inputs = batch.inputs.view(self.per_epoch, self._batch, *batch.inputs.shape[1:])
            targets = batch.targets.view(self.per_epoch, self._batch)
            if worker == len(self._inputs):
                self._inputs.append(inputs.clone())
                self._targets.append(targets.clone())
            else:
                self._inputs[worker].copy_(inputs)
                self._targets[worker].copy_(targets)
        self._in_epoch.zero_()
        self._loss.zero_()
        self._count = 0
        self._ready()
        if self._stream is not None:
            torch.cuda.synchronize()
            if self.graph and not self._replays:
                self._capture()

    def _set_up(self) -> None:
        """Before an epoch's examples are put in place."""

    def _ready(self) -> None:
        """After it."""

    def step(self) -> None:
        iteration = self.done * self.per_epoch + self._count
        with self._on_stream():
            self._compare(iteration, 0) if iteration in self._samples else self._do(0)
            self._count += 1
            self._after_step()

    def _after_step(self) -> None:
        """What is done between two iterations, outside of any graph."""

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    # --------------------------------------------------------------------------------------------------- an iteration

    @abstractmethod
    def _iterate(self) -> None:
        """An iteration of all workers; nothing here waits for the device."""

    @abstractmethod
    def _compare(self, sequence: int, stage: int) -> None:
        """Do a stage, and make the frames of the exchange for real, beside what was computed."""

    def _rate(self) -> Tensor:
        """The learning rate of this iteration."""
        return self._rates.index_select(0, self._iteration.clamp(max=self.iterations - 1))

    def _gradient(self, worker: int, task: Task, parameters: Sequence[Parameter]) -> tuple[Tensor, Tensor]:
        """A worker's loss in this iteration, and its gradient as one flat tensor."""
        inputs = self._inputs[worker].index_select(0, self._in_epoch)[0]
        inputs = inputs.contiguous(memory_format=self._layout)
        targets = self._targets[worker].index_select(0, self._in_epoch)[0]
        loss = task.loss(Batch(inputs, targets))
        gradients = torch.autograd.grad(loss, parameters)
        return loss.detach(), torch.cat([x.reshape(-1) for x in gradients])

    def _by_worker(self, send: Callable[[int, Tensor], Any]) -> tuple[list[Tensor], list[Any]]:
        """Gradients of all workers on the same weights, and what each makes of its own; the losses are added up."""
        gradients, sent, losses = [], [], []
        main = torch.cuda.current_stream() if self._side is not None else None
        for worker in range(self.job.workers):
            aside = worker % 2 == 1 and self._side is not None
            if aside:
                assert self._side is not None and main is not None
                self._side.wait_stream(main)
            with torch.cuda.stream(self._side) if aside else nullcontext():
                loss, flat = self._gradient(worker, self.task, self.parameters)
                sent.append(send(worker, flat))
            gradients.append(flat)
            losses.append(loss)
        if self._side is not None and self.job.workers > 1:
            assert main is not None
            main.wait_stream(self._side)
        for one in losses:
            self._loss.add_(one)
        return gradients, sent

    @torch.no_grad()
    def _descend(self, weights: Tensor, velocity: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """``laconic.optim.SGD`` with a learning rate that lies on the device."""
        if self.job.weight_decay:
            gradient = gradient.add(weights, alpha=self.job.weight_decay)
        if self.job.momentum:
            gradient = velocity.mul_(self.job.momentum).add_(gradient)
        weights.sub_(gradient * rate)

    # -------------------------------------------------------------------------------------------------------- a graph

    def _mutable(self) -> list[Tensor]:
        """All that an iteration changes."""
        return [self.weights, self.velocity, self._iteration, self._in_epoch, self._loss]

    def _capture(self) -> None:
        """Record an iteration once; everything it changed before is put back."""
        before = [x.clone() for x in self._mutable()]
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            for _ in range(3):
                for stage in self._stages():
                    stage()
        torch.cuda.synchronize()
        replays = []
        for stage in self._stages():
            replays.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(replays[-1], stream=self._stream):
                stage()
        for x, y in zip(self._mutable(), before, strict=True):
            x.copy_(y)
        torch.cuda.synchronize()
        self._replays = replays

    def _stages(self) -> list[Callable[[], None]]:
        """What is captured, each on its own."""
        return [self._iterate]

    def _do(self, stage: int) -> None:
        self._replays[stage].replay() if self._replays else self._stages()[stage]()

    def _mean_loss(self) -> float:
        """Of the epoch, once its work is done."""
        if self._stream is not None:
            self._stream.synchronize()
        return float(self._loss) / (self._count * self.job.workers)


def flattened(task: Task, names: Sequence[str]) -> tuple[Tensor, list[Parameter]]:
    """All parameters as one flat tensor, and each as a view of it, in this order."""
    parameters = dict(task.model.named_parameters())
    flat = torch.cat([parameters[name].detach().reshape(-1) for name in names])
    at = 0
    for name in names:
        numel = parameters[name].numel()
        parameters[name].data = flat[at : at + numel].view(parameters[name].shape)
        at += numel
    return flat, [parameters[name] for name in names]


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
