"""``shared``, ``thc``, ``powersgd``, ``mean`` and ``union`` as any other codec; what they are for is in sums/."""

from __future__ import annotations

import laws

SPECS = [*laws.PACKED_INTS, *laws.LINEAR]


def test_law(law, spec):
    law(spec)
