"""Runs side by side: each a lane that takes a step when it is told, on a stream of its own where there are streams.

``ComputedLane`` trains with what frames would decode to (see ``computed``), ``LocalLane`` likewise where workers take
steps of their own; on a GPU an iteration is one CUDA graph, so that several lanes share the device without a wait.
``FrameLane`` makes every frame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from laconic.channels import Channel
from laconic.cluster.job import Job
from laconic.frames import decode
from laconic.studies.kothari2021.computed import Computed, Part, in_order, rounding_keys
from laconic.studies.kothari2021.rounds import FrameRounds, server_seed, server_seeds, worker_seed, worker_seeds
from laconic.studies.kothari2021.settings import Setting
from laconic.train.data import load
from laconic.train.examples import Batch, ImageExamples
from laconic.train.models import build_model
from laconic.train.shards import Shards
from laconic.train.task import Task, cross_entropy

__all__ = ["ComputedLane", "Curve", "FrameLane", "Lane", "LocalLane", "Source", "can_compute"]

RING = 32
"""Iterations whose sizes stay on the device until they are read."""


class Source:
    """Examples of a data set on a device, for as many tasks as there are."""

    def __init__(self, data: str, data_dir: Any, device: torch.device) -> None:
        self.name, self.device = data, device
        self.examples = ImageExamples.of(load(data, data_dir))
        for one in self.examples:
            one.inputs, one.targets = one.inputs.to(device), one.targets.to(device)
            one.mean, one.deviation = one.mean.to(device), one.deviation.to(device)

    def task(self, model: str, seed: int, holdout: float) -> Task:
        network = build_model(model, seed=seed).to(self.device)
        train, test = self.examples
        return Task(f"{model}/{self.name}", network, train, test, cross_entropy, holdout=holdout, seed=seed)


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


class Lane(ABC):
    """One run.

    Args:
        setting: What is trained.
        seed: Of everything random.
        epochs: How many.
        source: The examples.
    """

    def __init__(self, setting: Setting, seed: int, epochs: int, source: Source) -> None:
        self.setting, self.seed, self.epochs, self.source = setting, seed, epochs, source
        self.job: Job = setting.job(seed)
        self.task = source.task(setting.model, seed, setting.holdout)
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
    def settle(self) -> tuple[Task, float, int, int]:
        """Wait for the epoch's end: a task with the weights to judge, mean loss, bytes pushed, bytes pulled."""

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

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All that the next epoch depends on."""

    @abstractmethod
    def load(self, state: dict[str, Tensor]) -> None: ...


def can_compute(setting: Setting) -> bool:
    """Synchronous exchanges after every iteration, or of the mean of what several iterations changed."""
    options = setting.options
    after_each = options.get("every", 1) == 1
    means = (options.get("sends"), options.get("after"), options.get("returns")) == ("changes", "mean", "gradients")
    return setting.mode == "sync" and (after_each or means)


class ComputedLane(Lane):
    """Exchanges after every iteration, computed; both workers hold the same weights, so there is one model.

    Args:
        samples: Exchanges, spread over the run, whose frames are made and compared.
        graph: Whether an iteration becomes a CUDA graph; by default on a GPU.
    """

    def __init__(
        self,
        setting: Setting,
        seed: int,
        epochs: int,
        source: Source,
        *,
        samples: int = 4,
        graph: bool | None = None,
    ) -> None:
        super().__init__(setting, seed, epochs, source)
        self.device = source.device
        self.graph = self.device.type == "cuda" if graph is None else graph
        self._stream = _stream(self.device)
        self._side = _stream(self.device)
        exchanges = self.iterations // self.job.every
        self._samples = set(np.linspace(0, exchanges - 1, samples, dtype=int).tolist()) if samples else set()
        model = self.task.model
        self._model_names = [name for name, p in model.named_parameters() if p.requires_grad]
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        self.names = in_order(shapes, setting.policy("push"))
        self.slots = {name: shapes[name] for name in self.names}
        self.weights, self.parameters = _flattened(self.task, self.names)
        # What workers hold is what they decoded; the server keeps its own where weights travel with a loss.
        lossy = self.job.returns == "weights" and self.job.pull != "none"
        self.server = self.weights.clone() if lossy else self.weights
        self.velocity = torch.zeros_like(self.weights)
        self._iteration = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._in_epoch = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._loss = torch.zeros((), device=self.device)
        rates = [self.schedule(i) for i in range(self.iterations)]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=self.device)
        self._layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        self._specs: tuple[str, str] | None = None
        self.push: list[Computed] = []
        self.pull: Computed
        self._inputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._keys: dict[str, Tensor] = {}
        self._replays: list[torch.cuda.CUDAGraph] = []
        self._held: Tensor | None = None
        """What workers hold while the server's weights are judged."""
        self._pushed = self._pulled = 0
        self._pending = 0
        self._count = 0
        """Iterations of this epoch."""
        self._prepare()

    def _prepare(self) -> None:
        """What else a kind of lane needs."""

    # ------------------------------------------------------------------------------------------------------- an epoch

    def begin_epoch(self) -> None:
        if self._held is not None:
            self.weights.copy_(self._held)
            self._held = None
        self._use(self.setting.channels(self.done))
        first = self.done * self.per_epoch
        for worker in range(self.job.workers):
            indices = [self.shards.indices(worker, first + i) for i in range(self.per_epoch)]
            batch = self.task.batch(torch.cat(indices))
            inputs = batch.inputs.view(self.per_epoch, self.setting.batch, *batch.inputs.shape[1:])
            targets = batch.targets.view(self.per_epoch, self.setting.batch)
            if worker == len(self._inputs):
                self._inputs.append(inputs.clone())
                self._targets.append(targets.clone())
            else:
                self._inputs[worker].copy_(inputs)
                self._targets[worker].copy_(targets)
        self._fill_keys()
        self._in_epoch.zero_()
        self._loss.zero_()
        self._count = 0
        self._pushed = self._pulled = 0
        if self._stream is not None:
            torch.cuda.synchronize()
            if self.graph and not self._replays:
                self._capture()

    def _use(self, specs: tuple[str, str]) -> None:
        """Channels of a phase; what the last ones remembered goes on."""
        if specs == self._specs:
            return
        before = [channel.state() for channel in (*self.push, self.pull)] if self.push else []
        policies = (self.setting.policy("push"), self.setting.policy("pull"))
        push, pull = specs
        self.push = [Computed(self.slots, push, policies[0], self.device, RING) for _ in range(self.job.workers)]
        self.pull = Computed(self.slots, pull, policies[1], self.device, RING)
        for channel, old in zip((*self.push, self.pull), before, strict=False):
            for x, y in zip(channel.state(), old, strict=True):
                x.copy_(y)
        self._specs, self._replays = specs, []

    def _sequences(self) -> range:
        """Exchanges of the epoch that begins."""
        return range(self.done * self.per_epoch, (self.done + 1) * self.per_epoch)

    def _fill_keys(self) -> None:
        """Seeds of the epoch's frames, where anything is random."""
        numbers = [self._model_names.index(name) for name in self.names]
        for name, channel in (*((f"push{w}", one) for w, one in enumerate(self.push)), ("pull", self.pull)):
            if not channel.seeded:
                continue
            sequences = np.array(self._sequences(), dtype=np.uint64)[:, None]
            slots = np.array(numbers, dtype=np.uint64)[None]
            if name == "pull":
                seeds = server_seeds(self.job, sequences, slots, len(numbers))
            else:
                seeds = worker_seeds(self.job, sequences, int(name[4:]), slots)
            keys = rounding_keys(seeds).to(self.device)
            if name in self._keys:
                self._keys[name].copy_(keys)
            else:
                self._keys[name] = keys

    # --------------------------------------------------------------------------------------------------- an iteration

    def step(self) -> None:
        iteration = self.done * self.per_epoch + self._count
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            self._compare(iteration, 0) if iteration in self._samples else self._do(0)
            self._count += 1
            self._sized()

    def _iterate(self) -> None:
        """An iteration of all workers; nothing here waits for the device."""
        workers = self.job.workers
        rate = self._rates.index_select(0, self._iteration)
        sent, losses = [], []
        self._gradients: list[Tensor] = []
        main = torch.cuda.current_stream() if self._side is not None else None
        for worker in range(workers):
            aside = worker % 2 == 1 and self._side is not None
            if aside:
                assert self._side is not None and main is not None
                self._side.wait_stream(main)
            with torch.cuda.stream(self._side) if aside else nullcontext():
                loss, flat = self._gradient(worker, self.task, self.parameters)
                sent.append(self.push[worker].send(flat, self._key(f"push{worker}"), self._at))
            self._gradients.append(flat)
            losses.append(loss)
        if self._side is not None and workers > 1:
            assert main is not None
            main.wait_stream(self._side)
        for one in losses:
            self._loss.add_(one)
        self._sent = sent
        self._mean = self._mean_of(sent)
        if self.job.returns == "gradients":
            self._source, self._answer = self._mean, self.pull.send(self._mean, self._key("pull"), self._at)
            update = self._mean
            if not (len(self._answer) == 1 and self._answer[0].values.data_ptr() == self._mean.data_ptr()):
                update = self._put(self._answer, torch.zeros_like(self.weights))
            self._descend(self.weights, self.velocity, update, rate)
        else:
            self._descend(self.server, self.velocity, self._mean, rate)
            self._source, self._answer = self.server, self.pull.send(self.server, self._key("pull"), self._at)
            if self.server is not self.weights:
                self.weights.zero_()
                self._put(self._answer, self.weights)
        self._iteration.add_(1)
        self._in_epoch.add_(1)
        self._at.add_(1).remainder_(RING)

    def _gradient(self, worker: int, task: Task, parameters: Sequence[Parameter]) -> tuple[Tensor, Tensor]:
        """A worker's loss in this iteration, and its gradient as one flat tensor."""
        inputs = self._inputs[worker].index_select(0, self._in_epoch)[0]
        inputs = inputs.contiguous(memory_format=self._layout)
        targets = self._targets[worker].index_select(0, self._in_epoch)[0]
        loss = task.loss(Batch(inputs, targets))
        gradients = torch.autograd.grad(loss, parameters)
        return loss.detach(), torch.cat([x.reshape(-1) for x in gradients])

    def _mean_of(self, sent: Sequence[Sequence[Part]]) -> Tensor:
        mean = torch.zeros_like(self.weights)
        for parts in sent:
            for part in parts:
                part.add_to(mean, 1.0 / len(sent))
        return mean

    def _put(self, parts: Sequence[Part], out: Tensor) -> Tensor:
        for part in parts:
            part.add_to(out, 1.0)
        return out

    @torch.no_grad()
    def _descend(self, weights: Tensor, velocity: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """``laconic.optim.SGD`` with a learning rate that lies on the device."""
        if self.job.weight_decay:
            gradient = gradient.add(weights, alpha=self.job.weight_decay)
        if self.job.momentum:
            gradient = velocity.mul_(self.job.momentum).add_(gradient)
        weights.sub_(gradient * rate)

    def _key(self, channel: str) -> Tensor | None:
        keys = self._keys.get(channel)
        return None if keys is None else keys.index_select(0, self._in_epoch)[0]

    def _mutable(self) -> list[Tensor]:
        own = [self.weights, self.server, self.velocity, self._iteration, self._in_epoch, self._at, self._loss]
        return own + [x for channel in (*self.push, self.pull) for x in channel.state()]

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

    # ------------------------------------------------------------------------------------------------- sizes, samples

    def _sized(self) -> None:
        """Another exchange's sizes lie in the ring."""
        self._pending += 1
        if self._pending == RING:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._pushed += sum(int(channel.nbytes(self._pending).sum()) for channel in self.push)
            self._pulled += self.job.workers * int(self.pull.nbytes(self._pending).sum())
        self._pending = 0
        self._at.zero_()

    def _compare(self, sequence: int, stage: int) -> None:
        """The frames of an exchange for real, beside what was computed."""
        channels = [*self.push, self.pull]
        before = [channel.memories(self.names) for channel in channels]
        slot = self._pending
        self._do(stage)
        push, pull = self._specs or ("none", "none")
        for i, channel in enumerate(channels):
            is_pull = i == len(self.push)
            direction = "pull" if is_pull else "push"
            real = Channel(pull if is_pull else push, policy=self.setting.policy(direction))
            real.load_state_dict({name: x.cpu() for name, x in before[i].items()})
            source = (self._source if is_pull else self._gradients[i]).cpu()
            parts = self._answer if is_pull else self._sent[i]
            computed = self._put(parts, torch.zeros_like(self.weights)).cpu()
            at, nbytes = 0, 0
            for name, shape in self.slots.items():
                number, numel = self._model_names.index(name), int(np.prod(shape))
                if is_pull:
                    seed = server_seed(self.job, sequence, number, len(self.names))
                else:
                    seed = worker_seed(self.job, sequence, i, number)
                frame = real.encode(name, source[at : at + numel].view(shape), seed=seed)
                nbytes += len(frame)
                self.curve.frames_compared += 1
                if not decode(frame).view(-1).equal(computed[at : at + numel]):
                    self.curve.frames_other += 1
                at += numel
            if nbytes != int(channel.nbytes(slot + 1)[slot]):
                self.curve.frames_other += 1

    def settle(self) -> tuple[Task, float, int, int]:
        if self._stream is not None:
            self._stream.synchronize()
        self._flush()
        loss = float(self._loss) / (self._count * self.job.workers)
        if self.server is not self.weights:  # the server's are the result
            self._held = self.weights.clone()
            self.weights.copy_(self.server)
        return self.task, loss, self._pushed, self._pulled

    def state(self) -> dict[str, Tensor]:
        found = {
            "weights": self.weights if self._held is None else self._held,
            "server": self.server.clone(),
            "velocity": self.velocity,
        }
        for i, channel in enumerate((*self.push, self.pull)):
            found |= {f"channel/{i}/{j}": x for j, x in enumerate(channel.state())}
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        self._use(self.setting.channels(self.done - 1))
        for name in ("weights", "server", "velocity"):
            getattr(self, name).copy_(state[name])
        for i, channel in enumerate((*self.push, self.pull)):
            for j, x in enumerate(channel.state()):
                x.copy_(state[f"channel/{i}/{j}"])
        self._iteration.fill_(self.done * self.per_epoch)


def _flattened(task: Task, names: Sequence[str]) -> tuple[Tensor, list[Parameter]]:
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


class LocalLane(ComputedLane):
    """Workers take steps of their own; every few iterations the mean of what these changed is exchanged, computed."""

    def _prepare(self) -> None:
        own = (self.setting.model, self.seed, self.setting.holdout)
        self.tasks = [self.source.task(*own) for _ in range(self.job.workers)]
        self.held = [_flattened(task, self.names) for task in self.tasks]
        self.velocities = [torch.zeros_like(self.weights) for _ in self.tasks]
        self._exchanged = torch.zeros(1, dtype=torch.int64, device=self.device)
        """In this epoch."""

    def _sequences(self) -> range:
        every, first = self.job.every, self.done * self.per_epoch
        # One more than there are in some epochs, so that all epochs have as many keys.
        return range(first // every, first // every + self.per_epoch // every + 1)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._exchanged.zero_()

    def step(self) -> None:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            self._do(0)
            self._count += 1
            sequence, over = divmod(self.done * self.per_epoch + self._count, self.job.every)
            if not over:
                self._compare(sequence - 1, 1) if sequence - 1 in self._samples else self._do(1)
                self._sized()

    def _stages(self) -> list[Callable[[], None]]:
        return [self._iterate, self._exchange]

    def _iterate(self) -> None:
        rate = self._rates.index_select(0, self._iteration.clamp(max=self.iterations - 1))
        for worker, (task, (flat, parameters)) in enumerate(zip(self.tasks, self.held, strict=True)):
            loss, gradient = self._gradient(worker, task, parameters)
            self._loss.add_(loss)
            self._descend(flat, self.velocities[worker], gradient, rate)
        self._iteration.add_(1)
        self._in_epoch.add_(1)

    @torch.no_grad()
    def _exchange(self) -> None:
        self._gradients = [flat - self.weights for flat, _ in self.held]
        self._sent = [
            channel.send(change, self._key(f"push{worker}"), self._at)
            for worker, (channel, change) in enumerate(zip(self.push, self._gradients, strict=True))
        ]
        self._source = self._mean = self._mean_of(self._sent)
        self._answer = self.pull.send(self._mean, self._key("pull"), self._at)
        self.weights.add_(self._put(self._answer, torch.zeros_like(self.weights)))
        for flat, _ in self.held:
            flat.copy_(self.weights)
        self._exchanged.add_(1)
        self._at.add_(1).remainder_(RING)

    def _key(self, channel: str) -> Tensor | None:
        keys = self._keys.get(channel)
        return None if keys is None else keys.index_select(0, self._exchanged)[0]

    def _mutable(self) -> list[Tensor]:
        return [*super()._mutable(), self._exchanged, *self.velocities, *(flat for flat, _ in self.held)]

    def state(self) -> dict[str, Tensor]:
        found = super().state()
        for worker, (flat, _) in enumerate(self.held):
            found |= {f"worker/{worker}": flat, f"velocity/{worker}": self.velocities[worker]}
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        for worker, (flat, _) in enumerate(self.held):
            flat.copy_(state[f"worker/{worker}"])
            self.velocities[worker].copy_(state[f"velocity/{worker}"])


class FrameLane(Lane):
    """Any synchronous job, with real frames; what it exchanges every few iterations is judged at the server."""

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

    def settle(self) -> tuple[Task, float, int, int]:
        with torch.no_grad():
            for name, p in self.task.model.named_parameters():
                p.copy_(self.rounds.server[name])
        loss = float(np.mean(self._loss)) if self._loss else float("nan")
        sent, received = self.rounds.bytes_sent - self._bytes[0], self.rounds.bytes_received - self._bytes[1]
        return self.task, loss, sent, received

    def state(self) -> dict[str, Tensor]:
        rounds = self.rounds
        found = {f"server/{name}": x for name, x in rounds.server.items()}
        found |= {f"memory/{name}": x for name, x in rounds.memory.state_dict().items()}
        found |= {f"pull/{name}": x for name, x in rounds.pull.state_dict().items()}
        for w in range(self.job.workers):
            found |= {f"worker/{w}/{name}": p.detach() for name, p in rounds.workers[w].items()}
            found |= {f"memories/{w}/{name}": x for name, x in rounds.memories[w].state_dict().items()}
            found |= {f"push/{w}/{name}": x for name, x in rounds.push[w].state_dict().items()}
        return found

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        rounds, device = self.rounds, self.source.device

        def part(prefix: str, where: torch.device | str = "cpu") -> dict[str, Tensor]:
            return {key[len(prefix) :]: x.to(where) for key, x in state.items() if key.startswith(prefix)}

        server = part("server/")
        rounds.server = {name: server[name] for name in rounds.names}  # in the slots' order: files have another
        rounds.memory.load_state_dict(part("memory/"))
        rounds.pull.load_state_dict(part("pull/"))
        for w in range(self.job.workers):
            for name, x in part(f"worker/{w}/").items():
                rounds.workers[w][name].copy_(x)
            rounds.memories[w].load_state_dict(part(f"memories/{w}/", device))
            rounds.push[w].load_state_dict(part(f"push/{w}/"))
        self._iteration = self.done * self.per_epoch
        rounds.sequence = self._iteration // self.job.every
