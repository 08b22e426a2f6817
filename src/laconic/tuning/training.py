"""A short training of a user's model by one candidate, with several simulated workers in this process."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import ConfigError, NonFiniteError
from laconic.plan.candidates import Candidate
from laconic.policy import Policy
from laconic.tuning.exchange import SimulatedExchange

__all__ = ["Batches", "Outcome", "Training", "trainable"]

Loss = Callable[[nn.Module, Any], Tensor]
Optimizers = Sequence[torch.optim.Optimizer]

TAIL = 0.2
"""Share of the steps over which the training loss is averaged if there are no held-out batches."""


class Batches:
    """Numbered batches: of a function, of a sequence that is repeated, or of an iterable that is read as needed."""

    def __init__(self, source: Callable[[int], Any] | Iterable[Any]) -> None:
        self._function = source if callable(source) else None
        self._kept: list[Any] = []
        self._rest = None if callable(source) else iter(source)

    def __getitem__(self, number: int) -> Any:
        if self._function is not None:
            return self._function(number)
        while self._rest is not None and len(self._kept) <= number:
            try:
                self._kept.append(next(self._rest))
            except StopIteration:
                self._rest = None
        if not self._kept:
            raise ConfigError("there are no batches to train with")
        return self._kept[number % len(self._kept)]


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate.

    Args:
        label: Of the candidate; ``none`` is plain data parallelism.
        loss: Mean loss on held-out batches, or of the last fifth of the steps; infinite if the training diverged.
        nbytes: Bytes that a worker sends and receives in a step, on average.
        compute_s: Seconds in which a worker computes one step, the median.
        slots: By slot, codec, relative squared error, residual over tensor at the end, and its growth.
    """

    label: str
    loss: float
    nbytes: float
    compute_s: float
    slots: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """The largest relative squared error of a slot that the candidate's codec encodes."""
        return max((slot["error"] for slot in self.slots.values()), default=0.0)

    @property
    def growth(self) -> float:
        """The largest growth of a residual between the middle and the end."""
        return max((slot["growth"] for slot in self.slots.values()), default=1.0)

    def values(self) -> dict[str, Any]:
        loss = self.loss if math.isfinite(self.loss) else None
        return {"label": self.label, "loss": loss, "nbytes": self.nbytes, "compute_s": self.compute_s,
                "slots": dict(self.slots)}  # fmt: skip

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Outcome:
        """Return the outcome of a file; ``ValueError`` if it is none."""
        numbers: list[Any] = [values.get(key) for key in ("loss", "nbytes", "compute_s")]
        slots: Any = values.get("slots")
        errors: list[Any] = list(slots.values()) if isinstance(slots, Mapping) else [None]
        if not isinstance(values.get("label"), str) or not all(isinstance(slot, Mapping) for slot in errors):
            raise ValueError("an outcome must have a label, a loss, nbytes, compute_s and slots")
        numbers += [slot.get(key) for slot in errors for key in ("error", "growth")]
        for number in [math.inf if numbers[0] is None else numbers[0], *numbers[1:]]:
            if isinstance(number, bool) or not isinstance(number, int | float) or not number >= 0:
                raise ValueError(f"{values['label']!r}: expected a number of at least 0, got {number!r:.40}")
        loss = math.inf if numbers[0] is None else float(numbers[0])
        return cls(values["label"], loss, numbers[1], numbers[2], slots)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class Training:
    """Trains copies of a model, each for the same steps on the same batches.

    Args:
        model: Left as it is.
        optimizer: Of the model's parameters, or a function that makes one (or several) of a model.
        batches: Worker k of M takes batch ``step * M + k``.
        loss: Function of model and batch.
        held_out: Batches on which the result is evaluated.
        steps: Number of steps.
        seed: Seed of torch's generators (dropout) and of stochastic rounding.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, batches: Batches, loss: Loss, *, held_out: Sequence[Any] | None,
        workers: int, steps: int, seed: int,
    ) -> None:  # fmt: skip
        self._start, self._loss, self._batches, self._held_out = (model, optimizer), loss, batches, held_out
        self.workers, self.steps, self.seed = workers, steps, seed

    def copy(self) -> tuple[nn.Module, Optimizers]:
        """Return a copy of the model and its optimizers, as they were given."""
        model, optimizer = self._start
        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
            model = copy.deepcopy(model)
            optimizer = optimizer(model)
        else:  # one copy of both, so that the optimizer's copy holds the parameters of the model's
            model, optimizer = copy.deepcopy((model, optimizer))
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if not optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
            raise ConfigError(f"the optimizer must be one of torch or a function that makes one, got {optimizer!r}")
        return model, optimizers

    def run(
        self, candidate: Candidate, *, policy: Policy | None = None, order: int = 0,
        notify: Callable[[int], None] = lambda step: None,
    ) -> Outcome:  # fmt: skip
        """Train by a candidate and return what became of it.

        Args:
            order: Another number trains on the same batches in another order.
            notify: Called after each step.
        """
        exchange = SimulatedExchange(candidate.codec, self.workers, policy)
        copies = [self.copy() for _ in range(self.workers if candidate.local else 1)]
        losses: list[float] = []
        seconds: list[float] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            anchor = {name: p.detach().clone() for name, p in trainable(copies[0][0]).items()}
            try:
                for step in range(self.steps):
                    number = step if order == 0 else (step * 7919 + order) % self.steps
                    began = time.perf_counter()
                    gradients, loss = self._gradients(copies, number)
                    seconds.append(time.perf_counter() - began)
                    losses.append(loss)
                    if not candidate.local:
                        self._apply_mean(copies[0], gradients, exchange, step)
                    elif (step + 1) % candidate.every == 0 or step + 1 == self.steps:
                        self._exchange_changes(copies, anchor, exchange, step)
                    if not math.isfinite(loss):
                        break
                    notify(step + 1)
            except NonFiniteError:
                losses.append(math.inf)
            final = self._evaluate(copies[0][0], losses)
        slots = {
            name: {"codec": one.spec, "error": one.mean_error, "growth": one.growth,
                   "residual": one.residuals[-1] if one.residuals else 0.0}
            for name, one in exchange.slots.items()
        }  # fmt: skip
        compute_s = statistics.median(seconds) / self.workers if seconds else 0.0
        return Outcome(candidate.label, final, exchange.nbytes / max(1, len(losses)), compute_s, slots)

    def _gradients(
        self, copies: Sequence[tuple[nn.Module, Optimizers]], step: int
    ) -> tuple[list[dict[str, Tensor]], float]:
        """Return each worker's gradients, and their mean loss. Workers with a model of their own take a step alone."""
        grads, total = [], 0.0
        for worker in range(self.workers):
            model, optimizers = copies[worker % len(copies)]
            model.train()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss = self._loss(model, self._batches[step * self.workers + worker])
            torch.autograd.backward(loss)
            total += float(loss.detach())
            if len(copies) > 1:
                for optimizer in optimizers:
                    optimizer.step()
            else:
                grads.append({n: p.grad.detach().clone() for n, p in trainable(model).items() if p.grad is not None})
        return grads, total / self.workers

    def _apply_mean(
        self, trained: tuple[nn.Module, Optimizers], gradients: Sequence[Mapping[str, Tensor]],
        exchange: SimulatedExchange, step: int,
    ) -> None:  # fmt: skip
        model, optimizers = trained
        parameters = trainable(model)
        for name in gradients[0]:
            mean = exchange.mean(name, [one[name] for one in gradients], self._round_seed(step))
            parameters[name].grad = mean.view_as(parameters[name]).to(parameters[name].dtype)
        for optimizer in optimizers:
            optimizer.step()

    def _exchange_changes(
        self, copies: Sequence[tuple[nn.Module, Optimizers]], anchor: dict[str, Tensor], exchange: SimulatedExchange,
        step: int,
    ) -> None:  # fmt: skip
        """Replace all models by the global one, changed by the mean of the workers' changes."""
        models = [trainable(model) for model, _ in copies]
        with torch.no_grad():
            for name, value in anchor.items():
                changes = [value - parameters[name].detach() for parameters in models]
                value -= exchange.mean(name, changes, self._round_seed(step)).view_as(value)
                for parameters in models:
                    parameters[name].copy_(value)

    def _round_seed(self, step: int) -> int:
        return self.seed * 1_000_003 + step

    def _evaluate(self, model: nn.Module, losses: Sequence[float]) -> float:
        if not losses or not math.isfinite(losses[-1]):
            return math.inf
        if self._held_out is None:
            last = losses[-max(1, round(TAIL * len(losses))) :]
            return sum(last) / len(last)
        model.eval()
        with torch.no_grad():
            held_out = [float(self._loss(model, batch)) for batch in self._held_out]
        return sum(held_out) / len(held_out)
