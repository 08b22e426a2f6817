"""``shared`` and ``thc`` as any other codec; what they are for is in tests/test_sums.py."""

from __future__ import annotations

import laws

SPECS = list(laws.LANES)


def test_law(law, spec):
    law(spec)
