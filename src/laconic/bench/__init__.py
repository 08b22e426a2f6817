"""Measuring codecs: against the same run's memcpy, and against what one would use instead.

Right before fast: nothing is timed that was not checked first (``checks``).
"""

from __future__ import annotations

from laconic.bench.codecs import SPECS, CodecResult, PeerResult, Report, Settings, run
from laconic.bench.timing import Timing

__all__ = ["SPECS", "CodecResult", "PeerResult", "Report", "Settings", "Timing", "run"]
