"""Training runs that are advanced a step at a time, so that several share a device.

On a GPU each stepper has its own stream, and an iteration is one CUDA graph.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.cluster.job import Job
from laconic.layers import compress
from laconic.optim import Schedule
from laconic.train.data import load
from laconic.train.data_shards import Shards
from laconic.train.examples import Batch, ImageExamples
from laconic.train.models import build_model
from laconic.train.task import Task, cross_entropy
from laconic_lab.studies.evaluation import Evaluation, on_device
from laconic_lab.studies.flat_parameters import FlatParameters

__all__ = ["Curve", "EpochEnd", "GraphStepper", "Source", "Stepper", "StepperSetting"]

log = logging.getLogger("laconic")


class Source:
    """The examples of a data set on a device, shared by all tasks."""

    def __init__(self, data: str, data_dir: Any, device: torch.device) -> None:
        self.name, self.device = data, device
        self.examples = ImageExamples.of(load(data, data_dir))
        for split in self.examples:
            split.inputs, split.targets = split.inputs.to(device), split.targets.to(device)
            split.mean, split.deviation = split.mean.to(device), split.deviation.to(device)
        self._tested: list[Batch] = []

    def tested(self, task: Task) -> list[Batch]:
        """Return the test examples, which all tasks share, in batches on the device."""
        if not self._tested:
            self._tested = on_device(task.tested(), self.device)
        return self._tested

    def task(
        self, model: str, seed: int, holdout: float, layers: str | None = None, rules: Mapping[str, str] | None = None
    ) -> Task:
        """Return a task with a new model; a scheme compresses its layers, rules give some of them another scheme."""
        network = build_model(model, seed=seed, data=self.name)
        if layers is not None:
            network = compress(network, layers, policy=rules, init="fresh", seed=seed)
        train, test = self.examples
        network = network.to(self.device)
        return Task(f"{model}/{self.name}", network, train, test, cross_entropy, holdout=holdout, seed=seed)


@dataclass(frozen=True, kw_only=True)
class SGDTraining:
    """Hyper-parameters of a training with SGD.

    Args:
        workers: Number of workers.
        batch: Examples of a worker in an iteration.
        holdout: Fraction of the training examples that is held out.
        lr: Highest learning rate.
        ramp: Epochs of warm-up.
        decay: Weight decay for an optimizer with momentum 0.9.
    """

    workers: int = 2
    batch: int = 64
    holdout: float = 0.02
    lr: float = 0.05
    ramp: float = 2
    decay: float = 0.0


class StepperSetting(SGDTraining):
    """What a stepper needs to know about a setting: the base of the studies' frozen dataclasses."""

    model: str
    data: str
    layers: str | None = None
    rules: tuple[tuple[str, str], ...] = ()

    def job(self, seed: int) -> Job:
        raise NotImplementedError

    def schedule(self, iterations: int, per_epoch: int) -> Schedule:
        """Return the learning rates: a warm-up of ``ramp`` epochs, then half a cosine wave down to 0."""
        ramp = min(round(self.ramp * per_epoch), iterations // 4)
        return Schedule(self.lr, "cosine", warmup=ramp, iterations=iterations)

    def values(self) -> dict[str, Any]:
        """Return the fields of the setting for Records."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

    def key(self, experiment: str, epochs: int, seed: int) -> str:
        """Return the key of a run; it is equal for equal work."""
        return json.dumps([experiment, epochs, seed, self.values()], sort_keys=True)


@dataclass
class Curve:
    """Results of a run, epoch by epoch."""

    accuracy: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    held_loss: list[float] = field(default_factory=list)
    """Loss on examples held out of training, by which settings are chosen."""
    train_loss: list[float] = field(default_factory=list)
    push_bytes: list[int] = field(default_factory=list)
    """Bytes of all workers in that epoch."""
    pull_bytes: list[int] = field(default_factory=list)
    frames_compared: int = 0
    frames_other: int = 0
    """Sampled frames whose values or size differ from the computed ones."""


EpochEnd = tuple[Task, float, int, int]
"""A task with the weights to evaluate, the mean loss of the epoch, bytes pushed and bytes pulled in it."""


class Stepper(ABC):
    """One training run."""

    def __init__(self, setting: StepperSetting, seed: int, epochs: int, source: Source) -> None:
        self.setting, self.seed, self.epochs, self.source = setting, seed, epochs, source
        self.job: Job = setting.job(seed)
        self.task = source.task(setting.model, seed, setting.holdout, setting.layers, dict(setting.rules))
        self.shards = Shards(self.task.num_train, self.job.workers, setting.batch, seed)
        self.per_epoch = self.shards.iterations_per_epoch
        self.iterations = epochs * self.per_epoch // self.job.every * self.job.every
        self.schedule = setting.schedule(self.iterations, self.per_epoch)
        self.evaluation = Evaluation(self.task, source.tested(self.task))
        self.curve = Curve()
        self.done = 0
        """Finished epochs."""

    @abstractmethod
    def begin_epoch(self) -> None: ...

    @abstractmethod
    def step(self) -> None:
        """Start the next iteration; it may still be running when this returns."""

    @abstractmethod
    def finish_epoch(self) -> EpochEnd:
        """Wait until the epoch's work is done."""

    def end_epoch(self) -> None:
        task, loss, pushed, pulled = self.finish_epoch()
        accuracy, test_loss, held_loss = self._evaluate(task)
        curve = self.curve
        curve.accuracy.append(accuracy)
        curve.test_loss.append(test_loss)
        curve.held_loss.append(held_loss)
        curve.train_loss.append(loss)
        curve.push_bytes.append(pushed)
        curve.pull_bytes.append(pulled)
        self.done += 1

    def _evaluate(self, task: Task) -> tuple[float, float, float]:
        return self.evaluation.of(task)

    def summary(self) -> dict[str, Any]:
        """Return further values for the Record of the run."""
        return {}

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return everything that the next epoch depends on."""

    @abstractmethod
    def load(self, state: dict[str, Tensor]) -> None: ...


class GraphStepper(Stepper):
    """A run whose iterations need no wait for the host; all workers share one model while their weights are equal.

    Args:
        samples: Number of exchanges, spread over the run, whose frames are made and compared.
        graph: Whether an iteration becomes a CUDA graph; by default on a GPU.
    """

    def __init__(
        self, setting: StepperSetting, seed: int, epochs: int, source: Source, *, samples: int = 4,
        graph: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(setting, seed, epochs, source)
        self.device, self._batch = source.device, setting.batch
        self.graph = self.device.type == "cuda" if graph is None else graph
        self._fused = _fused_steps(self.device)
        self._stream = _stream(self.device)
        self._side = _stream(self.device)
        exchanges = self.iterations // self.job.every
        self._samples = set(np.linspace(0, exchanges - 1, samples, dtype=int).tolist()) if samples else set()
        model = self.task.model
        self._model_names = [name for name, p in model.named_parameters() if p.requires_grad]
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        self.names = self._order(shapes)
        self.slots = {name: shapes[name] for name in self.names}
        self.shared = FlatParameters(self.task, self.names)
        self.weights = self.shared.flat
        self.velocity = torch.zeros_like(self.weights)
        self._iteration = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._in_epoch = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._loss = torch.zeros((), device=self.device)
        rates = [self.schedule(i) for i in range(self.iterations)]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=self.device)
        self._channels_last = self.device.type == "cuda"
        self._inputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._replays: list[torch.cuda.CUDAGraph] = []
        self._count = 0
        """Iterations done in this epoch."""
        self._prepare()

    def _order(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return the order of the slots in the flat tensors."""
        return list(shapes)

    def _prepare(self) -> None:
        """Allocate what a subclass needs."""

    def begin_epoch(self) -> None:
        self._before_examples()
        for worker in range(self.job.workers):
            indices = self.shards.epoch(worker, self.done)
            batch = self.task.batch(indices)
            inputs = batch.inputs.permute(0, 2, 3, 1) if self._channels_last else batch.inputs
            inputs = inputs.reshape(self.per_epoch, self._batch, *inputs.shape[1:])
            targets = batch.targets.view(self.per_epoch, self._batch)
            if worker == len(self._inputs):
                self._inputs.append(inputs.clone(memory_format=torch.contiguous_format))
                self._targets.append(targets.clone())
            else:
                self._inputs[worker].copy_(inputs)
                self._targets[worker].copy_(targets)
        self._in_epoch.zero_()
        self._loss.zero_()
        self._count = 0
        self._after_examples()
        if self._stream is not None:
            torch.cuda.synchronize()
            if self.graph and not self._replays:
                self._capture()

    def _evaluate(self, task: Task) -> tuple[float, float, float]:
        self.shared.publish()
        return super()._evaluate(task)

    def _before_examples(self) -> None:
        """Called before the examples of an epoch are loaded."""

    def _after_examples(self) -> None:
        """Called after the examples of an epoch are loaded."""

    def step(self) -> None:
        iteration = self.done * self.per_epoch + self._count
        with self._on_stream():
            self._compare(iteration, 0) if iteration in self._samples else self._run_stage(0)
            self._count += 1
            self._after_step()

    def _after_step(self) -> None:
        """Called between iterations, outside of any graph."""

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    @abstractmethod
    def _iterate(self) -> None:
        """Do an iteration of all workers without waiting for the device."""

    @abstractmethod
    def _compare(self, sequence: int, stage: int) -> None:
        """Run a stage, make the frames of its exchange, and compare them with what was computed."""

    def _rate(self) -> Tensor:
        """Return the learning rate of this iteration."""
        return self._rates.index_select(0, self._iteration.clamp(max=self.iterations - 1))

    def _examples(self, worker: int) -> Batch:
        """Return a worker's batch of this iteration."""
        inputs = self._inputs[worker].index_select(0, self._in_epoch)[0]
        targets = self._targets[worker].index_select(0, self._in_epoch)[0]
        return Batch(inputs.permute(0, 3, 1, 2) if self._channels_last else inputs, targets)

    def _gradient(self, worker: int, task: Task, parameters: FlatParameters) -> tuple[Tensor, Tensor]:
        """Return a worker's loss in this iteration and its gradient as one flat tensor."""
        batch = self._examples(worker)
        loss = task.loss(batch) if self._fused is None else self._fused.loss(task, batch)
        gradients = torch.autograd.grad(loss, parameters.parameters)
        return loss.detach(), parameters.gather(gradients)

    def _by_worker(self, send: Callable[[int, Tensor], Any]) -> tuple[list[Tensor], list[Any]]:
        """Return the gradients of all workers on the same weights and what each sends; losses are added up."""
        gradients, sent, losses, workers = [], [], [], range(self.job.workers)
        self.shared.publish()
        together = None
        if self._fused is not None:
            together = self._fused.shared_gradients(self.task, self.shared, [self._examples(w) for w in workers])
        with self._forked():
            for worker in workers:
                with self._branch(worker):
                    if together is None:
                        loss, flat = self._gradient(worker, self.task, self.shared)
                    else:
                        loss, flat = together[0][worker], self.shared.gather(together[1][worker])
                    sent.append(send(worker, flat))
                gradients.append(flat)
                losses.append(loss)
        for loss in losses:
            self._loss.add_(loss)
        return gradients, sent

    @contextmanager
    def _forked(self) -> Iterator[None]:
        """Let the branches of the block begin with the work before it; the work after it waits for them."""
        if self._side is None:
            yield
            return
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        yield
        main.wait_stream(self._side)

    def _branch(self, worker: int) -> AbstractContextManager[Any]:
        """Run the work of every other worker beside that of the others."""
        return torch.cuda.stream(self._side) if worker % 2 and self._side is not None else nullcontext()

    @torch.no_grad()
    def _descend(self, weights: Tensor, velocity: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """Do a step of ``laconic.optim.SGD`` with a learning rate on the device."""
        if self._fused is not None:
            options = {"momentum": self.job.momentum, "decay": self.job.weight_decay}
            self._fused.descend(weights, velocity, gradient, rate, **options)
            return
        if self.job.weight_decay:
            gradient = gradient.add(weights, alpha=self.job.weight_decay)
        if self.job.momentum:
            gradient = velocity.mul_(self.job.momentum).add_(gradient)
        weights.sub_(gradient * rate)

    def _mutable(self) -> list[Tensor]:
        """Return all tensors that an iteration changes."""
        return [self.weights, self.velocity, self._iteration, self._in_epoch, self._loss]

    def _capture(self) -> None:
        """Capture an iteration after three warm-up iterations whose changes are undone."""
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
        """Return the functions that are captured as graphs of their own."""
        return [self._iterate]

    def _run_stage(self, stage: int) -> None:
        self._replays[stage].replay() if self._replays else self._stages()[stage]()

    def _mean_loss(self) -> float:
        """Return the mean loss of the epoch, after its work is done."""
        if self._stream is not None:
            self._stream.synchronize()
        return float(self._loss) / (self._count * self.job.workers)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _fused_steps(device: torch.device) -> Any:
    """Return the kernels of ``fused_steps`` where Triton compiles them, otherwise None."""
    if device.type != "cuda":
        return None
    try:
        from laconic_lab.studies import fused_steps
    except ImportError as error:
        log.warning("steps take many passes, which is slow, because Triton is missing: %s", error)
        return None
    return fused_steps
