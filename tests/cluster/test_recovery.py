"""Lost workers and servers in every method: the run ends with the same bits as without the failure.

Here threads crash at a step of the run, and only files survive. Real processes are killed in ``test_faults``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from laconic.cluster.rejoin import Offer, agree
from laconic.train.methods import METHODS
from laconic_lab.faults.invariants import applied_once, lost_at_most
from laconic_lab.faults.recovery import Training, job_of, require_same_weights


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Training]:
    """Return a function that returns a method's run without a failure, made once."""

    @functools.cache
    def run(method: str) -> Training:
        job, exchanges = job_of(method)
        result = Training(job, tmp_path_factory.mktemp("clean"), exchanges)
        result.run()
        return result

    return run


@pytest.mark.parametrize(
    "method, delivered", [(name, bool(i % 2)) for i, name in enumerate([*METHODS, "1", "laconic"])]
)
def test_lost_worker_changes_no_bit(
    method: str, delivered: bool, tmp_path: Path, clean_run: Callable[[str], Training]
) -> None:
    """``delivered``: its push arrives and only the reply is lost."""
    job, exchanges = job_of(method)
    clean = clean_run(method)
    hurt = Training(job, tmp_path / "hurt", exchanges)
    hurt.run(dies=1, at=exchanges - 2, delivered=delivered)
    require_same_weights(hurt, clean)
    assert len(applied_once(hurt.events[0])) == 2 * exchanges
    losses = lost_at_most(hurt.events[0], job.exchanges_per_checkpoint)
    if job.every == 1:  # otherwise it crashes right after a checkpoint
        assert bool(losses) == job.remembers  # without state of workers nothing is repeated
    assert not [e for e in hurt.events[0] if e["event"] == "memory_lost"]


@pytest.mark.parametrize("method", ["1", "5", "6", "laconic", "2w"])
def test_lost_server_changes_no_bit(method: str, tmp_path: Path, clean_run: Callable[[str], Training]) -> None:
    job, exchanges = job_of(method)
    clean = clean_run(method)
    first = Training(job, tmp_path / "hurt", exchanges)
    first.exchanges = exchanges // 2 + 1
    first.cores = [first.core()]  # it stops half way, some exchanges after a checkpoint
    first.run()
    again = Training(job, tmp_path / "hurt", exchanges, first_incarnation=10)
    assert 0 < again.cores[0].version <= first.exchanges
    again.run()
    require_same_weights(again, clean)


@pytest.mark.parametrize("method", ["1", "laconic"])
def test_several_servers_give_the_bits_of_one(
    method: str, tmp_path: Path, clean_run: Callable[[str], Training]
) -> None:
    job, exchanges = job_of(method)
    one = clean_run(method)
    three = Training(job, tmp_path / "three", exchanges, servers=3)
    three.run()
    hurt = Training(job, tmp_path / "hurt", exchanges, servers=3)
    hurt.run(dies=0, at=exchanges - 2, delivered=True)
    require_same_weights(hurt, three)
    if job.pull == "none":  # otherwise rounding seeds depend on the server
        require_same_weights(three, one)
    for events in hurt.events:
        applied_once(events)


def test_worker_without_its_files_continues_without_residuals_and_logs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, exchanges = job_of("laconic")
    run = Training(job, tmp_path, exchanges)
    run.loses_files = 1
    run.run(dies=1, at=exchanges - 2)
    lost = [(e["worker"], e["version"]) for e in run.events[0] if e["event"] == "memory_lost"]
    assert lost == [(1, exchanges - 2)] and "empty memory" in caplog.text
    assert lost_at_most(run.events[0], 0) == [] and run.cores[0].version == exchanges
    applied_once(run.events[0])


@pytest.mark.parametrize("offers, available, version, lost", [
    ([{5, 4}, {5, 4}], {5, 4, 0}, 5, set()), ([{5, 4}, {4, 0}], {5, 4, 0}, 4, set()), ([{5}, {4}], {5, 4}, 5, {1}),
    ([{9}, {4}], {5, 4}, 4, {0}), ([{9}, {8}], {5, 4}, 5, {0, 1}),
])  # fmt: skip
def test_agreement_is_the_newest_common_version(
    offers: list[set[int]], available: set[int], version: int, lost: set[int]
) -> None:
    agreed = agree({worker: Offer(frozenset(versions)) for worker, versions in enumerate(offers)}, available)
    assert (agreed.version, set(agreed.lost)) == (version, lost)
