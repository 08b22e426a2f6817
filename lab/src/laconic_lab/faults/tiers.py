"""Tiers of the fault campaign: scenarios, kills of checkpoints, a soak, idle calls and mutated packets, in pieces.

Each piece ends with a Record in one file. A later call reads the file and runs what is missing; pieces whose last
Record shows a violated invariant are run again. For a broken soak that is another one, at least as long: its seed only
chooses which fault comes when.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError
from laconic.records import Record, append, read
from laconic_lab.faults.campaign import cases, run_case
from laconic_lab.faults.checkpoint_kills import KINDS, kill_checkpoints
from laconic_lab.faults.disk import PAGE
from laconic_lab.faults.idle_calls import IDLE_KINDS
from laconic_lab.faults.idle_phases import run_idle
from laconic_lab.faults.invariants import InvariantError
from laconic_lab.faults.packets import packet_pieces, packet_targets, run_packets
from laconic_lab.faults.soak import ROUND_S, soak

__all__ = ["PARTS", "TIERS", "PartSummary", "Tier", "latest", "run_tier", "summarise"]

CASES_PER_PIECE = 20
KILL_SHAPES = ((1, PAGE), (500, PAGE), (4096, PAGE), (25_000, PAGE), (8_000, 256), (60_000, PAGE))
"""Numbers of parameters, and bytes between two kills within a file."""
SOAK_EVERY = 10.0
"""Seconds between two faults of the soak."""
MOST_SLOWER = 1.1
"""The longest time of a step while a member leaves calls open, relative to a calm one."""

Piece = Mapping[str, Any]
"""What identifies a piece: its seed and the values of ``_KEYS``, in this order."""
Tell = Callable[[str, int, int], None]
"""Called with a part, what is done of it and its goal."""


@dataclass(frozen=True)
class Tier:
    """How much of each part a tier runs."""

    scenarios: int
    kills: int
    soak: int
    """Seconds."""
    idle: int
    """Kinds of calls that a member leaves open, while step times are compared."""
    packets: int


TIERS: Mapping[int, Tier] = {
    1: Tier(scenarios=60, kills=100, soak=60, idle=0, packets=0),
    2: Tier(scenarios=300, kills=500, soak=300, idle=4, packets=500_000),
    3: Tier(scenarios=1_120, kills=2_000, soak=1_800, idle=4, packets=10_000_000),
}
PARTS = ("scenarios", "kills", "soak", "idle", "packets")


@dataclass(frozen=True)
class PartSummary:
    """What the Records say about one part.

    Args:
        done: Scenarios, kills, kinds of idle calls, packets, or seconds of the longest soak that kept everything.
        broken: The violated invariants and the findings of the pieces' last Records, unless they were run again.
        repeated: Those of Records whose pieces were run again, each after its date.
        first, last: Times of the first and the last Record.
    """

    part: str
    done: int
    broken: tuple[str, ...]
    repeated: tuple[str, ...]
    first: str | None
    last: str | None


def summarise(records: Sequence[Record]) -> dict[str, PartSummary]:
    """Return a summary of each part."""
    return {part: _summary(part, found, records) for part, found in latest(records).items()}


def latest(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the Records that count: the last one of each piece, by part."""
    return {part: list(of_part.values()) for part, of_part in _latest(records).items()}


def _latest(records: Sequence[Record]) -> dict[str, dict[tuple[Any, ...], Record]]:
    """Return the last Record of each piece, by part."""
    latest: dict[str, dict[tuple[Any, ...], Record]] = {part: {} for part in PARTS}
    for record in records:
        part = record.kind.removeprefix("faults.")
        if part in latest:
            latest[part][tuple(_piece(part, record).values())] = record
    return latest


_KEYS = {
    "scenarios": ("first",), "kills": ("size", "page"), "soak": ("exchanges",), "idle": ("kind",),
    "packets": ("target", "isa"),
}  # fmt: skip
"""The values that identify a piece of a part, beside its seed."""


def _piece(part: str, record: Record) -> Piece:
    return {"seed": record.seed, **{name: record.values[name] for name in _KEYS[part]}}


