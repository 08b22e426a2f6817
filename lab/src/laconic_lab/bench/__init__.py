"""Benchmarks: codecs beside memcpy and the usual alternatives, DDP, parameter server, layers, GPU.

Everything is checked for correctness before it is timed (``checks``).
"""

from __future__ import annotations

from laconic_lab.bench.codec_results import SETS, SPECS, CodecResult, PeerResult, Report, Settings
from laconic_lab.bench.codecs import run
from laconic_lab.bench.coders import Rate
from laconic_lab.bench.timing import Timing

__all__ = ["SETS", "SPECS", "CodecResult", "PeerResult", "Rate", "Report", "Settings", "Timing", "run"]
