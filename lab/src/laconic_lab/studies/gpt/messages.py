"""What workers had to send and sent in their last exchanges, matrix by matrix."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic_lab.studies.gpt.local_exchange import LocalExchange
from laconic_lab.studies.gpt.model import Slots

__all__ = ["CODED_WORKERS", "HISTORY", "Exchange", "Matrix", "MessageLog"]

HISTORY = 3
"""Exchanges before a message whose contents its contexts may use."""
CODED_WORKERS = 2
"""Workers whose messages are coded; contexts see what all workers sent."""


@dataclass
class Exchange:
    """One exchange of a matrix."""

    common: Tensor
    """The common weights before it [rows, columns]."""
    signs: Tensor
    """Signs of what each worker sent, 0 where it sent nothing: int8 [workers, rows, columns]."""
    changes: Tensor
    """What the first workers had to send, residuals included; empty in exchanges that are only history."""


@dataclass
class Matrix:
    """The last exchanges of a matrix, the newest at the end."""

    kind: str
    """Name of the slots."""
    hidden: bool
    initial: Tensor
    exchanges: deque[Exchange]


class MessageLog:
    """Watches the exchanges of a training and remembers the last ones of each matrix."""

    def __init__(self, local: LocalExchange) -> None:
        self._local = local
        self._initial = local.anchor.cpu().clone()
        self._matrices: dict[tuple[str, int], Matrix] = {}
        local.watch = self._see

    @property
    def matrices(self) -> list[Matrix]:
        return list(self._matrices.values())

    def _see(self, slots: Slots, first: int, changes: Tensor, sent: Tensor) -> None:
        if len(slots.shape) < 2:
            return
        workers = changes.shape[0]
        changes, sent = (x.view(workers, -1, *slots.shape) for x in (changes, sent))
        for i in range(changes.shape[1]):
            matrix = self._matrices.setdefault(
                (slots.name, first + i),
                Matrix(slots.name, slots.hidden, slots.of(self._initial)[first + i], deque(maxlen=HISTORY + 2)),
            )
            if len(matrix.exchanges) > 1:
                matrix.exchanges[-2].changes = torch.empty(0)
            matrix.exchanges.append(Exchange(
                slots.of(self._local.anchor)[first + i].cpu().clone(),
                sent[:, i].sign().to(torch.int8).cpu(),
                changes[:CODED_WORKERS, i].cpu().clone(),
            ))  # fmt: skip
