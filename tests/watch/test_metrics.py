from __future__ import annotations

import re
from pathlib import Path

from runs import Folder, server, worker

from laconic.watch.metrics import metrics

# https://prometheus.io/docs/instrumenting/exposition_formats/, text format 0.0.4
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} ([0-9eE+.-]+)")


def parse(text: str) -> dict[str, dict[str, float]]:
    """Values by labels by name; every line is a sample, or the help or type of the family that follows."""
    found: dict[str, dict[str, float]] = {}
    family = kind = ""
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            assert family not in found, "a family comes once"
            found[family] = {}
        elif line.startswith("# TYPE "):
            assert line.split(" ")[2] == family
            kind = line.split(" ")[3]
            assert kind in ("counter", "gauge") and (kind == "counter") == family.endswith(("_total", "_sum"))
        else:
            match = SAMPLE.fullmatch(line)
            assert match and match[1] == family, line
            assert match[2] not in found[family], "a sample comes once"
            found[family][match[2]] = float(match[3])
    return found


def test_every_line_is_as_prometheus_reads_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path / 'a "run"\\of\nmine')
    folder.config()
    workers = [
        worker(7, 0.25, bytes_sent=5, missed=2, missed_most=3, missed_sum=9, applied=4),
        worker(6, None, state="lost", lives=2),
    ]
    folder.status(server(at=1.0, version=7, received=100, sent=50, workers=workers, faults={"lost": 2}))
    found = parse(metrics(folder.look()))
    run = 'run="' + str(folder.path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    assert found["laconic_up"] == {run: 1} and found["laconic_rounds_total"] == {run: 7}
    assert found["laconic_received_bytes_total"] == {run: 100} and found["laconic_sent_bytes_total"] == {run: 50}
    assert found["laconic_loss"] == {f'{run},worker="0"': 0.25}
    assert found["laconic_workers"][f'{run},state="computing"'] == found["laconic_workers"][f'{run},state="lost"'] == 1
    assert found["laconic_staleness_updates"][f'{run},worker="0"'] == 2
    assert found["laconic_staleness_updates_max"][f'{run},worker="0"'] == 3
    assert found["laconic_worker_seconds_total"][f'{run},worker="1",part="encode"'] == 1
    assert found["laconic_worker_starts_total"][f'{run},worker="1"'] == 2
    assert found["laconic_faults_total"] == {f'{run},kind="lost"': 2}


def test_a_run_that_is_not_there_is_down(tmp_path: Path) -> None:
    found = parse(metrics(Folder(tmp_path / "run").look()))
    assert list(found["laconic_up"].values()) == [0] and found["laconic_loss"] == {}