def _summary(part: str, records: Sequence[Record], history: Sequence[Record] = ()) -> PartSummary:
    """Return the summary of the last Records of a part's pieces.

    Args:
        history: All Records, in which earlier ones of these pieces are looked up.
    """
    counts: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
        "scenarios": lambda values: values["count"],
        "kills": lambda values: sum(sum(values[kind].values()) for kind in KINDS if kind in values),
        "soak": lambda values: 0 if values["broken"] else int(values["seconds"]),
        "idle": lambda values: 1,
        "packets": lambda values: values.get("count", 0),
    }
    done = [counts[part](record.values) for record in records]
    unresolved = _unresolved(part, records)
    broken = [str(record.values["broken"]) for record in unresolved]
    open_ones = set(map(id, unresolved))
    earlier = [one for one in history if one.kind == f"faults.{part}" and id(one) not in open_ones]
    repeated = [f"{record.at[:10]}: {record.values['broken']}" for record in earlier if record.values["broken"]]
    times = sorted(record.at for record in records)
    return PartSummary(
        part, max(done, default=0) if part == "soak" else sum(done), tuple(broken), tuple(repeated),
        times[0] if times else None, times[-1] if times else None,
    )  # fmt: skip


def _unresolved(part: str, records: Sequence[Record]) -> list[Record]:
    """Return those of the pieces' last Records that are broken and were not run again.

    A soak is run again by a later one that kept everything for at least as many exchanges, whatever its seed.
    """
    broken = [record for record in records if record.values["broken"]]
    if part != "soak":
        return broken
    kept = [record for record in records if not record.values["broken"]]
    return [
        one for one in broken
        if not any(k.at > one.at and k.values["exchanges"] >= one.values["exchanges"] for k in kept)
    ]  # fmt: skip


def run_tier(
    tier: Tier, path: Path, parts: Sequence[str] = PARTS, *, tell: Tell = lambda part, done, goal: None, jobs: int = 1,
    limit_s: float | None = None,
) -> dict[str, PartSummary]:  # fmt: skip
    """Run what is missing of a tier and return the summary of its Records.

    Args:
        path: The file of Records, to which each piece appends one.
        parts: The parts to run, of ``PARTS``.
        jobs: Pieces of mutated packets that run at the same time; the other parts run one by one.
        limit_s: Seconds after which no further piece is started; those under way are finished.
    """
    end = time.monotonic() + limit_s if limit_s is not None else float("inf")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ConfigError(f"unknown part {unknown[0]!r}: expected one of {', '.join(PARTS)}")
    for part in parts:
        pieces = _wanted(part, getattr(tier, part), path, tell, end)
        _run_pieces(_RUNS[part], pieces, path, jobs if part == "packets" else 1)
    return summarise(_read(path))


def _wanted(part: str, goal: int, path: Path, tell: Tell, end: float) -> Iterator[Piece]:
    """Yield the broken pieces of a part, then missing ones until the Records reach the goal or the time is over.

    The goal of mutated packets is that of all readers together. A reader that was added after others had reached it is
    given a piece of its own.
    """
    found = _latest(_read(path))[part]
    broken = [_piece(part, record) for record in _unresolved(part, list(found.values()))]
    missing = (piece for piece in _PIECES[part](goal) if tuple(piece.values()) not in found)
    pieces = itertools.chain(broken, missing)
    unread = set(packet_targets()) - {target for _, target, _ in found} if part == "packets" and goal else set()
    for number in itertools.count():
        done = _summary(part, list(_latest(_read(path))[part].values())).done
        tell(part, min(done, goal), goal)
        reached = done >= goal and number >= len(broken)
        if (reached and not unread) or time.monotonic() >= end:
            return  # before the next piece is asked for: the first of mutated packets builds a core
        piece = next((piece for piece in pieces if not reached or piece["target"] in unread), None)
        if piece is None:
            return
        unread.discard(piece.get("target", ""))
        yield piece


