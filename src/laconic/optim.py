"""Optimizers over named tensors, and learning-rate schedules: for a server, whose parameters are not in a module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import ConfigError, InputError
from laconic.frames import decode, open_packet
from laconic.wire import Buffer

__all__ = ["KINDS", "OPTIMIZERS", "SGD", "OptimizerSettings", "Schedule", "TorchOptimizer"]


class SGD:
    """Stochastic gradient descent with momentum and weight decay; gives the same bits as ``torch.optim.SGD``.

    Args:
        momentum: The factor of the previous step, in [0, 1).
        weight_decay: The factor of the parameters that are added to the gradient.
        nesterov: Use Nesterov momentum.

    >>> parameters = {"w": torch.ones(2)}
    >>> SGD(momentum=0.9).step(parameters, {"w": torch.tensor([1.0, 2.0])}, lr=0.5)
    >>> parameters["w"]
    tensor([0.5000, 0.0000])
    """

    def __init__(self, *, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False) -> None:
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum must be in [0, 1), got {momentum}")
        if not 0 <= weight_decay < math.inf:
            raise ConfigError(f"weight decay must be a finite number, not below 0, got {weight_decay}")
        if nesterov and not momentum:
            raise ConfigError("nesterov needs a momentum above 0")
        self.momentum, self.weight_decay, self.nesterov = momentum, weight_decay, nesterov
        self._velocity: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, lr: float) -> None:
        """Update the parameters that have a gradient, in place. Gradients are not changed."""
        for slot, gradient in gradients.items():
            self._check(slot, parameters, gradient)  # check all before changing any
        if not gradients:
            return
        # One call for all slots: in a server many threads wait for Python's lock, and each call releases and takes it.
        updated, steps = [parameters[slot] for slot in gradients], list(gradients.values())
        if self.weight_decay:
            steps = list(torch._foreach_add(steps, updated, alpha=self.weight_decay))
        if self.momentum:
            steps = self._with_momentum(list(gradients), steps)
        torch._foreach_add_(updated, steps, alpha=-lr)

    def _with_momentum(self, slots: list[str], gradients: list[Tensor]) -> list[Tensor]:
        known = [(slot, gradient) for slot, gradient in zip(slots, gradients, strict=True) if slot in self._velocity]
        if known:
            for slot, gradient in known:  # a loaded momentum is on the CPU
                if self._velocity[slot].device != gradient.device:
                    self._velocity[slot] = self._velocity[slot].to(gradient.device)
            velocities = [self._velocity[slot] for slot, _ in known]
            torch._foreach_mul_(velocities, self.momentum)
            torch._foreach_add_(velocities, [gradient for _, gradient in known])
        for slot, gradient in zip(slots, gradients, strict=True):
            if slot not in self._velocity:
                self._velocity[slot] = gradient.clone()
        velocities = [self._velocity[slot] for slot in slots]
        return list(torch._foreach_add(gradients, velocities, alpha=self.momentum)) if self.nesterov else velocities

    @torch.no_grad()
    def step_frames(self, parameters: Mapping[str, Tensor], frames: Mapping[str, Buffer], *, lr: float) -> None:
        """Update the parameters by gradients in frames.

        Without momentum and weight decay each frame is added to its parameter without decoding a tensor, which is fast
        for sparse gradients. The last bits may differ from those of ``step``, so all workers must use the same method.
        """
        if self.momentum or self.weight_decay:
            gradients = {slot: decode(frame, device=parameters[slot].device) for slot, frame in frames.items()}
            self.step(parameters, gradients, lr=lr)
            return
        for slot, frame in frames.items():
            packet, chain = open_packet(frame)
            chain.accumulate(packet.to(parameters[slot].device), parameters[slot], -lr)

    def _check(self, slot: str, parameters: Mapping[str, Tensor], gradient: Tensor) -> None:
        if slot not in parameters:
            raise InputError(f"slot {slot!r} has a gradient, but no parameter has that name")
        shape = parameters[slot].shape
        velocity = self._velocity.get(slot, gradient)
        for name, x in (("gradient", gradient), ("momentum", velocity)):
            if x.shape != shape:  # torch would broadcast
                raise InputError(f"slot {slot!r} has the shape {list(shape)}, its {name} {list(x.shape)}")

    def forget(self, slots: Iterable[str]) -> None:
        """Reset the momentum of these slots."""
        for slot in slots:
            self._velocity.pop(slot, None)

    @torch.no_grad()
    def spend(self, parameters: Mapping[str, Tensor], slots: Iterable[str], *, lr: float) -> None:
        """Apply all remaining steps of these slots' momentum in one step, and reset it.

        Without further gradients, momentum v moves a parameter by lr m / (1 - m) v in total.
        """
        for slot in slots:
            velocity = self._velocity.pop(slot, None)
            if velocity is not None:
                x = parameters[slot]
                x.sub_(velocity.to(x.device), alpha=lr * self.momentum / (1 - self.momentum))

    def state_shapes(self, parameters: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        """Return what a state may hold, by name."""
        return {slot: x.shape for slot, x in parameters.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the momentum of each slot that was updated."""
        return {slot: velocity.clone() for slot, velocity in self._velocity.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._velocity = {slot: velocity.clone() for slot, velocity in state.items()}


OPTIMIZERS = ("sgd", "adamw", "muon")


class TorchOptimizer:
    """AdamW or Muon of ``torch.optim`` over named tensors.

    Muon updates matrices and AdamW everything else; torch scales Muon's steps so that both take the same rate.

    Args:
        kind: ``adamw`` or ``muon``.
        weight_decay: The share of the parameters, times the rate, that each step subtracts.

    >>> parameters = {"w": torch.ones(2)}
    >>> TorchOptimizer("adamw").step(parameters, {"w": torch.tensor([1.0, -2.0])}, lr=0.5)
    >>> parameters["w"]
    tensor([0.5000, 1.5000])
    """

    def __init__(self, kind: str, *, weight_decay: float = 0.0) -> None:
        self.kind, self.weight_decay = kind, weight_decay
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        """One for each slot: a step then needs only the gradients that have come."""
        self._saved: dict[str, Tensor] = {}
        """Loaded state of slots that have not been updated since."""

    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, lr: float) -> None:
        """Update the parameters that have a gradient, in place. Gradients are not changed."""
        for slot, gradient in gradients.items():  # check all before changing any
            if slot not in parameters:
                raise InputError(f"slot {slot!r} has a gradient, but no parameter has that name")
            if gradient.shape != parameters[slot].shape:
                shape, other = list(parameters[slot].shape), list(gradient.shape)
                raise InputError(f"slot {slot!r} has the shape {shape}, its gradient {other}")
        for slot, gradient in gradients.items():
            optimizer = self._optimizers.get(slot) or self._start(slot, parameters[slot])
            optimizer.param_groups[0]["lr"] = lr
            (parameter,) = optimizer.param_groups[0]["params"]
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
            parameter.grad = None

    def step_frames(self, parameters: Mapping[str, Tensor], frames: Mapping[str, Buffer], *, lr: float) -> None:
        """Update the parameters by gradients in frames."""
        self.step(parameters, {slot: decode(frame) for slot, frame in frames.items()}, lr=lr)

    def _start(self, slot: str, parameter: Tensor) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer
        if self.kind == "muon" and parameter.dim() == 2:
            optimizer = torch.optim.Muon([parameter], weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw")
        else:
            optimizer = torch.optim.AdamW([parameter], weight_decay=self.weight_decay)
        for key in [key for key in self._saved if key.partition("/")[2] == slot]:
            optimizer.state[parameter][key.partition("/")[0]] = self._saved.pop(key)
        self._optimizers[slot] = optimizer
        return optimizer

    def forget(self, slots: Iterable[str]) -> None:
        """Reset the state of these slots."""
        for slot in slots:
            self._optimizers.pop(slot, None)

    def spend(self, parameters: Mapping[str, Tensor], slots: Iterable[str], *, lr: float) -> None:
        """Reset the state of these slots: what remains of an adaptive step has no closed form."""
        self.forget(slots)

    def state_shapes(self, parameters: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        """Return what a state may hold, by name."""
        names = ("exp_avg", "exp_avg_sq", "momentum_buffer")
        moments = {f"{name}/{slot}": x.shape for name in names for slot, x in parameters.items()}
        return moments | {f"step/{slot}": torch.Size([]) for slot in parameters}

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the moments of each slot, as ``exp_avg/slot``, and of its number of steps."""
        return {key: x.clone() for key, x in self._saved.items()} | {
            f"{name}/{slot}": torch.as_tensor(x).clone()
            for slot, optimizer in self._optimizers.items()
            for name, x in optimizer.state[optimizer.param_groups[0]["params"][0]].items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._optimizers.clear()
        self._saved = {key: x.clone() for key, x in state.items()}


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings of an optimizer.

    Args:
        optimizer: ``sgd``; or ``adamw``, or ``muon`` (for matrices, AdamW for the rest).
        momentum: Of ``sgd``.
    """

    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} must be a finite number of at least 0, got {value!r}")

    def make_optimizer(self) -> SGD | TorchOptimizer:
        """Return the optimizer; only SGD takes the momentum."""
        if self.optimizer == "sgd":
            return SGD(momentum=self.momentum, weight_decay=self.weight_decay)
        return TorchOptimizer(self.optimizer, weight_decay=self.weight_decay)


KINDS = ("constant", "step", "cosine")


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the iteration, so that a run can resume at any iteration.

    Args:
        kind: ``constant``; ``step``, multiplied by ``factor`` every ``every`` iterations; ``cosine``, to 0 at
            ``iterations`` along half a cosine.
        warmup: Iterations in which the rate grows linearly to ``lr``.
        every: For ``step``; counted from the first iteration, including the warm-up.
        factor: For ``step``.
        iterations: For ``cosine``: the total number of iterations.

    >>> schedule = Schedule(0.1, "cosine", warmup=2, iterations=12)
    >>> [round(schedule(i), 3) for i in (0, 1, 2, 7, 12)]
    [0.05, 0.1, 0.1, 0.05, 0.0]
    """

    lr: float
    kind: str = "constant"
    warmup: int = 0
    every: int = 0
    factor: float = 0.1
    iterations: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"the learning rate must be a finite number above 0, got {self.lr}")
        if self.kind not in KINDS:
            raise ConfigError(f"unknown schedule {self.kind!r}: use {', '.join(KINDS[:-1])} or {KINDS[-1]}")
        if self.warmup < 0:
            raise ConfigError(f"warm-up must not be negative, got {self.warmup} iterations")
        if self.kind == "step" and (self.every < 1 or not 0 < self.factor <= 1):
            raise ConfigError(f"step needs every >= 1 and a factor in (0, 1], got {self.every} and {self.factor}")
        if self.kind == "cosine" and self.iterations <= self.warmup:
            raise ConfigError(f"cosine needs more iterations than warm-up ({self.warmup}), got {self.iterations}")

    def __call__(self, iteration: int) -> float:
        if iteration < self.warmup:
            return self.lr * (iteration + 1) / self.warmup
        scale = 1.0
        if self.kind == "step":
            scale = self.factor ** (iteration // self.every)
        elif self.kind == "cosine":
            done = min(1.0, (iteration - self.warmup) / (self.iterations - self.warmup))
            scale = (1 + math.cos(math.pi * done)) / 2
        # cos and pow differ in the last bit between machines, and workers with the same optimizer must agree.
        return self.lr * float(f"{scale:.12g}")
