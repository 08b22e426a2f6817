"""Compressed means over the ranks of torch.distributed: for DDP, for local SGD, or alone.

There are two compressed reductions. ``Reducer`` packs integers with room for the sum of all ranks, so an ordinary int32
all-reduce adds them: one small MAX to agree on scales and one SUM, on any backend. ``TwoShot`` serves codecs whose
packets cannot be added: frames go to the owners of shards, and their means come back. With both, all ranks decode the
same bits.
"""

from __future__ import annotations

from laconic.collective.attaching import attach
from laconic.collective.attachment import Attachment
from laconic.collective.collectives import Collectives
from laconic.collective.consistency import differing
from laconic.collective.exchange import Exchange
from laconic.collective.local import LocalSGD, muon, split_parameters
from laconic.collective.operations import all_gather, all_reduce, recv, reduce_scatter, send
from laconic.collective.point_to_point import PointToPoint
from laconic.collective.reductions.allreduce import Reducer, allreduce
from laconic.collective.reductions.device_replay import record_exchanges
from laconic.collective.reductions.two_shot import TwoShot
from laconic.collective.stats import ExchangeStats

__all__ = [
    "Attachment", "Collectives", "Exchange", "ExchangeStats", "LocalSGD", "PointToPoint", "Reducer", "TwoShot",
    "all_gather", "all_reduce", "allreduce", "attach", "differing", "muon", "record_exchanges", "recv",
    "reduce_scatter", "send", "split_parameters",
]  # fmt: skip
