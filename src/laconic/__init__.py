"""laconic: distributed training in few words.

Codecs for gradients, parameters and updates, an open wire format, and channels that remember what was not sent.

>>> import torch, laconic
>>> frame = laconic.encode(torch.randn(100_000), "topk:0.01|qsgd:4", seed=0)
>>> len(frame) < 2000, laconic.decode(frame).shape
(True, torch.Size([100000]))
"""

from __future__ import annotations

from laconic import aggregate, sums
from laconic._version import __version__
from laconic.channels import Channel, channel
from laconic.codecs import codec, codec_names
from laconic.collective import Attachment, LocalSGD, attach
from laconic.errors import (
    ConfigError,
    FileError,
    FrameError,
    InputError,
    LaconicError,
    NonFiniteError,
    WrongResultError,
)
from laconic.explanations import Explanation, explain
from laconic.frames import decode, decode_bundle, encode, encode_bundle, encode_into, max_nbytes
from laconic.layers import LayerPolicy, compress, expand, measure
from laconic.packet import Packet, TensorSpec
from laconic.policy import Policy
from laconic.sums import Contributor, Sum, Summing, summing

__all__ = [
    "Attachment",
    "Channel",
    "ConfigError",
    "Contributor",
    "Explanation",
    "FileError",
    "FrameError",
    "InputError",
    "LaconicError",
    "LayerPolicy",
    "LocalSGD",
    "NonFiniteError",
    "Packet",
    "Policy",
    "Sum",
    "Summing",
    "TensorSpec",
    "WrongResultError",
    "__version__",
    "aggregate",
    "attach",
    "channel",
    "codec",
    "codec_names",
    "compress",
    "decode",
    "decode_bundle",
    "encode",
    "encode_bundle",
    "encode_into",
    "expand",
    "explain",
    "max_nbytes",
    "measure",
    "summing",
    "sums",
]
