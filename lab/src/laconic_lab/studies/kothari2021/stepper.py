"""Steppers of the study.

``ComputedStepper`` computes what frames would decode to (see ``computed``); ``LocalStepper`` does so for workers that
take several local steps between exchanges. Steppers that make frames are in ``framed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.channels import Channel
from laconic.frames import decode
from laconic_lab.studies.kothari2021.computed import ComputedChannel, SentValues, in_order, rounding_keys
from laconic_lab.studies.kothari2021.rounds import server_seed, server_seeds, worker_seed, worker_seeds
from laconic_lab.studies.kothari2021.settings import Setting
from laconic_lab.studies.stepper import EpochEnd, GraphStepper, Source, Stepper, flattened

__all__ = ["ComputedStepper", "LocalStepper", "Source", "Stepper", "can_compute"]

RING = 32
"""Number of exchanges whose sizes stay on the device until they are read."""


def can_compute(setting: Setting) -> bool:
    """Return whether a setting exchanges synchronously after every iteration, or means of local changes."""
    options = setting.options
    every_iteration = options.get("every", 1) == 1
    mean_of_changes = (options.get("sends"), options.get("after"), options.get("returns")) == (
        "changes",
        "mean",
        "gradients",
    )
    return setting.mode == "sync" and (every_iteration or mean_of_changes)


class ComputedStepper(GraphStepper):
    """Computes an exchange after every iteration; the workers' weights are equal, so there is one model."""

    setting: Setting

    def _order(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        return in_order(shapes, self.setting.policy("push"))

    def _prepare(self) -> None:
        # Workers hold decoded weights; the server keeps its own if the reply is lossy.
        lossy = self.job.reply_kind.is_weights and self.job.pull != "none"
        self.server = self.weights.clone() if lossy else self.weights
        self._at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._specs: tuple[str, str] | None = None
        self.push: list[ComputedChannel] = []
        self.pull: ComputedChannel
        self._keys: dict[str, Tensor] = {}
        self._held: Tensor | None = None
        """The workers' weights while the server's are evaluated."""
        self._pushed = self._pulled = 0
        self._pending = 0

    def _before_examples(self) -> None:
        if self._held is not None:
            self.weights.copy_(self._held)
            self._held = None
        self._use(self.setting.channels(self.done))

    def _after_examples(self) -> None:
        self._fill_keys()
        self._pushed = self._pulled = 0

    def _use(self, specs: tuple[str, str]) -> None:
        """Set up the channels of a phase; they continue with the memory of the last ones."""
        if specs == self._specs:
            return
        before = [channel.state() for channel in (*self.push, self.pull)] if self.push else []
        policies = (self.setting.policy("push"), self.setting.policy("pull"))
        push, pull = specs
        self.push = [ComputedChannel(self.slots, push, policies[0], self.device, RING) for _ in range(self.job.workers)]
        self.pull = ComputedChannel(self.slots, pull, policies[1], self.device, RING)
        for channel, old in zip((*self.push, self.pull), before, strict=False):
            for x, y in zip(channel.state(), old, strict=True):
                x.copy_(y)
        self._specs, self._replays = specs, []

    def _sequences(self) -> range:
        """Return the sequence numbers of the exchanges of the next epoch."""
        return range(self.done * self.per_epoch, (self.done + 1) * self.per_epoch)

    def _fill_keys(self) -> None:
        """Compute the rounding keys of the epoch's frames, for channels that round stochastically."""
        numbers = [self._model_names.index(name) for name in self.names]
        for name, channel in (*((f"push{w}", push) for w, push in enumerate(self.push)), ("pull", self.pull)):
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

    def _after_step(self) -> None:
        self._count_exchange()

    def _iterate(self) -> None:
        rate = self._rate()
        self._gradients, self._sent = self._by_worker(
            lambda worker, flat: self.push[worker].send(flat, self._key(f"push{worker}"), self._at)
        )
        self._mean = self._mean_of(self._sent)
        if self.job.reply_kind.workers_step:
            self._source, self._answer = self._mean, self.pull.send(self._mean, self._key("pull"), self._at)
            update = self._mean
            if not (len(self._answer) == 1 and self._answer[0].values.data_ptr() == self._mean.data_ptr()):
                update = self._add(self._answer, torch.zeros_like(self.weights))
            self._descend(self.weights, self.velocity, update, rate)
        else:
            self._descend(self.server, self.velocity, self._mean, rate)
            self._source, self._answer = self.server, self.pull.send(self.server, self._key("pull"), self._at)
            if self.server is not self.weights:
                self.weights.zero_()
                self._add(self._answer, self.weights)
        self._iteration.add_(1)
        self._in_epoch.add_(1)
        self._at.add_(1).remainder_(RING)

    def _mean_of(self, sent: Sequence[Sequence[SentValues]]) -> Tensor:
        mean = torch.zeros_like(self.weights)
        for by_group in sent:
            for values in by_group:
                values.add_to(mean, 1.0 / len(sent))
        return mean

    def _add(self, sent: Sequence[SentValues], out: Tensor) -> Tensor:
        for values in sent:
            values.add_to(out, 1.0)
        return out

    def _key(self, channel: str) -> Tensor | None:
        keys = self._keys.get(channel)
        return None if keys is None else keys.index_select(0, self._in_epoch)[0]

    def _mutable(self) -> list[Tensor]:
        own = [*super()._mutable(), self.server, self._at]
        return own + [x for channel in (*self.push, self.pull) for x in channel.state()]

    def _count_exchange(self) -> None:
        """Count an exchange whose sizes are in the ring, and read the ring when it is full."""
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
        """Run a stage and compare what it computed with the real frames of the exchange."""
        channels = [*self.push, self.pull]
        before = [channel.memories(self.names) for channel in channels]
        slot = self._pending
        self._run_stage(stage)
        push, pull = self._specs or ("none", "none")
        for i, channel in enumerate(channels):
            is_pull = i == len(self.push)
            direction = "pull" if is_pull else "push"
            real = Channel(pull if is_pull else push, policy=self.setting.policy(direction))
            real.load_state_dict({name: x.cpu() for name, x in before[i].items()})
            source = (self._source if is_pull else self._gradients[i]).cpu()
            values = self._answer if is_pull else self._sent[i]
            computed = self._add(values, torch.zeros_like(self.weights)).cpu()
            begin, nbytes = 0, 0
            for name, shape in self.slots.items():
                number, numel = self._model_names.index(name), int(np.prod(shape))
                if is_pull:
                    seed = server_seed(self.job, sequence, number, len(self.names))
                else:
                    seed = worker_seed(self.job, sequence, i, number)
                frame = real.encode(name, source[begin : begin + numel].view(shape), seed=seed)
                nbytes += len(frame)
                self.curve.frames_compared += 1
                if not decode(frame).view(-1).equal(computed[begin : begin + numel]):
                    self.curve.frames_other += 1
                begin += numel
            if nbytes != int(channel.nbytes(slot + 1)[slot]):
                self.curve.frames_other += 1

    def finish_epoch(self) -> EpochEnd:
        loss = self._mean_loss()
        self._flush()
        if self.server is not self.weights:  # the server's weights are evaluated
            self._held = self.weights.clone()
            self.weights.copy_(self.server)
        return self.task, loss, self._pushed, self._pulled

    def summary(self) -> dict[str, Any]:
        """Return the accuracy of the weights that workers hold, which may be others than the server's."""
        if self._held is not None:
            self.weights.copy_(self._held)
            held = self.task.evaluate()["accuracy"]
            self.weights.copy_(self.server)
            return {"worker_accuracy": held}
        return {"worker_accuracy": self.curve.accuracy[-1]}

    def state(self) -> dict[str, Tensor]:
        state = {
            "weights": self.weights if self._held is None else self._held,
            "server": self.server.clone(),
            "velocity": self.velocity,
        }
        for i, channel in enumerate((*self.push, self.pull)):
            state |= {f"channel/{i}/{j}": x for j, x in enumerate(channel.state())}
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        self._use(self.setting.channels(self.done - 1))
        for name in ("weights", "server", "velocity"):
            getattr(self, name).copy_(state[name])
        for i, channel in enumerate((*self.push, self.pull)):
            for j, x in enumerate(channel.state()):
                x.copy_(state[f"channel/{i}/{j}"])
        self._iteration.fill_(self.done * self.per_epoch)


class LocalStepper(ComputedStepper):
    """Computes exchanges of local changes: workers take several steps and then exchange the mean of their changes."""

    def _prepare(self) -> None:
        super()._prepare()
        options = (self.setting.model, self.seed, self.setting.holdout)
        self.tasks = [self.source.task(*options) for _ in range(self.job.workers)]
        self.held = [flattened(task, self.names) for task in self.tasks]
        self.velocities = [torch.zeros_like(self.weights) for _ in self.tasks]
        self._exchanged = torch.zeros(1, dtype=torch.int64, device=self.device)
        """Exchanges in this epoch."""

    def _sequences(self) -> range:
        every, first = self.job.every, self.done * self.per_epoch
        # Some epochs have one exchange more: all get as many keys.
        return range(first // every, first // every + self.per_epoch // every + 1)

    def _after_examples(self) -> None:
        super()._after_examples()
        self._exchanged.zero_()

    def step(self) -> None:
        with self._on_stream():
            self._run_stage(0)
            self._count += 1
            sequence, over = divmod(self.done * self.per_epoch + self._count, self.job.every)
            if not over:
                self._compare(sequence - 1, 1) if sequence - 1 in self._samples else self._run_stage(1)
                self._count_exchange()

    def _stages(self) -> list[Callable[[], None]]:
        return [self._iterate, self._exchange]

    def _iterate(self) -> None:
        rate = self._rate()
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
        self.weights.add_(self._add(self._answer, torch.zeros_like(self.weights)))
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
        state = super().state()
        for worker, (flat, _) in enumerate(self.held):
            state |= {f"worker/{worker}": flat, f"velocity/{worker}": self.velocities[worker]}
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        for worker, (flat, _) in enumerate(self.held):
            flat.copy_(state[f"worker/{worker}"])
            self.velocities[worker].copy_(state[f"velocity/{worker}"])
