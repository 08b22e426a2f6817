from __future__ import annotations

import pytest

from laconic.errors import ConfigError
from laconic_lab.bench.collective import CollectiveSettings, run_collective


def test_small_run_is_correct_and_timed() -> None:
    settings = CollectiveSettings(("shared:8",), numel=3000, repeat=2)
    results = run_collective(settings)
    assert [each.name for each in results] == ["fp32", "bf16", "shared:8"]
    assert all(len(each.seconds) == 2 for each in results) and results[2].error < 1e-3
    assert results[2].nbytes < 0.3 * results[0].nbytes == 0.3 * 12_000
    record = results[2].record(settings, results[0])
    assert record.values["command"] == "laconic bench collective shared:8 --numel 3000 --repeat 2"
    with pytest.raises(ConfigError, match="ranks"):
        CollectiveSettings(ranks=0)
