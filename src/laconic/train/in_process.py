"""Runs all workers of a job as threads of one process, for studies and tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from laconic.train.worker import Worker

__all__ = ["run_in_threads"]


def run_in_threads(workers: Sequence[Worker], exchanges: int) -> list[BaseException]:
    """Run all workers to the end of the job; return their exceptions in the order in which they were raised."""
    errors: list[BaseException] = []

    def run(worker: Worker) -> None:
        try:
            worker.run(exchanges)
        except BaseException as error:
            errors.append(error)
        finally:
            worker.connection.leave()

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
