"""Steppers of the study.

``ComputedStepper`` computes what frames would decode to (see ``computed``); ``LocalStepper`` does so for workers that
take several local steps between exchanges, ``BestStepper`` for exchanges of the best worker's changes. Steppers that
make frames are in ``framed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.channels import Channel
from laconic.codecs import parse
from laconic.frames import decode
from laconic.policy import Policy
from laconic_lab.studies.flat_parameters import FlatParameters
from laconic_lab.studies.kothari2021.computed import ComputedChannel, SentValues, in_order, rounding_keys
from laconic_lab.studies.kothari2021.rounds import server_seed, server_seeds, worker_seed, worker_seeds
from laconic_lab.studies.kothari2021.settings import Setting
from laconic_lab.studies.stepper import EpochEnd, GraphStepper, Source, Stepper

__all__ = ["BestStepper", "ComputedStepper", "LocalStepper", "Source", "Stepper", "can_compute"]

RING, CODED_RING = 512, 32
"""Number of exchanges whose sizes, or whose symbols, stay on the device until they are read."""


def can_compute(setting: Setting) -> bool:
    """Return whether a setting exchanges synchronously: after every iteration, or local changes."""
    options = setting.options
    every_iteration = options.get("every", 1) == 1
    of_changes = (options.get("sends"), options.get("returns")) == ("changes", "gradients")
    return setting.mode == "sync" and (every_iteration or (of_changes and options.get("after") in ("mean", "best")))


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
        codecs = [*specs, *(policy.small for policy in policies)]
        self._ring = CODED_RING if any(parse(codec)[1].coder is not None for codec in codecs) else RING

        def channel_of(codec: str, policy: Policy) -> ComputedChannel:
            return ComputedChannel(self.slots, codec, policy, self.device, self._ring)

        self.push = [channel_of(push, policies[0]) for _ in range(self.job.workers)]
        self.pull = channel_of(pull, policies[1])
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
                update = self._decoded(self._answer)
            self._descend(self.weights, self.velocity, update, rate)
        else:
            self._descend(self.server, self.velocity, self._mean, rate)
            self._source, self._answer = self.server, self.pull.send(self.server, self._key("pull"), self._at)
            if self.server is not self.weights:
                self._decoded(self._answer, self.weights)
        self._iteration.add_(1)
        self._in_epoch.add_(1)
        self._at.add_(1).remainder_(self._ring)

    def _mean_of(self, sent: Sequence[Sequence[SentValues]]) -> Tensor:
        """Return the mean of what all workers sent, with the roundings of frames that are added up."""
        mean, weight = torch.empty_like(self.weights), 1.0 / len(sent)
        for group in zip(*sent, strict=True):
            whole = mean[group[0].first : group[0].first + group[0].numel]
            if self._fused is not None and group[0].positions is None:
                self._fused.weighted_sum([values.values for values in group], weight, whole)
                continue
            whole.zero_()
            for values in group:
                values.add_to(mean, weight)
        return mean

    def _decoded(self, sent: Sequence[SentValues], out: Tensor | None = None) -> Tensor:
        """Return what was sent as a flat tensor."""
        out = torch.empty_like(self.weights) if out is None else out
        for values in sent:
            whole = out[values.first : values.first + values.numel]
            if values.positions is None:
                whole.copy_(values.values)
            else:
                whole.zero_()
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
        if self._pending == self._ring:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._pushed += sum(int(channel.nbytes(self._pending).sum()) for channel in self.push)
            self._pulled += self.job.workers * int(self.pull.nbytes(self._pending).sum())
        self._pending = 0
        self._at.zero_()

    def _channels(self) -> list[ComputedChannel]:
        """Return the channels that an exchange uses, those of the workers first."""
        return [*self.push, self.pull]

    def _compare(self, sequence: int, stage: int) -> None:
        """Run a stage and compare what it computed with the real frames of the exchange."""
        channels = self._channels()
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
            computed = self._decoded(values).cpu()
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
            held, _, _ = self._evaluate(self.task)
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
        self.held = [FlatParameters(task, self.names) for task in self.tasks]
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
        rate, losses = self._rate(), []
        with self._forked():
            for worker, (task, held) in enumerate(zip(self.tasks, self.held, strict=True)):
                with self._branch(worker):
                    held.publish()
                    loss, gradient = self._gradient(worker, task, held)
                    self._descend(held.flat, self.velocities[worker], gradient, rate)
                losses.append(loss)
        for loss in losses:
            self._loss.add_(loss)
        self._iteration.add_(1)
        self._in_epoch.add_(1)

    @torch.no_grad()
    def _exchange(self) -> None:
        self._push_changes()
        self._source = self._mean = self._mean_of(self._sent)
        self._answer = self.pull.send(self._mean, self._key("pull"), self._at)
        self._apply(self._decoded(self._answer))

    def _push_changes(self) -> None:
        self._gradients = [held.flat - self.weights for held in self.held]
        self._sent = [
            channel.send(change, self._key(f"push{worker}"), self._at)
            for worker, (channel, change) in enumerate(zip(self.push, self._gradients, strict=True))
        ]

    def _apply(self, change: Tensor) -> None:
        """Add the change that the server returns to everyone's weights."""
        self.weights.add_(change)
        for held in self.held:
            held.flat.copy_(self.weights)
        self._exchanged.add_(1)
        self._at.add_(1).remainder_(self._ring)

    def _key(self, channel: str) -> Tensor | None:
        keys = self._keys.get(channel)
        return None if keys is None else keys.index_select(0, self._exchanged)[0]

    def _mutable(self) -> list[Tensor]:
        return [*super()._mutable(), self._exchanged, *self.velocities, *(held.flat for held in self.held)]

    def state(self) -> dict[str, Tensor]:
        state = super().state()
        for worker, held in enumerate(self.held):
            state |= {f"worker/{worker}": held.flat, f"velocity/{worker}": self.velocities[worker]}
        return state

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        for worker, held in enumerate(self.held):
            held.flat.copy_(state[f"worker/{worker}"])
            self.velocities[worker].copy_(state[f"velocity/{worker}"])


class BestStepper(LocalStepper):
    """Computes exchanges after which the changes of the worker with the lowest loss on the held-out examples count.

    The server returns that worker's own frames.
    """

    def _prepare(self) -> None:
        super()._prepare()
        self._best = torch.zeros(RING, dtype=torch.int64, device=self.device)
        """The worker whose frames were returned, by exchange in the ring."""

    def _channels(self) -> list[ComputedChannel]:
        return list(self.push)

    @torch.no_grad()
    def _exchange(self) -> None:
        losses = []
        with self._forked():
            for worker, (task, held) in enumerate(zip(self.tasks, self.held, strict=True)):
                with self._branch(worker):
                    held.publish()
                    losses.append(self.evaluation.judge(task))
        self._push_changes()
        lowest, best, change = losses[0], torch.zeros_like(self._at), self._decoded(self._sent[0])
        for worker in range(1, len(losses)):
            better = losses[worker] < lowest
            lowest = torch.where(better, losses[worker], lowest)
            best = torch.where(better, torch.full_like(best, worker), best)
            change = torch.where(better, self._decoded(self._sent[worker]), change)
        self._best.index_copy_(0, self._at, best)
        self._apply(change)

    def _flush(self) -> None:
        if self._pending:
            rounds = np.arange(self._pending)
            nbytes = np.stack([channel.nbytes(self._pending) for channel in self.push])
            self._pushed += int(nbytes.sum())
            self._pulled += self.job.workers * int(nbytes[self._best[: self._pending].cpu().numpy(), rounds].sum())
        self._pending = 0
        self._at.zero_()
