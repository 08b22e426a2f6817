"""Packet <-> bytes: headers, limits and checksums, without knowledge of codecs. See docs/wire-format.md.

Bytes from other processes raise ``FrameError`` only: every length is checked against the buffer before anything is
sliced, and nothing is allocated.
"""

from __future__ import annotations

from laconic.wire.alignment import ALIGN, align, body_nbytes
from laconic.wire.bundle import (
    MAX_NAME,
    MAX_PACKETS,
    BundleWriter,
    bundle_header,
    is_bundle,
    pack_bundle,
    unpack_bundle,
)
from laconic.wire.frame import FrameArena, FramePlan, frame_nbytes, header_of_section, pack, seal, unpack
from laconic.wire.header import DTYPES, MAX_NUMEL, WIDE, Buffer, as_bytes
from laconic.wire.template import FrameTemplate

__all__ = [
    "ALIGN", "DTYPES", "MAX_NAME", "MAX_NUMEL", "MAX_PACKETS", "WIDE", "Buffer", "BundleWriter", "FrameArena",
    "FramePlan", "FrameTemplate", "align", "as_bytes", "body_nbytes", "bundle_header", "frame_nbytes",
    "header_of_section", "is_bundle", "pack", "pack_bundle", "seal", "unpack", "unpack_bundle",
]  # fmt: skip
