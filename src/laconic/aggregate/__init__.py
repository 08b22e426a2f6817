"""Combine the packets of many senders: decode them into one mean, or add them while they are compressed.

``decode_sum`` accumulates any codec's packets into a float32 tensor. ``homomorphic`` adds packets of summable codecs
without decoding them.
"""

from laconic.aggregate.decode_sum import mean, weighted_sum

__all__ = ["mean", "weighted_sum"]
