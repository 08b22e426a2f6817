"""Combine the packets of many senders: decode them into one mean, or add them while they are compressed.

``decode_sum`` accumulates any codec's packets into float32 tensors; ``homomorphic`` adds packets of summable codecs
without decoding them; ``bundle_template`` checks messages of a known layout.
"""

from laconic.aggregate.bundle_template import BundleTemplate
from laconic.aggregate.decode_sum import MeanAccumulator, OpenedFrame, SenderMeanAccumulator, mean, weighted_sum

__all__ = ["BundleTemplate", "MeanAccumulator", "OpenedFrame", "SenderMeanAccumulator", "mean", "weighted_sum"]
