"""A round of sums by real frames: what computes it on a CPU, where the kernels are made for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.aggregate.homomorphic import Contributor, Sum
from laconic.frames import decode

__all__ = ["FramedRound"]


class FramedRound:
    """As ``Round``, slot by slot: each worker's contributor, one sum, and one decoding.

    Args:
        slots: Names and shapes, in the order in which they lie in the flat tensor.
        spec: Any codec that can be summed on settled scales.
        workers: How many send.
        carry: Whether integers are on the scales of the round before, widened.
    """

    def __init__(self, slots: Mapping[str, tuple[int, ...]], spec: str, workers: int, *, carry: bool) -> None:
        self.slots, self.spec, self.workers, self.carry = dict(slots), spec, workers, carry
        self.numel = sum(torch.Size(shape).numel() for shape in slots.values())
        self.members = [Contributor(spec, workers=workers, worker=worker) for worker in range(workers)]
        self._scales: dict[str, Tensor] = {}
        self._total = Sum()

    @torch.no_grad()
    def mean(self, values: Tensor) -> Tensor:
        """What everybody decodes when each worker sends a row."""
        out, at = torch.empty(self.numel), 0
        for name, shape in self.slots.items():
            numel = torch.Size(shape).numel()
            decode(self._sum(name, values[:, at : at + numel], shape), out=out[at : at + numel].view(shape))
            at += numel
        return out

    def _sum(self, name: str, rows: Tensor, shape: tuple[int, ...]) -> bytearray:
        summing = self.members[0].summing
        probes = [member.probe(name, row.view(shape)) for member, row in zip(self.members, rows, strict=True)]
        found = agreed = summing.agree(probes)
        if self.carry:
            if name in self._scales:
                agreed = summing.carry(self._scales[name])
            self._scales[name] = found
        self._total.clear()
        for member in self.members:
            self._total.add(member.encode(name, agreed))
        return self._total.finish()

    def forget(self, name: str) -> None:
        """Begin a slot's residuals anew."""
        if name in self.slots:
            for member in self.members:
                state = member.state_dict()
                if state.pop(f"{name}/residual", None) is not None:
                    member.load_state_dict(state)

    def state_dict(self) -> dict[str, Tensor]:
        found = {f"scales/{name}": x for name, x in self._scales.items()}
        for worker, member in enumerate(self.members):
            found |= {f"worker{worker}/{name}": x for name, x in member.state_dict().items()}
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix) :]: x for name, x in state.items() if name.startswith(prefix)}

        self._scales = part("scales/")
        for worker, member in enumerate(self.members):
            member.load_state_dict(part(f"worker{worker}/"))
