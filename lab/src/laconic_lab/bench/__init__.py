"""Measuring codecs: against the same run's memcpy, and against what one would use instead.

Right before fast: nothing is timed that was not checked first (``checks``).
"""

from __future__ import annotations

from laconic_lab.bench.codecs import SETS, SPECS, CodecResult, PeerResult, Report, Settings, run
from laconic_lab.bench.coders import Rate
from laconic_lab.bench.timing import Timing

__all__ = ["SETS", "SPECS", "CodecResult", "PeerResult", "Rate", "Report", "Settings", "Timing", "run"]
