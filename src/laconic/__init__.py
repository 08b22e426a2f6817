"""laconic: distributed training in few words.

Codecs for gradients, parameters and updates, an open wire format, and channels that remember what was not sent.

>>> import torch, laconic
>>> frame = laconic.encode(torch.randn(100_000), "topk:0.01|qsgd:4", seed=0)
>>> len(frame) < 2000, laconic.decode(frame).shape
(True, torch.Size([100000]))

What is named here is loaded when it is first asked for: torch takes seconds, and commands such as ``laconic watch`` and
a shell that completes a word do without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laconic._version import __version__

if TYPE_CHECKING:
    from laconic import aggregate, sums
    from laconic.aggregate.homomorphic import Contributor, Sum, Summing
    from laconic.aggregate.homomorphic.summing import summing  # the function: its module has the same name
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
    from laconic.frames import decode, decode_bundle, encode, encode_bundle, encode_into, max_nbytes
    from laconic.inspect import Explanation, explain
    from laconic.layers import LayerPolicy, compress, expand, measure
    from laconic.packet import Packet, TensorSpec
    from laconic.policy import Policy
else:
    _NAMES = {
        "channels": ("Channel", "channel"),
        "codecs": ("codec", "codec_names"),
        "collective": ("Attachment", "LocalSGD", "attach"),
        "errors": (
            "ConfigError", "FileError", "FrameError", "InputError", "LaconicError", "NonFiniteError",
            "WrongResultError",
        ),
        "inspect": ("Explanation", "explain"),
        "frames": ("decode", "decode_bundle", "encode", "encode_bundle", "encode_into", "max_nbytes"),
        "layers": ("LayerPolicy", "compress", "expand", "measure"),
        "packet": ("Packet", "TensorSpec"),
        "policy": ("Policy",),
        "sums": ("Contributor", "Sum", "Summing", "summing"),
    }  # fmt: skip
    _MODULES = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _MODULES:
            globals()[name] = found = getattr(import_module(f"laconic.{_MODULES[name]}"), name)
            return found
        if not name.startswith("_"):  # a package, such as laconic.sums
            try:
                return import_module(f"laconic.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"laconic.{name}":
                    raise
        raise AttributeError(f"module 'laconic' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


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
