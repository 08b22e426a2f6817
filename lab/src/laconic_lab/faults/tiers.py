"""Tiers of the fault campaign: scenarios, kills of checkpoints, a soak, idle calls and mutated packets, in pieces.

Each piece ends with a Record in one file. A later call reads the file and runs what is missing; pieces whose last
Record shows a violated invariant are run again.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import laconic_lab
from laconic.errors import ConfigError, LaconicError
from laconic.records import Record, append, read
from laconic_lab.faults.campaign import cases, run_case
from laconic_lab.faults.checkpoint_kills import KINDS, kill_checkpoints
from laconic_lab.faults.disk import PAGE
from laconic_lab.faults.idle_calls import IDLE_KINDS
from laconic_lab.faults.idle_phases import run_idle
from laconic_lab.faults.invariants import InvariantError
from laconic_lab.faults.soak import ROUND_S, soak

__all__ = ["PARTS", "TIERS", "PartSummary", "Tier", "latest", "run_tier", "summarise"]

CASES_PER_PIECE = 20
KILL_SHAPES = ((1, PAGE), (500, PAGE), (4096, PAGE), (25_000, PAGE), (8_000, 256), (60_000, PAGE))
"""Numbers of parameters, and bytes between two kills within a file."""
SOAK_EVERY = 10.0
"""Seconds between two faults of the soak."""
PACKETS_PER_PIECE = 200_000
"""Mutated packets of one target and seed; a twentieth for slow targets."""
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")

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
        broken: The violated invariants and the findings of the pieces' last Records.
        first, last: Times of the first and the last Record.
    """

    part: str
    done: int
    broken: tuple[str, ...]
    first: str | None
    last: str | None


def summarise(records: Sequence[Record]) -> dict[str, PartSummary]:
    """Return a summary of each part."""
    return {part: _summary(part, of_part) for part, of_part in latest(records).items()}


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


def _summary(part: str, records: list[Record]) -> PartSummary:
    counts: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
        "scenarios": lambda values: values["count"],
        "kills": lambda values: sum(sum(values[kind].values()) for kind in KINDS if kind in values),
        "soak": lambda values: 0 if values["broken"] else int(values["seconds"]),
        "idle": lambda values: 1,
        "packets": lambda values: values.get("count", 0),
    }
    done = [counts[part](record.values) for record in records]
    broken = [str(record.values["broken"]) for record in records if record.values["broken"]]
    times = sorted(record.at for record in records)
    return PartSummary(
        part, max(done, default=0) if part == "soak" else sum(done), tuple(broken), times[0] if times else None,
        times[-1] if times else None,
    )  # fmt: skip


def run_tier(
    tier: Tier, path: Path, parts: Sequence[str] = PARTS, *, tell: Tell = lambda part, done, goal: None, jobs: int = 1
) -> dict[str, PartSummary]:
    """Run what is missing of a tier and return the summary of its Records.

    Args:
        path: The file of Records, to which each piece appends one.
        parts: The parts to run, of ``PARTS``.
        jobs: Pieces of mutated packets that run at the same time; the other parts run one by one.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ConfigError(f"unknown part {unknown[0]!r}: expected one of {', '.join(PARTS)}")
    for part in parts:
        goal = getattr(tier, part)
        finished = _latest(_read(path))[part]
        for record in [record for record in finished.values() if record.values["broken"]]:
            append(_RUNS[part](_piece(part, record)), path)
        pieces = (piece for piece in _PIECES[part](goal) if tuple(piece.values()) not in finished)
        together = jobs if part == "packets" else 1
        while True:
            done = _summary(part, list(_latest(_read(path))[part].values())).done
            tell(part, min(done, goal), goal)
            some = list(itertools.islice(pieces, together)) if done < goal else []
            if not some:
                break
            if together == 1:  # in this thread, which Ctrl-C interrupts
                append(_RUNS[part](some[0]), path)
                continue
            with ThreadPoolExecutor(together) as pool:
                for ended in as_completed([pool.submit(_RUNS[part], piece) for piece in some]):
                    append(ended.result(), path)
    return summarise(_read(path))


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
    return Record("faults.idle", asdict(outcome) | {"slower": outcome.slower}, seed=piece["seed"])


def _packet_pieces(goal: int) -> Iterator[Piece]:
    if not goal:
        return
    sets = [isa for isa in INSTRUCTION_SETS if _output("-c", "import laconic._core as c; print(c.isa)", isa=isa) == isa]
    targets = _output(str(_checkout() / "fuzz" / "run.py"), "--list").split()
    _sanitized("build")
    for seed in itertools.count():
        for target in targets:
            yield {"seed": seed, "target": target, "isa": sets[seed % len(sets)]}


def _output(*arguments: str, isa: str = "") -> str:
    """Return what Python prints with an instruction set of the core."""
    command = [sys.executable, *(["-S"] if sys.flags.no_site else []), *arguments]
    environment = os.environ | ({"LACONIC_ISA": isa} if isa else {})
    return subprocess.run(command, capture_output=True, text=True, env=environment).stdout.strip()


def _checkout() -> Path:
    root = Path(laconic_lab.__file__).resolve().parents[3]
    if not (root / "tools" / "asan.sh").is_file():
        raise ConfigError(f"mutated packets need a checkout of the repository: there is no tools/asan.sh in {root}")
    return root


def _sanitized(*arguments: str, isa: str = "baseline") -> str:
    """Build a core with sanitizers, or run something on the one that was built; return what was printed."""
    environment = os.environ | {"LACONIC_ISAS": isa, "LACONIC_ASAN_KEEP": "" if arguments == ("build",) else "1"}
    environment.pop("PYTHONPATH", None)
    command = ["bash", "tools/asan.sh", *arguments]
    done = subprocess.run(command, cwd=_checkout(), env=environment, capture_output=True, text=True)
    if done.returncode and not done.stdout:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise LaconicError(f"tools/asan.sh {' '.join(arguments)} ended with {done.returncode}: {last}")
    return done.stdout


def _run_packets(piece: Piece) -> Record:
    """Run a fuzz target on a core built with sanitizers."""
    options = ("--json", "--count", str(PACKETS_PER_PIECE), "--seed", str(piece["seed"]))
    output = _sanitized("fuzz", *options, piece["target"], isa=piece["isa"])
    answers = [line for line in output.splitlines() if line.startswith("{")]
    if not answers:
        raise LaconicError(f"tools/asan.sh fuzz {piece['target']} printed no result but {output[-200:]!r}")
    values = json.loads(answers[-1])
    failed = values.pop("exit_code")
    values["broken"] = f"{values.get('findings', 0)} findings, exit code {failed}" if failed else None
    return Record("faults.packets", values, seed=values.pop("seed"))


_PIECES: Mapping[str, Callable[[int], Iterator[Piece]]] = {
    "scenarios": _scenario_pieces, "kills": _kill_pieces, "soak": _soak_pieces, "idle": _idle_pieces,
    "packets": _packet_pieces,
}  # fmt: skip
_RUNS: Mapping[str, Callable[[Piece], Record]] = {
    "scenarios": _run_scenarios, "kills": _run_kills, "soak": _run_soak, "idle": _run_idle,
    "packets": _run_packets,
}  # fmt: skip
