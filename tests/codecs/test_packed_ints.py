"""The laws of ``shared``, ``thc``, ``powersgd``, ``mean`` and ``union``; their sums are tested in sums/."""

from __future__ import annotations

import laws

SPECS = [*laws.PACKED_INTS, *laws.LINEAR]


test_law = laws.holds
