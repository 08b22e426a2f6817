"""All workers of a job in threads of one process: for studies and tests, where processes would only take time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from laconic.train.worker import Worker

__all__ = ["run_together"]


def run_together(workers: Sequence[Worker], exchanges: int) -> list[BaseException]:
    """Run every worker to its end, and have it leave; what went wrong, the first first.

    Nobody waits for a worker that has failed longer than its link does.
    """
    failed: list[BaseException] = []

    def run(worker: Worker) -> None:
        try:
            worker.run(exchanges)
        except BaseException as error:
            failed.append(error)
        finally:
            worker.link.leave()

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed
