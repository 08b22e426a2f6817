"""Peers who are no workers, by the thousand, while a job goes on: do its workers notice?

Calm and storm alternate within one job, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

from laconic.errors import LaconicError
from laconic_lab.faults.flood_process import Besiegers
from laconic_lab.faults.scenario import Life, Scene
from laconic_lab.faults.soak import usage

__all__ = ["Siege", "siege"]

COMPUTING = 0.02
"""Seconds that a worker computes between two pushes."""
WARM_UP = 20
EDGE = 3
"""Exchanges at the ends of a phase that do not count: processes start and end there."""
BACK = 30.0
"""Seconds within which all that strangers had taken must be back."""
SPARE = 32 << 20
"""Bytes by which memory may have grown; the allocator keeps some, whoever comes."""
DISTURBED = {"lost", "duplicate", "late", "rewound", "spoilt"}
"""Events of a job in which something has happened to a worker."""


@dataclass(frozen=True)
class Siege:
    """What became of it.

    Args:
        connections: That came with garbage and were accepted.
        dropped: How often the server hung up on one of those that stayed.
        calm: Seconds of a step in calm phases; the median.
        stormy: In stormy ones.
        ratios: Of each storm's median to that of the calm before it, in ascending order.
        rss: Bytes of memory before the first storm, and after the last.
        descriptors: Open files before the first storm, the most at the end of one, and after the last.
        broken: The promise that was broken, or None.
    """

    connections: int
    dropped: int
    calm: float
    stormy: float
    ratios: tuple[float, ...]
    rss: tuple[int, int]
    descriptors: tuple[int, int, int]
    broken: str | None

    @property
    def slower(self) -> float:
        """How many times as long a step takes in a storm."""
        return self.stormy / self.calm


def siege(garbage: int, held: int, *, phases: int = 8, rate: float = 200.0, tls: bool = False, seed: int = 0) -> Siege:
    """A synchronous job of two workers, in turn undisturbed and with strangers at the door.

    Args:
        garbage: Connections in all that speak nonsense.
        held: Connections that stay, in each storm.
        phases: How many storms.
        rate: Connections with garbage a second.
        tls: Whether the server has certificates.
        seed: Chooses what strangers say.
    """
    steps = max(2 * EDGE + 10, round(garbage / phases / rate / COMPUTING))  # a storm ends before its phase does
    with tempfile.TemporaryDirectory(prefix="laconic-siege-") as folder:
        scene = Scene(
            Path(folder),
            "sync",
            exchanges=WARM_UP + 2 * phases * steps + 1,
            tls=tls,
            computing=COMPUTING,
            patience=40 * phases * steps * COMPUTING + 120,
        )
        camp = _Camp(scene, -(-garbage // phases), held, rate, seed)
        for phase in range(phases):
            scene.at(0, WARM_UP + (2 * phase + 1) * steps, camp.storm)
            scene.at(0, WARM_UP + (2 * phase + 2) * steps, camp.calm)
        scene.at(0, WARM_UP + 2 * phases * steps, camp.leave)
        broken = None
        try:
            scene.run()
        except LaconicError as error:
            broken = str(error)
        finally:
            camp.close()
    if broken is None and (seen := {event["event"] for event in scene.events} & DISTURBED):
        broken = f"P5: the history tells of {', '.join(sorted(seen))}, for which strangers cannot be the reason"
    if broken is None and (camp.after[1] > camp.before[1] or camp.after[0] > camp.before[0] + SPARE):
        broken = f"strangers left something: memory and open files were {camp.before}, then {camp.after}"
    calm, stormy = _step_times(scene, phases, steps) if broken is None else ([[1.0]], [[1.0]])
    return Siege(
        connections=sum(report.get("connected", 0) for report in camp.reports),
        dropped=max((report.get("dropped", 0) for report in camp.reports), default=0),
        calm=median(chain.from_iterable(calm)),
        stormy=median(chain.from_iterable(stormy)),
        ratios=tuple(sorted(median(after) / median(before) for before, after in zip(calm, stormy, strict=True))),
        rss=(camp.before[0], camp.after[0]),
        descriptors=(camp.before[1], camp.most, camp.after[1]),
        broken=broken,
    )


class _Camp:
    """Where they wait for orders; what was seen meanwhile. Worker 0 gives the signs."""

    def __init__(self, scene: Scene, garbage: int, held: int, rate: float, seed: int) -> None:
        self._scene, self._garbage, self._held, self._rate, self._seed = scene, garbage, held, rate, seed
        self._besiegers: Besiegers | None = None
        self.reports: list[dict[str, int]] = []
        self.before = self.after = (0, 0)
        self.most = 0

    def storm(self, life: Life) -> None:
        if self._besiegers is None:
            self._besiegers = Besiegers(f"127.0.0.1:{self._scene.server.port}")
            self.before = usage()
        self._order(hold=self._held, seed=self._seed)
        self._besiegers.order(garbage=self._garbage, rate=self._rate, seed=self._seed + 1)
        self._seed += 2

    def calm(self, life: Life) -> None:
        assert self._besiegers is not None
        self.reports.append(self._besiegers.report())  # of the garbage: all of it has come
        self.most = max(self.most, usage()[1])
        self._order(release=True)

    def leave(self, life: Life) -> None:
        """All of them are gone: what they had taken comes back as the server notices."""
        end = time.monotonic() + BACK
        while (now := usage())[1] > self.before[1] and time.monotonic() < end:
            time.sleep(0.02)
        self.after = now

    def close(self) -> None:
        if self._besiegers is not None:
            self._besiegers.close()

    def _order(self, **order: float) -> None:
        assert self._besiegers is not None
        self._besiegers.order(**order)
        self.reports.append(self._besiegers.report())


def _step_times(scene: Scene, phases: int, steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """In calm phases and in stormy ones, from the history: from an exchange to the next."""
    at = {event["sequence"]: event["at"] for event in scene.events if event["event"] == "applied"}
    times: tuple[list[list[float]], list[list[float]]] = [], []
    for phase in range(2 * phases):
        first = WARM_UP + phase * steps
        counted = range(first + EDGE, first + steps - EDGE)
        times[phase % 2].append([at[sequence + 1] - at[sequence] for sequence in counted])
    return times
