"""Metrics of a run for Prometheus, written with the package ``prometheus_client``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from laconic.errors import ConfigError
from laconic.watch.status import PARTS, STATES
from laconic.watch.view import View

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["CONTENT_TYPE", "check_prometheus", "metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def check_prometheus(option: str = "/metrics") -> None:
    """Raise ``ConfigError`` if ``prometheus_client`` is not installed."""
    if find_spec("prometheus_client") is None:
        raise ConfigError(f"{option} needs prometheus-client: pip install 'laconic[watch]'")


def metrics(view: View) -> bytes:
    """Return all metrics of a run in Prometheus' text format."""
    check_prometheus()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(view))
    text: bytes = generate_latest(registry)
    return text


class _Collector:
    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, text, labels, samples in _families(self._view):
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = family(f"laconic_{name}", text, labels=("run", *labels))
            for values, value in samples:
                metric.add_metric([self._view.run, *map(str, values)], value)
            yield metric


Family = tuple[str, str, tuple[str, ...], Iterable[tuple[tuple[Any, ...], float]]]


def _families(view: View) -> Iterator[Family]:
    """Yield name, help text, labels besides ``run``, and samples. Names that end in ``_total`` are counters."""
    states = [worker.state for worker in view.workers]
    workers = list(enumerate(view.workers))

    def of_run(name: str, text: str, value: float) -> Family:
        return name, text, (), [((), value)]

    def of_workers(name: str, text: str, attribute: str) -> Family:
        values = [((number,), getattr(worker, attribute)) for number, worker in workers]
        return name, text, ("worker",), [(labels, value) for labels, value in values if value is not None]

    yield of_run("up", "1 if the run's server has reported lately, else 0.", int(view.phase == "running"))
    yield of_run("iteration", "Iterations done.", view.iteration)
    yield of_run("iterations", "Iterations of the whole run.", view.iterations)
    yield of_run("rounds_total", "Updates of the weights.", view.version)
    yield of_run("received_bytes_total", "Bytes of frames received by the servers.", view.received)
    yield of_run("sent_bytes_total", "Bytes of frames sent by the servers.", view.sent)
    yield of_run("saved_bytes_total", "Bytes saved compared with float32 in both directions.", view.saved)
    yield of_run("float32_bytes_total", "Bytes that float32 would have taken in both directions.", view.raw)
    if view.accuracies:
        yield of_run("accuracy_percent", "Accuracy on some test examples.", view.accuracies[-1]["accuracy"])
    yield of_workers("loss", "Loss of a worker's last batch.", "loss")
    counts = [((state,), states.count(state)) for state in STATES]
    yield "workers", "Number of workers in each state.", ("state",), counts
    yield of_workers("worker_iteration", "Last iteration of a worker.", "iteration")
    yield of_workers("worker_sent_bytes_total", "Bytes of frames sent by a worker.", "bytes_sent")
    yield of_workers("worker_received_bytes_total", "Bytes of frames received by a worker.", "bytes_received")
    seconds = [((number, part), worker.seconds[part]) for number, worker in workers for part in PARTS]
    yield "worker_seconds_total", "Seconds of a worker by activity.", ("worker", "part"), seconds
    yield of_workers("worker_retries_total", "Requests that a worker repeated.", "retries")
    yield of_workers("worker_starts_total", "Starts of a worker.", "lives")
    yield of_workers("staleness_updates", "Staleness of a worker's last push, in updates.", "missed")
    yield of_workers("staleness_updates_max", "Largest staleness of a worker's pushes.", "missed_most")
    yield of_workers("staleness_updates_sum", "Sum of the staleness of a worker's pushes.", "missed_sum")
    yield of_workers("pushes_total", "Pushes of a worker that were applied.", "applied")
    yield "faults_total", "Faults by kind.", ("kind",), [((kind,), n) for kind, n in sorted(view.faults.items())]
    yield of_run("server_starts_total", "Starts of the server.", view.server_lives)
