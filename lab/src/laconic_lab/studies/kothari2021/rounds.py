"""Synchronous exchanges in one process, worker after worker, with the server's channels, frames and aggregation.

A test shows that a job ends with the same bits and bytes as with a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.aggregate import MeanAccumulator, OpenedFrame
from laconic.cluster.job import Job
from laconic.frames import decode
from laconic.kernels import random
from laconic.optim import SGD, Schedule
from laconic.train.data_shards import Shards
from laconic.train.task import Task
from laconic_lab.studies.kothari2021.computed import splitmix64

__all__ = ["FrameRounds", "server_seed", "server_seeds", "worker_seed", "worker_seeds"]

SEEDS = 401
"""Stream of the workers' seeds, as in ``laconic.train.worker``."""


def worker_seed(job: Job, sequence: int, worker: int, slot: int) -> int:
    key = random.key(job.seed, SEEDS)
    return random.splitmix64(key ^ random.splitmix64((sequence * job.workers + worker) << 20 | slot))


def server_seed(job: Job, sequence: int, slot: int, num_slots: int) -> int:
    return (job.seed * 0x9E3779B1 + sequence) * num_slots + slot


def worker_seeds(job: Job, sequences: np.ndarray, worker: int, slots: np.ndarray) -> np.ndarray:
    """Return ``worker_seed`` of many exchanges and slots (uint64)."""
    with np.errstate(over="ignore"):
        numbers = (sequences * np.uint64(job.workers) + np.uint64(worker)) << np.uint64(20) | slots
        seeds: np.ndarray = splitmix64(np.uint64(random.key(job.seed, SEEDS)) ^ splitmix64(numbers))
    return seeds


def server_seeds(job: Job, sequences: np.ndarray, slots: np.ndarray, num_slots: int) -> np.ndarray:
    """Return ``server_seed`` of many exchanges and slots, modulo 2^64, on which keys depend."""
    with np.errstate(over="ignore"):
        seeds: np.ndarray = (np.uint64(job.seed * 0x9E3779B1 & random.M64) + sequences) * np.uint64(num_slots) + slots
    return seeds


