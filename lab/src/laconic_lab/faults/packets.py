"""Mutated packets through every reader of bytes, on a core built with sanitizers; needs a checkout of the repository.

A piece is one fuzz target with one seed and one instruction set. The goal of a tier is the number of packets of all
targets together: seed by seed, each fast target reads ``PACKETS_PER_PIECE`` and each slow one a twentieth of it.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import laconic_lab
from laconic.errors import ConfigError, LaconicError
from laconic.records import Record

__all__ = ["PACKETS_PER_PIECE", "packet_pieces", "packet_targets", "run_packets"]

PACKETS_PER_PIECE = 200_000
"""Mutated packets of one target and seed; a twentieth for slow targets."""


def packet_targets() -> list[str]:
    """Return the names of the readers that can be given packets."""
    return _output([sys.executable, str(_checkout() / "fuzz" / "run.py"), "--list"]).split()


def packet_pieces(goal: int) -> Iterator[Mapping[str, Any]]:
    """Yield what identifies each piece, without end: the caller stops at its goal."""
    if not goal:
        return
    targets = packet_targets()
    _sanitized("build")
    sets = _sanitized("isas").split()
    for seed in itertools.count():
        for target in targets:
            yield {"seed": seed, "target": target, "isa": sets[seed % len(sets)]}


def run_packets(piece: Mapping[str, Any]) -> Record:
    """Run a fuzz target on the core that ``packet_pieces`` has built."""
    target, seed, isa = piece["target"], str(piece["seed"]), piece["isa"]
    # A folder of its own: another seed of this target may run at the same time.
    work = _checkout() / "build" / "fuzz" / f"{isa}-{seed}"
    options = ("--json", "--count", str(PACKETS_PER_PIECE), "--seed", seed, "--work", str(work))
    output = _sanitized("fuzz", *options, target, isa=isa)
    # A target that fails also prints the end of its log, with counts of its own.
    answers = [line for line in output.splitlines() if line.startswith("{") and '"exit_code"' in line]
    if not answers:
        raise LaconicError(f"tools/asan.sh fuzz {target} printed no result but {output[-200:]!r}")
    values = json.loads(answers[-1])
    failed = values.pop("exit_code")
    values["broken"] = f"{values.get('findings', 0)} findings, exit code {failed}" if failed else None
    return Record("faults.packets", values, seed=values.pop("seed"))


def _checkout() -> Path:
    root = Path(laconic_lab.__file__).resolve().parents[3]
    if not (root / "tools" / "asan.sh").is_file():
        raise ConfigError(f"mutated packets need a checkout of the repository: there is no tools/asan.sh in {root}")
    return root


def _sanitized(*arguments: str, isa: str = "") -> str:
    """Build a core with sanitizers, or run something on the one that was built; return what was printed."""
    environment = dict(os.environ) if arguments == ("build",) else os.environ | {"LACONIC_ASAN_KEEP": "1"}
    environment |= {"LACONIC_ISAS": isa} if isa else {}
    environment.setdefault("LACONIC_PYTHON", sys.executable)
    environment.pop("PYTHONPATH", None)
    return _output(["bash", "tools/asan.sh", *arguments], environment)


def _output(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=_checkout(), env=environment, capture_output=True, text=True)
    if done.returncode and not done.stdout:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise LaconicError(f"{' '.join(command)} ended with {done.returncode}: {last}")
    return done.stdout
