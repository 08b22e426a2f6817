"""OptimizerWatch: notices optimizers that do not suit the codec of the gradients that they step with.

torch calls one hook after the steps of all optimizers. It is registered with the first watch and removed with the last,
and holds neither optimizers nor watches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from laconic.counters import LogOnce
from laconic.suitability import verdict

__all__ = ["OptimizerWatch"]

SpecsOf = Callable[[Iterable[int]], Collection[str] | None]


class _Known(NamedTuple):
    """What was found out about an optimizer when it had so many parameter groups."""

    num_groups: int
    verdict: str | None


class OptimizerWatch:
    """Logs once, and counts, that an optimizer steps parameters whose gradients it gets by an unsuitable codec.

    An optimizer that steps copies of the parameters, such as float32 ones, is not noticed.

    Args:
        specs_of: A method that returns the specs by which the gradients of those of its parameters were exchanged whose
            ids it is given; None while nothing is compressed. It is held weakly.
    """

    def __init__(self, specs_of: SpecsOf) -> None:
        self.unsuited_steps = 0
        self.unsuited: dict[str, str] = {}
        """Verdicts by the name of the optimizer's class."""
        self._specs_of = weakref.WeakMethod(specs_of)
        self._known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._warn_once = LogOnce("stats()['unsuited_optimizer_steps']")
        _open.add(self)
        if not _handles:
            _handles.append(register_optimizer_step_post_hook(_stepped))

    def forget(self) -> None:
        """Judge each optimizer again in its next step, because the codec changes."""
        self._known.clear()

    def close(self) -> None:
        """Stop watching; the counts remain."""
        _open.discard(self)
        if not _open and _handles:
            _handles.pop().remove()

    def stepped(self, optimizer: Optimizer) -> None:
        known = self._known.get(optimizer)
        if known is None or known.num_groups != len(optimizer.param_groups):
            specs_of = self._specs_of()
            specs = None if specs_of is None else specs_of(_parameter_ids(optimizer))
            if specs is None:
                return
            harm = next(filter(None, (verdict(spec, optimizer) for spec in sorted(specs))), None)
            known = self._known[optimizer] = _Known(len(optimizer.param_groups), harm)
        if known.verdict is not None:
            self.unsuited_steps += 1
            name = type(optimizer).__name__
            if self.unsuited.get(name) != known.verdict:
                self.unsuited[name] = known.verdict
                self._warn_once(f"{name} {known.verdict}", f"{name} steps attached parameters, but {known.verdict}")


# A watch that is garbage-collected leaves the hook in place, until another one is closed: torch iterates over its hooks
# without a copy, so a collection in the middle of a step must not remove one.
_open: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()
_handles: list[Any] = []


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watch in list(_open):
        watch.stepped(optimizer)


def _parameter_ids(optimizer: Optimizer) -> Iterable[int]:
    if isinstance(getattr(optimizer, "optim", None), Optimizer):
        return ()  # wraps another optimizer, as ZeRO does: the hook is called for that one, too
    return (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
