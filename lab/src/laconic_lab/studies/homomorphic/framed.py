"""Rounds of compressed sums with real frames, which is the fast way on a CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.aggregate.homomorphic import Contributor, Sum
from laconic.frames import decode

__all__ = ["FramedRound"]


class FramedRound:
    """One round by laconic's packets, slot by slot: each worker's contribution, one sum and one decoding.

    Args:
        slots: Names and shapes, in the order of the flat tensor.
        spec: Any summable codec with agreed scales.
        carry: Whether scales are those of the round before, widened.
    """

    def __init__(self, slots: Mapping[str, tuple[int, ...]], spec: str, workers: int, *, carry: bool) -> None:
        self.slots, self.spec, self.workers, self.carry = dict(slots), spec, workers, carry
        self.numel = sum(torch.Size(shape).numel() for shape in slots.values())
        self.members = [Contributor(spec, workers=workers, worker=worker) for worker in range(workers)]
        self._scales: dict[str, Tensor] = {}
        self._total = Sum()

    @torch.no_grad()
    def mean(self, values: Tensor) -> Tensor:
        """Return the mean that all workers decode if each sends a row of ``values``."""
        out, begin = torch.empty(self.numel), 0
        for name, shape in self.slots.items():
            end = begin + torch.Size(shape).numel()
            decode(self._sum(name, values[:, begin:end], shape), out=out[begin:end].view(shape))
            begin = end
        return out

    def _sum(self, name: str, rows: Tensor, shape: tuple[int, ...]) -> bytearray:
        summing = self.members[0].summing
        probes = [member.probe(name, row.view(shape)) for member, row in zip(self.members, rows, strict=True)]
        scales = agreed = summing.agree(probes)
        if self.carry:
            if name in self._scales:
                agreed = summing.carry(self._scales[name])
            self._scales[name] = scales
        self._total.clear()
        for member in self.members:
            self._total.add(member.encode(name, agreed))
        return self._total.finish()

    def forget(self, name: str) -> None:
        """Set a slot's residuals to zero."""
        if name in self.slots:
            for member in self.members:
                state = member.state_dict()
                if state.pop(f"{name}/residual", None) is not None:
                    member.load_state_dict(state)

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"scales/{name}": x for name, x in self._scales.items()}
        for worker, member in enumerate(self.members):
            state |= {f"worker{worker}/{name}": x for name, x in member.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        def section(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix) :]: x for name, x in state.items() if name.startswith(prefix)}

        self._scales = section("scales/")
        for worker, member in enumerate(self.members):
            member.load_state_dict(section(f"worker{worker}/"))
