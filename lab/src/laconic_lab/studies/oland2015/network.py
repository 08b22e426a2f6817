"""Many 784-392-50-10 networks trained at once, as one computation.

Runs differ in their initial weights and settings and get the images in the same order, so that the first layer, nearly
all of the work, is one matrix product for all runs of a worker, with stacked weights [runs * 392, 784]. The gradient of
that layer is never stored: its product is added to the weights in place. On a GPU, mini-batches of up to 128 images use
the kernels of ``fused``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from laconic.kernels import random
from laconic_lab.studies.oland2015 import fused
from laconic_lab.studies.oland2015.settings import LAYERS, Setting

__all__ = ["Batches", "Networks", "scaled"]

log = logging.getLogger("laconic")

INITIAL, ORDER = 201, 202
"""Streams of the seed, different from those of codecs."""

INITIAL_RUNS = 64
"""Runs whose weights are drawn at once: the hash needs several copies in int64."""

PIXELS, HIDDEN, INNER, CLASSES = 784, 392, 50, 10
TEST_IMAGES = 1000
"""Images that are classified at once; the activations of all runs grow with them."""

Rates = tuple[Tensor, Tensor]
"""[runs] each: the factor of the derivative of a mini-batch's sum of squared errors, and what l1 subtracts from each
magnitude."""


class Networks:
    """``workers`` copies of ``len(settings)`` networks; weights are outputs × inputs.

    Layers are kept as lists over workers, so that each worker's step is plain matrices.
    """

    def __init__(
        self, settings: Sequence[Setting], run_ids: Sequence[int], workers: int, seed: int, device: torch.device
    ) -> None:
        self.runs, self.workers, self.device = len(settings), workers, device
        first = [initial(seed, run_ids, i, device) for i in range(len(LAYERS))]
        self.w1 = [first[0].reshape(-1, PIXELS).clone() for _ in range(workers)]
        self.w2 = [first[1].clone() for _ in range(workers)]
        self.w3 = [first[2].clone() for _ in range(workers)]
        self.b1 = [torch.zeros(self.runs * HIDDEN, device=device) for _ in range(workers)]
        self.b2 = [torch.zeros(self.runs, 1, INNER, device=device) for _ in range(workers)]
        self.b3 = [torch.zeros(self.runs, 1, CLASSES, device=device) for _ in range(workers)]
        self.lr, self.decay, self.l1 = (
            torch.tensor([getattr(s, name) for s in settings], dtype=torch.float64) for name in ("lr", "decay", "l1")
        )
        self._buffers: dict[str, Tensor] = {}

    def layer(self, worker: int, i: int) -> Tensor:
        """Return the weights of a layer as [runs, values]."""
        return (self.w1, self.w2, self.w3)[i][worker].view(self.runs, -1)

    def biases(self, worker: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.b1[worker], self.b2[worker], self.b3[worker]

    def common(self) -> list[Tensor]:
        """Return a copy of the first worker's layers, which after an exchange are those of all workers."""
        return [self.layer(0, i).clone() for i in range(len(LAYERS))]

    def add(self, layers: Sequence[Tensor], sign: int) -> None:
        """Add tensors to the layers of every worker."""
        for k in range(self.workers):
            for i, x in enumerate(layers):
                self.layer(k, i).add_(x, alpha=sign)

    def state(self, worker: int) -> list[Tensor]:
        """Return a copy of a worker's weights and biases."""
        return [x.clone() for x in self._tensors(worker)]

    def restore(self, worker: int, state: Sequence[Tensor]) -> None:
        for x, kept in zip(self._tensors(worker), state, strict=True):
            x.copy_(kept)

    def _tensors(self, worker: int) -> tuple[Tensor, ...]:
        return self.w1[worker], self.w2[worker], self.w3[worker], *self.biases(worker)

    def train_epoch(self, epoch: int, batches: Batches) -> None:
        """Train every worker for one pass over its share."""
        fits = self.device.type == "cuda" and batches.batch <= fused.MOST_IMAGES
        if fits and not fused.AVAILABLE and epoch == 0:
            log.warning("training takes twice as long because Triton is not installed")
        rates = self.rates(epoch, batches.batch)
        for worker, (images, targets) in enumerate(batches.epoch(epoch)):
            if fits and fused.AVAILABLE:
                self._train_fused(worker, images.to(torch.float16), targets, rates)
            else:
                for x, t in zip(images, targets, strict=True):
                    self.step(worker, x, t, rates)

    def rates(self, epoch: int, images: int) -> Rates:
        """Return the rates of an epoch for mini-batches of so many images."""
        lr = self.lr * self.decay**epoch
        step, shrink = lr / (images * CLASSES / 2), lr * self.l1
        return step.to(self.device, torch.float32), shrink.to(self.device, torch.float32)

    def _train_fused(self, k: int, images: Tensor, targets: Tensor, rates: Rates) -> None:
        h, d = (self._buffer(dtype, images.shape[1]) for dtype in (torch.float32, torch.float16))
        first = (self.w1[k], self.b1[k], h, d)
        fused.first_layer(*first, (None, images[0]), rates)
        for i, (x, t) in enumerate(zip(images, targets, strict=True)):
            fused.upper_layers(h, d, self.w2[k], self.w3[k], self.biases(k), t, rates)
            fused.first_layer(*first, (x, images[i + 1] if i + 1 < len(images) else None), rates)

    def step(self, k: int, x: Tensor, t: Tensor, rates: Rates) -> None:
        """Train one worker with one mini-batch."""
        step, shrink = rates
        h, a2, y = self._forward(k, x)
        # The error is multiplied by the rate, so that every later product is a step already.
        d3, d2, d1 = self._backward(k, h, a2, y, t, step.view(-1, 1, 1))
        # The l1 term applies to the weights at which the error was computed: after their last use, before the update.
        for w in (self.layer(k, i) for i in range(len(LAYERS))):
            w.addcmul_(w.sign(), shrink.view(-1, 1), value=-1)
        self.w3[k].baddbmm_(d3.transpose(1, 2), a2, alpha=-1)
        self.w2[k].baddbmm_(d2.transpose(1, 2), self._by_run(h), alpha=-1)
        self.w1[k].addmm_(d1.t(), x, alpha=-1)
        self.b3[k].sub_(d3.sum(1, keepdim=True))
        self.b2[k].sub_(d2.sum(1, keepdim=True))
        self.b1[k].sub_(d1.sum(0))

    def _forward(self, k: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.addmm(self.b1[k], x, self.w1[k].t(), out=self._buffer(torch.float32, len(x))).tanh_()
        a2 = torch.baddbmm(self.b2[k], self._by_run(h), self.w2[k].transpose(1, 2)).tanh_()
        return h, a2, torch.baddbmm(self.b3[k], a2, self.w3[k].transpose(1, 2)).tanh_()

    def _backward(
        self, k: int, h: Tensor, a2: Tensor, y: Tensor, t: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the derivatives with respect to the inputs of each tanh, times ``scale``."""
        tanh_backward = torch.ops.aten.tanh_backward.grad_input  # d * (1 - h²) in place, in one pass
        d3 = (y - t).mul_(scale)
        tanh_backward(d3, y, grad_input=d3)
        d2 = torch.bmm(d3, self.w3[k])
        tanh_backward(d2, a2, grad_input=d2)
        d1 = torch.empty_like(h)
        torch.bmm(d2, self.w2[k], out=self._by_run(d1))
        tanh_backward(d1, h, grad_input=d1)
        return d3, d2, d1

    def _by_run(self, h: Tensor) -> Tensor:
        return h.view(-1, self.runs, HIDDEN).transpose(0, 1)

    def _buffer(self, dtype: torch.dtype, images: int) -> Tensor:
        """Return a reused buffer [images, runs * hidden]: the activations of all runs are gigabytes."""
        kept = self._buffers.get(str(dtype))
        if kept is None or len(kept) < images:
            kept = self._buffers[str(dtype)] = torch.empty(images, self.runs * HIDDEN, dtype=dtype, device=self.device)
        return kept[:images]

    def gradient_rms(self, worker: int, batches: Batches) -> Tensor:
        """Return [layers, runs], the root mean square of the derivative of the worker's MSE over its whole share."""
        sums = [torch.zeros_like(w[worker]) for w in (self.w1, self.w2, self.w3)]
        images = 0
        for x, t in batches.share(worker):
            h, a2, y = self._forward(worker, x)
            d3, d2, d1 = self._backward(worker, h, a2, y, t, torch.full_like(y[:, :1, :1], 2 / CLASSES))
            sums[0].addmm_(d1.t(), x)
            sums[1].baddbmm_(d2.transpose(1, 2), self._by_run(h))
            sums[2].baddbmm_(d3.transpose(1, 2), a2)
            images += len(x)
        squares = [g.view(self.runs, -1).square_().mean(1) for g in sums]
        return torch.stack(squares).sqrt_().div_(images)

    def num_right(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return [runs], the number of images that the first worker's networks classify correctly."""
        right = torch.zeros(self.runs, dtype=torch.int64, device=self.device)
        for x, label in zip(torch.split(images, TEST_IMAGES), torch.split(labels, TEST_IMAGES), strict=True):
            right += (self._forward(0, x)[2].argmax(2) == label).sum(1)
        return right


def initial(seed: int, run_ids: Sequence[int], i: int, device: torch.device) -> Tensor:
    """Return layer i of each run: uniform in ± sqrt(6 / (inputs + outputs)), a hash of seed, run and position.

    A run has the same weights in every batch and on every device.
    """
    rows, cols = LAYERS[i]
    bound = math.sqrt(6 / (rows + cols))
    key = random.key(seed, INITIAL + 16 * i)
    weights = torch.empty((len(run_ids), rows, cols), device=device)
    position = torch.arange(rows * cols, dtype=torch.int64, device=device)
    for begin in range(0, len(run_ids), INITIAL_RUNS):
        chunk = torch.tensor(run_ids[begin : begin + INITIAL_RUNS], dtype=torch.int64, device=device).view(-1, 1) << 32
        unit = random.hash32(chunk + position, key).to(torch.float32) * 2.0**-32
        weights[begin : begin + len(chunk)] = ((unit * 2 - 1) * bound).view(-1, rows, cols)
    return weights


class Batches:
    """Images on the device in exclusive shares, in an order that depends on seed and epoch only."""

    def __init__(
        self, images: Tensor, labels: Tensor, *, workers: int, batch: int, seed: int, pixels: str, device: torch.device
    ) -> None:
        self.images = scaled(images, pixels, device)
        self.targets = torch.nn.functional.one_hot(labels.to(device), CLASSES).to(torch.float32) * 2 - 1
        self.seed, self.workers, self.size = seed, workers, len(images) // workers
        self.batch = min(batch, self.size)
        self.steps = self.size // self.batch
        self.shares = self._shuffled(0, len(images))[: self.size * workers].view(workers, -1)

    def _shuffled(self, draw: int, n: int) -> Tensor:
        # On the CPU, so that the order does not depend on the device.
        generator = torch.Generator().manual_seed(random.key(self.seed, ORDER + 16 * draw) >> 1)
        return torch.randperm(n, generator=generator)

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each worker's images and targets as [steps, batch, ...].

        Images that do not fill a mini-batch are left out of the epoch.
        """
        for worker in range(self.workers):
            order = self._shuffled(1 + epoch * self.workers + worker, self.size)[: self.steps * self.batch]
            index = self.shares[worker, order].to(self.images.device)
            shape = (self.steps, self.batch, -1)
            yield self.images[index].view(shape), self.targets[index].view(shape)

    def share(self, worker: int) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.split(self.shares[worker].to(self.images.device), self.batch):
            yield self.images[chosen], self.targets[chosen]


def scaled(images: Tensor, pixels: str, device: torch.device) -> Tensor:
    """Return grey values as [images, 784] in [0, 1], or in [-1, 1]."""
    unit = images.to(device).view(len(images), PIXELS).to(torch.float32) / 255
    return unit if pixels == "unit" else unit * 2 - 1
