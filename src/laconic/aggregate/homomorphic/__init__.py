"""Sums of compressed tensors: workers agree on scales, each encodes, and the packets are added without decoding.

A round among four workers:

>>> import laconic, torch
>>> xs = [torch.randn(5000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
>>> summing = laconic.summing("thc:4", workers=4)
>>> probes = [summing.probe(x) for x in xs]  # each worker: one float32 per 1,024 values
>>> agreed = summing.agree(probes)  # the largest of each
>>> summing.usable(agreed)  # False if a worker's values are not finite: then all skip the round
True
>>> frames = [summing.encode(x, agreed, worker=i) for i, x in enumerate(xs)]
>>> total = laconic.Sum()  # a server adds integers as they arrive, and computes no float
>>> for frame in frames:
...     total.add(frame)
>>> mean = laconic.decode(total.finish())  # every worker, once
>>> float((mean - sum(xs) / 4).norm() / (sum(xs) / 4).norm()) < 0.12
True

Frames are self-contained: ``laconic.decode`` returns the mean of the packets that were added, whether one, some or all.
"""

from __future__ import annotations

from laconic.aggregate.homomorphic.contributor import Contributor, ContributorStats
from laconic.aggregate.homomorphic.packet_sum import Sum, add, count, packet
from laconic.aggregate.homomorphic.summing import CARRY, Summing, summing

__all__ = ["CARRY", "Contributor", "ContributorStats", "Sum", "Summing", "add", "count", "packet", "summing"]
