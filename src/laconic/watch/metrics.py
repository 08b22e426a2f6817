"""A run for Prometheus: its text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from laconic.watch.status import PARTS, STATES
from laconic.watch.view import View

__all__ = ["CONTENT_TYPE", "metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[Mapping[str, object], float | int]


def metrics(view: View) -> str:
    """All metrics of a run, one family after the other.

    >>> text = metrics(View("runs/one", "running", 0.0, iteration=7, faults={"lost": 2}))
    >>> [line for line in text.splitlines() if line.startswith(("laconic_iteration{", "laconic_faults"))]
    ['laconic_iteration{run="runs/one"} 7', 'laconic_faults_total{run="runs/one",kind="lost"} 2']
    """
    run = {"run": view.run}
    workers = [(run | {"worker": number}, worker) for number, worker in enumerate(view.workers)]
    states = [worker.state for worker in view.workers]
    families: list[tuple[str, str, str, Iterable[Sample]]] = [
        ("up", "gauge", "Whether the run's server is heard of.", [(run, int(view.phase == "running"))]),
        ("iteration", "gauge", "Iterations that are done.", [(run, view.iteration)]),
        ("iterations", "gauge", "Iterations that the run has.", [(run, view.iterations)]),
        ("rounds_total", "counter", "Updates of the weights.", [(run, view.version)]),
        ("received_bytes_total", "counter", "Bytes of frames that servers received.", [(run, view.received)]),
        ("sent_bytes_total", "counter", "Bytes of frames that servers sent.", [(run, view.sent)]),
        ("saved_bytes_total", "counter", "Bytes that float32 both ways would have taken beyond that.",
         [(run, view.saved)]),
        ("loss", "gauge", "Loss of a worker's last batch.",
         [(labels, worker.loss) for labels, worker in workers if worker.loss is not None]),
        ("workers", "gauge", "Workers by what they do.",
         [(run | {"state": state}, states.count(state)) for state in STATES]),
        ("worker_iteration", "gauge", "Iteration that a worker has reached.",
         [(labels, worker.iteration) for labels, worker in workers]),
        ("worker_sent_bytes_total", "counter", "Bytes of frames that a worker made.",
         [(labels, worker.bytes_sent) for labels, worker in workers]),
        ("worker_received_bytes_total", "counter", "Bytes of frames that a worker was sent.",
         [(labels, worker.bytes_received) for labels, worker in workers]),
        ("worker_seconds_total", "counter", "Seconds of a worker by what they were spent on.",
         [(labels | {"part": part}, worker.seconds[part]) for labels, worker in workers for part in PARTS]),
        ("worker_retries_total", "counter", "Times that a worker had to ask again.",
         [(labels, worker.retries) for labels, worker in workers]),
        ("worker_starts_total", "counter", "Times that a worker was started.",
         [(labels, worker.lives) for labels, worker in workers]),
        ("staleness_updates", "gauge", "Updates that a worker's last push had missed.",
         [(labels, worker.missed) for labels, worker in workers]),
        ("staleness_updates_max", "gauge", "The most updates that any push of a worker had missed.",
         [(labels, worker.missed_most) for labels, worker in workers]),
        ("staleness_updates_sum", "counter", "Updates that all pushes of a worker had missed.",
         [(labels, worker.missed_sum) for labels, worker in workers]),
        ("pushes_total", "counter", "Pushes of a worker that were applied.",
         [(labels, worker.applied) for labels, worker in workers]),
        ("faults_total", "counter", "Things that went wrong, by kind.",
         [(run | {"kind": kind}, count) for kind, count in sorted(view.faults.items())]),
        ("server_starts_total", "counter", "Times that the server was started.", [(run, view.server_lives)]),
    ]  # fmt: skip
    lines = []
    for name, kind, what, samples in families:
        lines += [f"# HELP laconic_{name} {what}", f"# TYPE laconic_{name} {kind}"]
        lines += [f"laconic_{name}{{{_labels(labels)}}} {value!r}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, object]) -> str:
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
