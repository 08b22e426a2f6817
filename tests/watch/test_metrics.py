from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import Folder, server, worker

from laconic.errors import ConfigError
from laconic.watch.metrics import metrics


def parse(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return values by name and label values, in the order of the labels' names and without the run."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for name, value in sorted(sample.labels.items()) if name != "run")
            values.setdefault(sample.name, {})[labels] = sample.value
    return values


def test_metrics_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    folder = Folder(tmp_path / 'a "run"\\of\nmine')
    folder.config()
    workers = [
        worker(7, 0.25, bytes_sent=5, missed=2, missed_most=3, missed_sum=9, applied=4),
        worker(6, None, state="lost", lives=2),
    ]
    folder.status(server(at=1.0, version=7, received=100, sent=50, workers=workers, faults={"lost": 2}))
    text = metrics(folder.view()).decode()
    values = parse(text)
    assert 'run="' + str(folder.path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"' in text
    assert values["laconic_up"] == {(): 1} and values["laconic_rounds_total"] == {(): 7}
    assert values["laconic_received_bytes_total"] == {(): 100} and values["laconic_sent_bytes_total"] == {(): 50}
    assert values["laconic_loss"] == {("0",): 0.25}
    assert values["laconic_workers"]["computing",] == values["laconic_workers"]["lost",] == 1
    assert values["laconic_staleness_updates"]["0",] == 2 and values["laconic_staleness_updates_max"]["0",] == 3
    assert values["laconic_staleness_updates_sum"]["0",] == 9 and values["laconic_pushes_total"]["0",] == 4
    assert values["laconic_worker_seconds_total"]["encode", "1"] == 1
    assert values["laconic_worker_starts_total"]["1",] == 2
    assert values["laconic_faults_total"] == {("lost",): 2}


def test_missing_run_is_down(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    values = parse(metrics(Folder(tmp_path / "run").view()).decode())
    assert values["laconic_up"] == {(): 0} and "laconic_loss" not in values


def test_missing_package_raises_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.watch.metrics.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'laconic\[watch\]'"):
        metrics(Folder(tmp_path / "run").view())
