"""Jobs with returns=sum for tests, driven without training."""

from __future__ import annotations

import time
from typing import Any

import torch
from helpers import TIMEOUT, Events, core_of, open_session
from torch import Tensor

from laconic.cluster.homomorphic.worker import SummingWorker, scale_frame
from laconic.cluster.job import Job
from laconic.cluster.replies import Reply
from laconic.train.methods import method_options
from waiting import in_threads

SLOTS = {"w": torch.zeros(70, 90), "b": torch.zeros(90)}


def sum_job(**options: Any) -> Job:
    return Job(**{"workers": 2, "lr": 0.05, **method_options("homomorphic"), **options})


def gradients(worker: int, sequence: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * sequence + worker)
    return {name: torch.randn(x.shape, generator=generator) for name, x in SLOTS.items()}


class SumJob:
    """A core and its workers, advanced round by round."""

    def __init__(self, job: Job) -> None:
        self.job, self.events = job, Events()
        self.core = core_of(job, {name: x.clone() for name, x in SLOTS.items()}, self.events)
        self.workers = [SummingWorker(job, worker, SLOTS) for worker in range(job.workers)]
        for worker in range(job.workers):
            open_session(self.core, worker)

    def frames(self, worker: int, sequence: int, agreed: list[Any] | None = None) -> list[Any]:
        """Return a worker's push, on agreed scales or on those of the round before."""
        encoder = self.workers[worker]
        frames = []
        for slot, (name, x) in enumerate(gradients(worker, sequence).items()):
            if agreed is None:
                frames.append(encoder.encode(name, x, seed=sequence))
            else:
                probe = encoder.probe(name, x, seed=sequence)
                scales = encoder.read_scales(name, agreed[slot])
                frames.append(encoder.encode_on(name, probe, scales, seed=sequence))
        return frames

    def push(self, worker: int, sequence: int, frames: list[Any]) -> Reply:
        return self.core.exchange(worker, 0, sequence, frames, deadline=time.monotonic() + TIMEOUT)

    def agree(self, worker: int) -> list[Any]:
        scales = [scale_frame(self.workers[worker].probe(n, x, seed=0)) for n, x in gradients(worker, 0).items()]
        return self.core.agree_scales(worker, 0, 0, scales, deadline=time.monotonic() + TIMEOUT)

    def round(self, sequence: int, workers: list[int] | None = None) -> list[Reply]:
        """Make one round of some workers and return their replies."""
        workers = list(range(self.job.workers)) if workers is None else workers
        agreed = in_threads(*(lambda w=w: self.agree(w) for w in workers))[0] if sequence == 0 else None
        pushes = {worker: self.frames(worker, sequence, agreed) for worker in workers}
        replies = in_threads(*(lambda w=w: self.push(w, sequence, pushes[w]) for w in workers))
        for worker, reply in zip(workers, replies, strict=True):
            assert self.workers[worker].read_reply(dict(zip(SLOTS, reply.frames, strict=True))) is not None
        return replies