class FrameRounds:
    """A job whose workers take turns in one process and exchange real frames.

    Args:
        job: A synchronous job.
        tasks: One task for each worker, all with the same weights; they are trained in place. Frames are made and read
            on the device of their models, which the server shares.
    """

    def __init__(self, job: Job, tasks: Sequence[Task], shards: Shards, schedule: Schedule) -> None:
        self.job, self.tasks, self.shards, self.schedule = job, list(tasks), shards, schedule
        self.push = [job.push_channel() for _ in tasks]
        self.pull = job.pull_channel()
        self.workers = [{n: p for n, p in task.model.named_parameters() if p.requires_grad} for task in tasks]
        self.names = list(self.workers[0])
        self.device = tasks[0].device
        self.server = {name: p.detach().contiguous().clone() for name, p in self.workers[0].items()}
        self.memory = SGD(momentum=job.momentum, weight_decay=job.weight_decay)
        self.memories = [SGD(momentum=job.momentum, weight_decay=job.weight_decay) for _ in tasks]
        self.sequence = 0
        self.bytes_sent = self.bytes_received = 0
        """Bytes of all workers."""
        self.loss = 0.0

    def exchange(self) -> None:
        """Do the iterations up to the next exchange, and the exchange."""
        job = self.job
        bases, gradients, losses = [self.copy_of(worker) for worker in range(job.workers)], [], []
        for worker in range(job.workers):
            for iteration in range(self.sequence * job.every, (self.sequence + 1) * job.every):
                loss, gradient = self._gradients(worker, iteration)
                if job.every > 1:
                    self.memories[worker].step(self._tensors(worker), gradient, lr=self.schedule(iteration))
            losses.append(loss)
            gradients.append(gradient)
        self.finish(bases, gradients if job.sends_gradients else None)
        self.loss = float(sum(losses)) / job.workers

    def copy_of(self, worker: int) -> dict[str, Tensor]:
        """Return a copy of a worker's weights."""
        return {name: p.detach().clone() for name, p in self.workers[worker].items()}

    def finish(
        self, bases: Sequence[Mapping[str, Tensor]], gradients: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        """Exchange what the workers' iterations gave.

        Args:
            bases: Weights of each worker before its iterations.
            gradients: What workers push; None where they push changes or weights.
        """
        job, pushed, scores = self.job, [], []
        for worker, task in enumerate(self.tasks):
            scores.append(task.judge() if job.after == "best" else 0.0)
            if gradients is not None:
                sent = gradients[worker]
            else:
                weights = {name: p.detach() for name, p in self.workers[worker].items()}
                changes = job.sends == "changes"
                sent = {name: x - bases[worker][name] for name, x in weights.items()} if changes else weights
            pushed.append(self._push(worker, sent))
        frames = self._close(pushed, scores)
        decoded = None if job.reply_kind.workers_step and job.every == 1 else self._decoded(frames)
        for worker in range(job.workers):
            self._receive(worker, frames, decoded, bases[worker])
            self.bytes_received += sum(map(len, frames))
        self.sequence += 1

    def _gradients(self, worker: int, iteration: int) -> tuple[Tensor, dict[str, Tensor]]:
        task = self.tasks[worker]
        task.model.zero_grad(set_to_none=True)
        loss = task.loss(task.batch(self.shards.indices(worker, iteration)))
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = self.workers[worker].items()
        return loss.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters}

    def _push(self, worker: int, tensors: Mapping[str, Tensor]) -> list[bytes]:
        frames = [
            self.push[worker].encode(name, x.detach(), seed=worker_seed(self.job, self.sequence, worker, slot))
            for slot, (name, x) in enumerate(tensors.items())
        ]
        self.bytes_sent += sum(map(len, frames))
        return frames

    def _close(self, pushed: Sequence[Sequence[bytes]], scores: Sequence[float]) -> Sequence[bytes]:
        """Return the server's reply to a complete round, after its update."""
        if self.job.after == "best":
            frames = pushed[min(range(len(scores)), key=lambda worker: (scores[worker], worker))]
            self._step(self._decoded(frames))
            return self._encoded(self.server) if self.job.reply_kind.is_weights else frames
        combined = self._mean(pushed)
        if self.job.reply_kind.workers_step:
            frames = self._encoded(combined)
            if self.job.sends_gradients:
                by_name = dict(zip(self.names, frames, strict=True))
                self.memory.step_frames(self.server, by_name, lr=self.schedule(self.sequence))
            else:
                self._step(self._decoded(frames))
            return frames
        self._step(combined)
        return self._encoded(self.server)

    def _mean(self, pushed: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        sums = {name: torch.zeros_like(x) for name, x in self.server.items()}
        mean = MeanAccumulator(list(sums.values()), len(pushed))
        for frames in pushed:
            mean.add(OpenedFrame.of(frame, x) for frame, x in zip(frames, sums.values(), strict=True))
        return sums

    def _encoded(self, tensors: Mapping[str, Tensor]) -> list[bytes]:
        return [
            self.pull.encode(name, x, seed=server_seed(self.job, self.sequence, slot, len(self.names)))
            for slot, (name, x) in enumerate(tensors.items())
        ]

    def _decoded(self, frames: Sequence[bytes]) -> dict[str, Tensor]:
        return {name: decode(frame, device=self.device) for name, frame in zip(self.names, frames, strict=True)}

    def _step(self, update: Mapping[str, Tensor]) -> None:
        if self.job.sends_gradients:
            self.memory.step(self.server, update, lr=self.schedule(self.sequence))
            return
        for name, x in update.items():
            self.server[name] = self.server[name] + x if self.job.sends == "changes" else x.clone()

    @torch.no_grad()
    def _receive(
        self, worker: int, frames: Sequence[bytes], decoded: Mapping[str, Tensor] | None, base: Mapping[str, Tensor]
    ) -> None:
        parameters = self.workers[worker]
        if decoded is None:
            by_name = dict(zip(self.names, frames, strict=True))
            self.memories[worker].step_frames(self._tensors(worker), by_name, lr=self.schedule(self.sequence))
            return
        for name, x in decoded.items():
            if self.job.reply_kind.is_weights:
                parameters[name].copy_(x)
            else:
                parameters[name].copy_(base[name]).add_(x)

    def _tensors(self, worker: int) -> dict[str, Tensor]:
        return {name: p.data for name, p in self.workers[worker].items()}
