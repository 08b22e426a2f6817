"""torchft replicas that are killed at random: do they stay equal, and are all residuals accounted for?"""

from __future__ import annotations

import math
import multiprocessing
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

from laconic.errors import ConfigError
from laconic_lab.faults.replica_process import Attempt, ReplicaOptions, read_attempts, run_replica

__all__ = ["KillReport", "StepTime", "check", "kill_replicas", "time_steps"]

LAST_STEPS = 20
"""Steps that all replicas take together after the last kill."""
ENOUGH_S = 240.0
"""How long the end of a campaign may take before replicas that are still running are given up."""
TOLERANCE = 1e-4
"""Of the sums of residuals and gradients, which are float32, relative to their magnitudes."""


@dataclass(frozen=True)
class KillReport:
    """The outcome of a campaign."""

    spec: str
    replicas: int
    kills: int
    seconds: float
    steps: int
    attempts: int
    quorums: int
    discarded: int
    """Attempts that no replica committed."""
    committed_by_others: int
    """Attempts that failed on one replica and were committed by others."""
    ended_early: int
    """Replicas that ended with an error although they were not killed."""
    unfinished: int
    compared_steps: int
    """Steps whose weights at least two replicas wrote down."""
    differing_steps: int
    balanced_steps: int
    """Committed steps in which gradients and residuals before equal sums and residuals after."""
    unbalanced_steps: int
    unchecked_steps: int
    """Committed steps of which a killed replica did not write down its part."""
    continued: int
    """Pairs of attempts between which residuals were kept, put back, or cut for another number of replicas."""
    broken: int
    """Such pairs in which residuals changed."""

    @property
    def kept(self) -> bool:
        """Whether training ended, replicas were equal and residuals were accounted for."""
        return not (self.differing_steps or self.unbalanced_steps or self.broken or self.unfinished)


class _Replicas:
    """The processes of a campaign. The fork server has imported torch, so a replica is back within a second."""

    def __init__(self, count: int, spec: str, width: int, folder: Path, *, min_replicas: int, record: bool) -> None:
        if find_spec("torchft") is None:
            raise ConfigError("replicas need torchft: pip install 'laconic[torchft]'")
        self._context: Any = multiprocessing.get_context("forkserver")
        multiprocessing.set_forkserver_preload(["laconic_lab.faults.replica_process", "torchft"])
        lighthouse = import_module("torchft.coordination").LighthouseServer
        self._lighthouse = lighthouse(
            bind="[::]:0", min_replicas=min_replicas, join_timeout_ms=500, quorum_tick_ms=50, heartbeat_timeout_ms=2000
        )
        self.folder, self._spec, self._width = folder, spec, width
        self._min_replicas, self._record = min_replicas, record
        self._lives = [0] * count
        self.ended_early = 0
        self.processes: list[BaseProcess] = [self._start(i) for i in range(count)]

    def _start(self, i: int) -> BaseProcess:
        options = ReplicaOptions(
            self._lighthouse.address(), str(self.folder), f"replica{i}", self._lives[i], self._spec, self._width,
            self._min_replicas, self._record,
        )  # fmt: skip
        process: BaseProcess = self._context.Process(target=run_replica, args=(options,), daemon=True)
        process.start()
        return process

    def restart(self, i: int, *, kill: bool) -> None:
        process = self.processes[i]
        if kill:
            process.kill()
        process.join()
        self._lives[i] += 1
        self.processes[i] = self._start(i)

    def restart_ended(self) -> None:
        """Start replicas again that ended with an error."""
        for i, process in enumerate(self.processes):
            if process.exitcode not in (None, 0):
                self.ended_early += 1
                self.restart(i, kill=False)

    def last_steps(self) -> list[int]:
        """Return the last step that the present process of each replica has written down; -1 for none."""
        steps = []
        for i, life in enumerate(self._lives):
            path = self.folder / f"replica{i}-{life}.jsonl"
            mine = [a for a in read_attempts_of(path) if a.committed]
            steps.append(mine[-1].step if mine else -1)
        return steps

    def expendable(self) -> list[int]:
        """Return the replicas without which another one still knows the newest weights."""
        steps = self.last_steps()
        newest = max(steps)
        knowing = {
            i for i, step in enumerate(steps) if step >= max(0, newest - 2) and self.processes[i].is_alive()
        }  # fmt: skip
        return [i for i in range(len(steps)) if knowing - {i}]

    def stop_at(self, step: int) -> None:
        partial = self.folder / "stop.partial"
        partial.write_text(str(step))
        partial.replace(self.folder / "stop")

    def wait(self, seconds: float) -> int:
        """Wait for the end of all replicas; return how many did not end well."""
        deadline, unfinished = time.monotonic() + seconds, 0
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            unfinished += process.exitcode != 0
        return unfinished

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._lighthouse.shutdown()


