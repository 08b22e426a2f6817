"""Counts what one call of a codec asks of a GPU: launches, and waits of the host.

The kernels are interpreted. A kernel of several phases is one launch, as it is on a GPU for up to 2^22 values. Every
operation of torch counts that would launch a kernel or a copy: not views and not memory that is only taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from laconic.kernels.triton import grid_sync

__all__ = ["Work", "counted_work"]

FREE = ("empty", "view", "slice", "select", "as_strided", "reshape", "detach", "alias", "expand", "permute", "split",
        "unsqueeze", "squeeze", "resize", "_unsafe_view", "t", "is_pinned", "lift_fresh", "_reshape_alias", "unbind",
        "_pin_memory", "empty_like", "empty_strided", "new_empty")  # fmt: skip
"""Operations that launch nothing."""


@dataclass
class Work:
    """What a call asked of the device."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Launches of Triton's kernels by name."""
    operations: Counter[str] = field(default_factory=Counter)
    """Operations of torch that launch a kernel, by name."""
    waits: int = 0
    """How often the host reads what the device computed."""

    @property
    def launches(self) -> int:
        return self.kernels.total() + self.operations.total()


class _Operations(TorchDispatchMode):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.paused = work, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("aten::").partition(".")[0]
        if not self.paused:
            if name == "_local_scalar_dense":
                self.work.waits += 1
            elif name not in FREE:
                self.work.operations[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted_work() -> Iterator[Work]:
    """Count the launches and waits of the block."""
    work = Work()
    operations = _Operations(work)
    run, launch = InterpretedFunction.run, grid_sync.launch

    @contextmanager
    def paused() -> Iterator[None]:
        operations.paused += 1
        try:
            yield
        finally:
            operations.paused -= 1

    def counted_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not operations.paused:
            work.kernels[self.fn.__name__] += 1
        with paused():
            return run(self, *args, **kwargs)

    def counted_launch(kernel: Any, *args: Any, single_launch: bool, **kwargs: Any) -> None:
        if not single_launch:
            launch(kernel, *args, single_launch=single_launch, **kwargs)
            return
        work.kernels[kernel.fn.__name__] += 1
        with paused():
            launch(kernel, *args, single_launch=single_launch, **kwargs)

    def waiting(method: Any) -> Any:
        def counted(self: Tensor) -> Any:
            work.waits += not operations.paused
            with paused():
                return method(self)

        return counted

    with pytest.MonkeyPatch.context() as patch, operations:
        patch.setattr(InterpretedFunction, "run", counted_run)
        patch.setattr(grid_sync, "launch", counted_launch)
        for name in ("tolist", "cpu"):
            patch.setattr(Tensor, name, waiting(getattr(Tensor, name)))
        yield work
