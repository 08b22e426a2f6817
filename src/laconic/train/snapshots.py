"""Accuracy along a run: copies of a model that are evaluated after it, and samples while it trains."""

from __future__ import annotations

import json
import time
from pathlib import Path

from laconic.train.task import Task
from laconic.watch.folder import ACCURACY, open_to_append

__all__ = ["COLUMNS", "SampledAccuracy", "Snapshots"]

COUNT = 10
MAX_NBYTES = 64 << 20
"""Largest size of all copies, in bytes."""
MAX_SECONDS = 5.0
"""Longest time of all evaluations; if it suffices for fewer than two, none is made."""
COLUMNS = ("iteration", "seconds", "bytes_sent", "bytes_received", "accuracy")


SAMPLE = 128
"""Test examples of which the accuracy is sampled while a run trains."""
SHARE = 0.02
"""Largest share of a run's time that samples may take."""


class SampledAccuracy:
    """Accuracy of one worker's model on a few test examples while it trains, for ``laconic watch``.

    A sample is taken when all samples together are expected to take at most ``SHARE`` of the time so far.

    Args:
        batch: Examples of an iteration.
    """

    def __init__(self, task: Task, run_dir: Path, iterations: int, batch: int) -> None:
        self._task, self._path = task, run_dir / ACCURACY
        stride = -(-task.num_test // SAMPLE)
        self._count = -(-task.num_test // stride)
        self._iterations_each = (self._count + task.num_statistics) / batch / 3  # forward is about a third of a step
        self._every = self._next = max(1, -(-iterations // 50))
        self._spent_s, self._last_s = 0.0, 0.0
        self._stopped = False

    def update(self, iteration: int, seconds: float) -> None:
        """Take a sample if one is due and affordable, and append it to the run's folder.

        Args:
            seconds: Time of the run so far.
        """
        if self._stopped or iteration < self._next:
            return
        # Before the first sample its time is guessed from the iterations.
        expected_s = self._last_s or self._iterations_each * seconds / iteration
        if self._spent_s + expected_s > SHARE * seconds:
            return
        self._next = (iteration // self._every + 1) * self._every
        began = time.perf_counter()
        accuracy = self._task.evaluate(SAMPLE).get("accuracy")
        self._last_s = time.perf_counter() - began
        self._spent_s += self._last_s
        if accuracy is None:  # not a classification
            self._stopped = True
            return
        line = {"at": time.time(), "iteration": iteration, "accuracy": accuracy, "examples": self._count}
        try:
            with open_to_append(self._path) as file:
                file.write(json.dumps(line) + "\n")
        except OSError:  # a full disk must not end the training; the server says that the disk is full
            self._stopped = True


class Snapshots:
    """Copies of one worker's model."""

    def __init__(self, task: Task, iterations: int) -> None:
        self._task = task
        nbytes = sum(x.numel() * x.element_size() for x in task.model.state_dict().values())
        count = min(COUNT, MAX_NBYTES // max(1, nbytes))
        self._every = -(-iterations // count) if count >= 2 else 0
        self._next = self._every
        self._copies: list[tuple[tuple[float, ...], dict[str, object]]] = []

    def update(self, iteration: int, *point: float) -> None:
        """Copy the model if a copy is due; ``point`` has the next values of ``COLUMNS``."""
        if self._every and iteration >= self._next:
            self._next = (iteration // self._every + 1) * self._every
            state = {name: x.detach().cpu().clone() for name, x in self._task.model.state_dict().items()}
            self._copies.append(((iteration, *point), state))

    def evaluate(self, seconds_each: float) -> dict[str, list[float]]:
        """Evaluate as many copies as there is time for; return ``COLUMNS``. The model is left as the last copy.

        Args:
            seconds_each: Expected time of one evaluation.
        """
        count = int(MAX_SECONDS / seconds_each) if seconds_each > 0 else COUNT
        copies = self._copies
        if count < 2 or not copies:
            return {}
        if count < len(copies):  # evenly spaced, including the last
            copies = [copies[len(copies) - 1 - i * len(copies) // count] for i in reversed(range(count))]
        rows = []
        for point, state in copies:
            self._task.model.load_state_dict(state)
            accuracy = self._task.evaluate().get("accuracy")
            if accuracy is None:
                return {}
            rows.append((*point, accuracy))
        return {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
