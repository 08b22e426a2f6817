"""Copies of a model along its run, judged on the test set when the run is over: meanwhile nobody waits for that."""

from __future__ import annotations

from laconic.train.task import Task

__all__ = ["JUDGED", "Snapshots"]

COUNT = 10
ROOM = 64 << 20
"""Bytes that copies may take."""
PATIENCE = 5.0
"""Seconds that judging may take; with less for two there is none."""
JUDGED = ("iteration", "seconds", "bytes_sent", "bytes_received", "accuracy")


class Snapshots:
    """Some of one worker.

    Args:
        task: Whose model it trains.
        iterations: Of the run.
    """

    def __init__(self, task: Task, iterations: int) -> None:
        self._task = task
        nbytes = sum(x.numel() * x.element_size() for x in task.model.state_dict().values())
        most = min(COUNT, ROOM // max(1, nbytes))
        self._every = -(-iterations // most) if most >= 2 else 0
        self._due = self._every
        self._taken: list[tuple[tuple[float, ...], dict[str, object]]] = []

    def look(self, iteration: int, *point: float) -> None:
        """Copy the model if it is time: after ``iteration`` of them, at ``point`` (the rest of ``JUDGED``)."""
        if self._every and iteration >= self._due:
            self._due = (iteration // self._every + 1) * self._every
            state = {name: x.detach().cpu().clone() for name, x in self._task.model.state_dict().items()}
            self._taken.append(((iteration, *point), state))

    def judge(self, each_s: float) -> dict[str, list[float]]:
        """As many as there is time for, columns of ``JUDGED``; the model is left as the last copy.

        Args:
            each_s: Seconds that one is likely to take.
        """
        most = int(PATIENCE / each_s) if each_s > 0 else COUNT
        taken = self._taken
        if most < 2 or not taken:
            return {}
        if most < len(taken):  # evenly, the last among them
            taken = [taken[len(taken) - 1 - i * len(taken) // most] for i in reversed(range(most))]
        rows = []
        for point, state in taken:
            self._task.model.load_state_dict(state)
            accuracy = self._task.evaluate().get("accuracy")
            if accuracy is None:
                return {}
            rows.append((*point, accuracy))
        return {name: [row[i] for row in rows] for i, name in enumerate(JUDGED)}
