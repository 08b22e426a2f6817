"""Compressed all-reduce over any torch.distributed backend, without a kernel of its own in it.

Integers in lanes that never carry make an ordinary SUM of int32 the sum of many narrow integers: one small MAX to
settle scales, one SUM, and every rank decodes the same bits.
"""

from __future__ import annotations

from laconic.collective.ledger import Ledger
from laconic.collective.reducer import Reducer, allreduce

__all__ = ["Ledger", "Reducer", "allreduce"]
