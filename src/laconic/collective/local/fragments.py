"""Fragments: parts of a model that are exchanged in turn, so that each exchange is small (Streaming DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from laconic.collective.local.outer import OuterStep
from laconic.collective.local.replica import Replica, values_of
from laconic.errors import ConfigError

__all__ = ["Fragment", "make_fragments"]


@dataclass
class Fragment:
    """Consecutive parameters, their values in the global model, and what is known since their last exchange."""

    index: int
    due: int
    """The step of each interval after which the fragment is exchanged, from 1 on."""
    names: list[str]
    parameters: list[nn.Parameter]
    anchors: list[Tensor]
    outer: OuterStep
    exchanged_at: int = 0
    """The step after which the last exchange began."""
    tokens: float = 0.0
    """Tokens since then."""
    displaced: bool = False
    """Whether the parameters continued from the global model minus this rank's residual."""

    def values(self) -> list[Tensor]:
        return [values_of(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def subtract_into(self, changes: Sequence[Tensor]) -> None:
        """Write anchors minus parameters: the change since the last exchange, with the sign of a gradient."""
        if changes[0].is_cuda:  # a few launches for any number of tensors
            torch._foreach_copy_(list(changes), self.anchors)
            torch._foreach_sub_(list(changes), self.values())
            return
        for change, anchor, value in zip(changes, self.anchors, self.values(), strict=True):
            torch.sub(anchor, value, out=change)

    @torch.no_grad()
    def take_anchors_from_parameters(self) -> None:
        torch._foreach_copy_(self.anchors, self.values())

    @torch.no_grad()
    def restore(
        self, merge: float = 0.0, residual: Callable[[str, Tensor], Tensor | None] | None = None, *,
        starts: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """Move the parameters to the global model.

        Args:
            merge: The weight of the parameters as they are; the global model has the rest.
            residual: Returns what this rank has yet to send of a parameter. It is subtracted from the global model.
            starts: The parameters when the exchange began. If given, all progress since then is added to the global
                model, and ``merge`` is not used.
        """
        targets, values = self.anchors, self.values()
        if residual is not None:
            unsent = [residual(name, anchor) for name, anchor in zip(self.names, targets, strict=True)]
            targets = [
                anchor if x is None else anchor - x.to(anchor.dtype) for anchor, x in zip(targets, unsent, strict=True)
            ]
        self.displaced = residual is not None
        if starts:
            torch._foreach_sub_(values, list(starts))
            torch._foreach_add_(values, targets)
        elif merge:
            torch._foreach_lerp_(values, targets, 1.0 - merge)
        else:
            torch._foreach_copy_(values, targets)


def make_fragments(
    replica: Replica, count: int, every: int, outer: Callable[[list[str], list[Tensor]], OuterStep]
) -> list[Fragment]:
    """Cut the parameters, in the order of the layers, into fragments of about equal size, due at equal distances."""
    if count > max(1, len(replica.parameters)):
        raise ConfigError(f"fragments must be at most the {len(replica.parameters)} trained parameters, got {count}")
    sizes = [values_of(parameter).numel() for parameter in replica.parameters]
    fragments = []
    for index, (begin, end) in enumerate(_cuts(sizes, count)):
        names, parameters = replica.names[begin:end], replica.parameters[begin:end]
        anchors = [values_of(parameter).clone() for parameter in parameters]
        fragments.append(
            Fragment(index, (index + 1) * every // count, names, parameters, anchors, outer(names, anchors))
        )
    return fragments


def _cuts(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return where each of ``count`` consecutive parts begins and ends; none is empty."""
    total, ends, at, done = sum(sizes), [0], 0, 0
    for part in range(1, count):
        latest = len(sizes) - (count - part)  # leave one tensor for each later part
        target = total * part / count
        while at < latest and (at == ends[-1] or done + sizes[at] / 2 <= target):
            done += sizes[at]
            at += 1
        ends.append(at)
    ends.append(len(sizes))
    return list(pairwise(ends))
