"""laconic: communication-efficient distributed training.

Codecs for gradients, parameters and updates, an open wire format, and channels with error feedback.

>>> import torch, laconic
>>> frame = laconic.encode(torch.randn(100_000), "topk:0.01|qsgd:4", seed=0)
>>> len(frame) < 2000, laconic.decode(frame).shape
(True, torch.Size([100000]))

Names are imported on first use: torch takes seconds to import, and ``laconic watch`` and shell completion do not need
it.
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
    from laconic.collective import Attachment, LocalSGD, attach, muon, split_parameters
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
    from laconic.tuning import tune
else:
    _NAMES = {
        "channels": ("Channel", "channel"),
        "codecs": ("codec", "codec_names"),
        "collective": ("Attachment", "LocalSGD", "attach", "muon", "split_parameters"),
        "errors": (
            "ConfigError", "FileError", "FrameError", "InputError", "LaconicError", "NonFiniteError",
            "WrongResultError",
        ),
        "inspect": ("Explanation", "explain"),
        "frames": ("decode", "decode_bundle", "encode", "encode_bundle", "encode_into", "max_nbytes"),
        "layers": ("LayerPolicy", "compress", "expand", "measure"),
        "packet": ("Packet", "TensorSpec"),
        "policy": ("Policy",),
        "tuning": ("tune",),
        "sums": ("Contributor", "Sum", "Summing", "summing"),
    }  # fmt: skip
    _MODULES = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _MODULES:
            globals()[name] = value = getattr(import_module(f"laconic.{_MODULES[name]}"), name)
            return value
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
    "Attachment", "Channel", "ConfigError", "Contributor", "Explanation", "FileError", "FrameError", "InputError",
    "LaconicError", "LayerPolicy", "LocalSGD", "NonFiniteError", "Packet", "Policy", "Sum", "Summing", "TensorSpec",
    "WrongResultError", "__version__", "aggregate", "attach", "channel", "codec", "codec_names", "compress", "decode",
    "decode_bundle", "encode", "encode_bundle", "encode_into", "expand", "explain", "max_nbytes", "measure", "muon",
    "split_parameters", "summing", "sums", "tune",
]  # fmt: skip