def read_attempts_of(path: Path) -> list[Attempt]:
    with tempfile.TemporaryDirectory() as folder:
        if not path.exists():
            return []
        tail = path.read_text(encoding="utf-8").splitlines()[-5:]
        (Path(folder) / "tail.jsonl").write_text("\n".join(tail), encoding="utf-8")
        return read_attempts(Path(folder))


def kill_replicas(
    kills: int, seconds: float, *, replicas: int = 3, spec: str = "ef|topk:0.05|qsgd:4", width: int = 128,
    seed: int = 0, folder: Path | None = None, tell: Callable[[int, int], None] = lambda kills, step: None,
) -> KillReport:  # fmt: skip
    """Train with torchft while replicas are killed at random times and started again.

    Args:
        seconds: How long the kills take; replicas then take a few steps together.
        spec: A codec that uses the two-shot exchange, whose residuals are summed for the accounts.
        folder: Where replicas write; a temporary one by default.
        tell: Called after each kill with the number of kills and the newest step.
    """
    if replicas < 3:
        raise ConfigError(f"replicas must be 3 or more, so that two go on when one is killed, got {replicas}")
    with tempfile.TemporaryDirectory() as temporary:
        running = _Replicas(replicas, spec, width, folder or Path(temporary), min_replicas=2, record=True)
        try:
            rng, began = random.Random(seed), time.monotonic()
            _wait_until(lambda: min(running.last_steps()) >= 0, running)
            began, killed = time.monotonic(), 0
            moments = sorted(rng.uniform(0, seconds) for _ in range(kills))
            for moment in moments:
                while time.monotonic() - began < moment:
                    running.restart_ended()
                    time.sleep(0.05)
                _wait_until(lambda: bool(running.expendable()), running)  # somebody must know the weights
                running.restart(rng.choice(running.expendable()), kill=True)
                killed += 1
                tell(killed, max(running.last_steps()))
            _wait_until(lambda: min(running.last_steps()) >= 0, running)
            running.stop_at(max(running.last_steps()) + LAST_STEPS)
            unfinished = running.wait(ENOUGH_S)
            spent = time.monotonic() - began
        finally:
            running.close()
        attempts = read_attempts(running.folder)
    return check(
        attempts, spec=spec, replicas=replicas, kills=killed, seconds=spent, ended_early=running.ended_early,
        unfinished=unfinished,
    )  # fmt: skip


def _wait_until(done: Callable[[], bool], running: _Replicas) -> None:
    deadline = time.monotonic() + ENOUGH_S
    while not done():
        running.restart_ended()
        if time.monotonic() > deadline:
            raise TimeoutError(f"replicas did not take a step within {ENOUGH_S:.0f} s")
        time.sleep(0.1)