def _run_pieces(run: Callable[[Piece], Record], pieces: Iterator[Piece], path: Path, jobs: int) -> None:
    """Run pieces, some at the same time, and append the Record of each as soon as it ends."""
    if jobs == 1:  # in this thread, which Ctrl-C interrupts
        for piece in pieces:
            append(run(piece), path)
        return
    running: set[Future[Record]] = set()
    failure: Exception | None = None
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            for piece in itertools.islice(pieces, jobs - len(running) if failure is None else 0):
                running.add(pool.submit(run, piece))
            if not running:
                break
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for one in ended:
                try:
                    append(one.result(), path)
                except Exception as error:  # the Records of the others are still wanted
                    failure = failure or error
    if failure is not None:
        raise failure


def _read(path: Path) -> list[Record]:
    return read(path) if path.exists() else []


# ------------------------------------------------------------------------------------------------------------ pieces


def _scenario_pieces(goal: int) -> Iterator[Piece]:
    for first in range(0, goal, CASES_PER_PIECE):
        yield {"seed": 0, "first": first}


def _run_scenarios(piece: Piece) -> Record:
    first = piece["first"]
    chosen = cases(first + CASES_PER_PIECE)[first:]
    outcomes = [run_case(case) for case in chosen]
    broken = [asdict(outcome) for outcome in outcomes if outcome.broken is not None]
    values = {
        "first": first,
        "count": len(outcomes),
        "seconds": sum(outcome.seconds for outcome in outcomes),
        **{f"{name}s": dict(Counter(map(attrgetter(name), outcomes))) for name in ("fault", "mode", "method")},
        "broken": broken,
    }
    return Record("faults.scenarios", values, seed=piece["seed"])


def _kill_pieces(goal: int) -> Iterator[Piece]:
    for seed in itertools.count():
        for size, page in KILL_SHAPES:
            yield {"seed": 100_000 * seed, "size": size, "page": page}


def _run_kills(piece: Piece) -> Record:
    memory = Path("/dev/shm")  # thousands of files are synced
    values: dict[str, Any] = {"size": piece["size"], "page": piece["page"], "broken": None}
    with tempfile.TemporaryDirectory(prefix="laconic-kills-", dir=memory if memory.is_dir() else None) as folder:
        try:
            (counts,) = kill_checkpoints(Path(folder), [piece["size"]], page=piece["page"], seed=piece["seed"])
            values |= {kind: counts[kind] for kind in KINDS}
        except InvariantError as error:
            values["broken"] = str(error)
    return Record("faults.kills", values, seed=piece["seed"])


def _soak_pieces(goal: int) -> Iterator[Piece]:
    if goal:
        yield {"seed": 0, "exchanges": round(goal / ROUND_S)}


def _run_soak(piece: Piece) -> Record:
    outcome = soak(piece["exchanges"] * ROUND_S, every=SOAK_EVERY, seed=piece["seed"])
    return Record("faults.soak", asdict(outcome), seed=piece["seed"])


def _idle_pieces(goal: int) -> Iterator[Piece]:
    for kind in list(IDLE_KINDS)[:goal]:
        yield {"seed": 0, "kind": kind}


def _run_idle(piece: Piece) -> Record:
    outcome = run_idle(piece["kind"])
    values = asdict(outcome) | {"slower": outcome.slower}
    if outcome.broken is None and outcome.slower > MOST_SLOWER:
        values["broken"] = (
            f"a step took {outcome.slower - 1:+.0%} beside {outcome.kind} calls, at most {MOST_SLOWER - 1:.0%} may be"
        )
    return Record("faults.idle", values, seed=piece["seed"])


_PIECES: Mapping[str, Callable[[int], Iterator[Piece]]] = {
    "scenarios": _scenario_pieces, "kills": _kill_pieces, "soak": _soak_pieces, "idle": _idle_pieces,
    "packets": packet_pieces,
}  # fmt: skip
_RUNS: Mapping[str, Callable[[Piece], Record]] = {
    "scenarios": _run_scenarios, "kills": _run_kills, "soak": _run_soak, "idle": _run_idle,
    "packets": run_packets,
}  # fmt: skip
