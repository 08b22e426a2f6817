"""Compressed means over the ranks of torch.distributed, for DDP, for local SGD, or by themselves.

Two roads to a mean. Integers in lanes that never carry make an ordinary SUM of int32 the sum of many narrow integers
(``Reducer``): one small MAX to settle scales, one SUM, on any backend. What cannot be added goes to the owners of
shards and back (``TwoShot``). Either way all ranks decode the same bits.
"""

from __future__ import annotations

from laconic.collective.attachment import Attachment, attach
from laconic.collective.drift import differing
from laconic.collective.exchange import Exchange
from laconic.collective.localsgd import LocalSGD
from laconic.collective.reductions.allreduce import Reducer, allreduce
from laconic.collective.reductions.two_shot import TwoShot
from laconic.collective.stats import ExchangeStats

__all__ = [
    "Attachment",
    "Exchange",
    "ExchangeStats",
    "LocalSGD",
    "Reducer",
    "TwoShot",
    "allreduce",
    "attach",
    "differing",
]