def check(
    attempts: Sequence[Attempt], *, spec: str, replicas: int, kills: int, seconds: float, ended_early: int,
    unfinished: int,
) -> KillReport:  # fmt: skip
    """Compare the weights that replicas wrote down, and balance the accounts of residuals."""
    committed_at: defaultdict[tuple[int, int], list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        committed_at[attempt.quorum, attempt.step].append(attempt)
    weights: defaultdict[int, dict[tuple[str, int], int]] = defaultdict(dict)
    for attempt in attempts:
        if attempt.committed:
            weights[attempt.step][attempt.name, attempt.life] = attempt.weights
    compared = [by_replica for by_replica in weights.values() if len(by_replica) > 1]
    balanced = unbalanced = unchecked = by_others = discarded = 0
    for group in committed_at.values():
        winners = [a for a in group if a.committed]
        if not winners:
            discarded += 1
            continue
        by_others += sum(not a.committed and a.exchanged for a in group)
        if not winners[0].exchanged:
            continue
        if len(group) < winners[0].size or not all(a.exchanged for a in group):
            unchecked += 1
        elif _balanced(group, winners[0]):
            balanced += 1
        else:
            unbalanced += 1
    continued, broken = _continuity(attempts)
    steps = max((a.step for a in attempts), default=-1) + 1
    return KillReport(
        spec=spec, replicas=replicas, kills=kills, seconds=seconds, steps=steps, attempts=len(attempts),
        quorums=len({a.quorum for a in attempts}), discarded=discarded, committed_by_others=by_others,
        ended_early=ended_early, unfinished=unfinished, compared_steps=len(compared),
        differing_steps=sum(len(set(by_replica.values())) > 1 for by_replica in compared), balanced_steps=balanced,
        unbalanced_steps=unbalanced, unchecked_steps=unchecked, continued=continued, broken=broken,
    )  # fmt: skip


def _balanced(group: Sequence[Attempt], winner: Attempt) -> bool:
    """Whether gradients and residuals before the step equal the delivered sums and the residuals after it."""
    size = winner.size
    before = math.fsum(a.inputs + a.sent_before + size * a.mean_before for a in group)
    after = winner.delivered + math.fsum(a.sent_after + size * a.mean_after for a in group)
    magnitude = math.fsum(abs(a.inputs) + abs(a.sent_before) + size * abs(a.mean_before) for a in group)
    return abs(before - after) <= TOLERANCE * max(1.0, magnitude)


def _continuity(attempts: Sequence[Attempt]) -> tuple[int, int]:
    """Count pairs of consecutive exchanges of one process, and those whose residuals do not continue."""
    lives: defaultdict[tuple[str, int], list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if attempt.exchanged:
            lives[attempt.name, attempt.life].append(attempt)
    pairs = broken = 0
    for mine in lives.values():
        for last, now in pairwise(mine):
            used = now.step > last.step  # by this replica, or by others before they healed it
            sent, mean = (last.sent_after, last.mean_after) if used else (last.sent_before, last.mean_before)
            expected = sent + now.size * mean
            actual = now.sent_before + now.size * now.mean_before
            pairs += 1
            broken += abs(actual - expected) > TOLERANCE * max(1.0, abs(sent) + now.size * abs(mean))
    return pairs, broken


@dataclass(frozen=True)
class StepTime:
    """The median step of two replicas without failures."""

    spec: str
    step_s: float
    steps: int
    parameters: int


def time_steps(
    specs: Sequence[str], *, width: int = 1024, seconds: float = 20.0, tell: Callable[[str], None] = lambda spec: None
) -> list[StepTime]:
    """Time steps of two replicas by each codec; ``plain`` is torchft without laconic."""
    times = []
    for spec in specs:
        tell(spec)
        with tempfile.TemporaryDirectory() as folder:
            running = _Replicas(2, spec, width, Path(folder), min_replicas=2, record=False)
            try:
                _wait_until(lambda running=running: min(running.last_steps()) >= 5, running)  # type: ignore[misc]
                time.sleep(seconds)
                running.stop_at(max(running.last_steps()) + 2)
                running.wait(ENOUGH_S)
            finally:
                running.close()
            measured = [a.seconds for a in read_attempts(Path(folder)) if a.committed and a.step >= 5]
        times.append(StepTime(spec, median(measured), len(measured), 64 * width + width * width + 10 * width))
    return times
