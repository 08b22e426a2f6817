"""measure: rho and h of a compressed model, by timing it against the dense one.

A step is forward, backward and an update by SGD with momentum, as h is defined in the planner's bound. Dense and
compressed steps alternate, so that other load affects both, and the fastest of each counts. If even the faster half of
the steps varies by more than 20 % (standard deviation over mean), there is no result but an error.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from laconic.errors import ConfigError, InputError, WrongResultError

__all__ = ["MAX_VARIATION", "Timings", "measure", "timings"]

MAX_VARIATION = 0.2
MIN_REPEAT = 3
REPLAYS = 10
"""Steps of a timed turn where a step is a graph: one alone is too short for the host's clock."""

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Timings:
    """Step times of both models.

    Args:
        dense: Seconds of each step of the dense model.
        compressed: Seconds of each step of the compressed model.
        rho: Trained numbers of the compressed model over those of the dense one.
        clock: ``cpu`` (processor time) or ``wall``.
        graph: Whether a step was one launch, of a CUDA graph.
    """

    dense: tuple[float, ...]
    compressed: tuple[float, ...]
    rho: float
    clock: str
    graph: bool = False

    @property
    def h(self) -> float:
        """The fastest compressed step over the fastest dense one."""
        return min(self.compressed) / min(self.dense)

    @property
    def h_median(self) -> float:
        return statistics.median(self.compressed) / statistics.median(self.dense)

    @property
    def variation(self) -> float:
        """The larger coefficient of variation of the two faster halves."""
        return max(_variation(self.dense), _variation(self.compressed))

    def values(self) -> dict[str, Any]:
        """Return the fields of a Record."""
        return {
            "rho": self.rho, "h": self.h, "h_median": self.h_median, "dense_s": min(self.dense),
            "compressed_s": min(self.compressed), "variation": self.variation, "turns": len(self.dense),
            "clock": self.clock, "graph": self.graph,
        }  # fmt: skip


def measure(
    model: Module, compressed: Module, batch: Batch, *, loss: Loss | None = None, repeat: int = 9,
    budget_s: float = 60.0,
) -> tuple[float, float]:  # fmt: skip
    """Return (rho, h): trained numbers and step time of a compressed model, both over the dense one's.

    Neither model is modified. Steps run on the device of the parameters.

    Args:
        compressed: The result of ``laconic.compress``.
        batch: (inputs, targets), or inputs alone.
        loss: Function of outputs and targets; by default cross entropy for integer targets, else the mean square.
        repeat: Timed steps of each model, after one warm-up step.
        budget_s: After three steps, no new one starts once this time is spent.

    Raises:
        WrongResultError: Step times vary by more than 20 %, because the machine is too busy.
    """
    result = timings(model, compressed, batch, loss=loss, repeat=repeat, budget_s=budget_s)
    if result.variation > MAX_VARIATION:
        raise WrongResultError(
            f"step times vary by {100 * result.variation:.0f} %, more than {100 * MAX_VARIATION:.0f} %, over "
            f"{len(result.dense)} steps: h is not reliable. Repeat on a less busy machine, or with more steps"
        )
    return result.rho, result.h


def timings(
    model: Module, compressed: Module, batch: Batch, *, loss: Loss | None = None, repeat: int = 9,
    budget_s: float = 60, graph: bool = False,
) -> Timings:  # fmt: skip
    """Return the step times that ``measure`` uses, however much they vary.

    Args:
        graph: Whether a step is captured as a CUDA graph and launched at once: kernel by kernel a GPU waits for the
            launches of small products. A timed turn then has ``REPLAYS`` steps.
    """
    if repeat < MIN_REPEAT:
        raise ConfigError(f"repeat must be at least {MIN_REPEAT}, got {repeat}")
    inputs, targets = _batch(batch)
    device = _device(model)
    if _device(compressed) != device:
        raise InputError(f"the models are on {device} and {_device(compressed)}: put them on one device")
    inputs, targets = inputs.to(device), None if targets is None else targets.to(device)
    if graph and device.type != "cuda":
        raise ConfigError(f"a step can be a graph on a CUDA device only, the models are on {device}")
    clock, now = _clock(device)
    steps = [_step(copy.deepcopy(each), inputs, targets, loss) for each in (model, compressed)]
    for step in steps:
        step()
    turn = REPLAYS if graph else 1
    if graph:
        steps = [_captured(step) for step in steps]
    seconds: tuple[list[float], list[float]] = ([], [])
    began = time.perf_counter()
    for done in range(repeat):
        if done >= MIN_REPEAT and time.perf_counter() - began > budget_s:
            break
        for step, times in zip(steps, seconds, strict=True):
            before = now()
            for _ in range(turn):
                step()
            times.append((now() - before) / turn)
    return Timings(tuple(seconds[0]), tuple(seconds[1]), _trained(compressed) / _trained(model), clock, graph)


def _batch(batch: Batch) -> tuple[Tensor, Tensor | None]:
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Sequence) and 1 <= len(batch) <= 2 and all(isinstance(x, Tensor) for x in batch):
        return batch[0], batch[1] if len(batch) > 1 else None
    raise InputError("batch must be a tensor of inputs, or inputs and targets")


def _step(model: Module, inputs: Tensor, targets: Tensor | None, loss: Loss | None) -> Callable[[], None]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-9, momentum=0.9)  # a full update that hardly changes the parameters

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        _loss(model(inputs), targets, loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return the launch of a step as one CUDA graph; it is captured after warm-up steps on another stream."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(MIN_REPEAT):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _loss(outputs: Tensor, targets: Tensor | None, loss: Loss | None) -> Tensor:
    if targets is None:
        return outputs.float().square().mean()
    if loss is not None:
        return loss(outputs, targets)
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _device(model: Module) -> torch.device:
    return next(model.parameters()).device


def _trained(model: Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _clock(device: torch.device) -> tuple[str, Callable[[], float]]:
    """Return processor time for one CPU thread, which other processes do not affect; else the wall clock."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return "cpu", time.process_time
    if device.type == "cuda":

        def synchronised() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return "wall", synchronised
    return "wall", time.perf_counter


def _variation(seconds: Sequence[float]) -> float:
    half = sorted(seconds)[: max(MIN_REPEAT, -(-len(seconds) // 2))]
    return statistics.stdev(half) / statistics.mean(half) if len(half) > 1 else 0.0
