"""Copies of a model during a run, evaluated on the test set after the run so that training does not wait."""

from __future__ import annotations

from laconic.train.task import Task

__all__ = ["COLUMNS", "Snapshots"]

COUNT = 10
MAX_NBYTES = 64 << 20
"""Largest size of all copies, in bytes."""
MAX_SECONDS = 5.0
"""Longest time of all evaluations; if it suffices for fewer than two, none is made."""
COLUMNS = ("iteration", "seconds", "bytes_sent", "bytes_received", "accuracy")


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
