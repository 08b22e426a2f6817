"""One target, one process: by atheris, or without it (``--blind``). ``run.py`` starts this and reads what it prints."""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import logging
import mmap
import random
import resource
import sys
import time
import types
from pathlib import Path
from typing import Any

from run import STARTED

MAX_LEN = 1 << 14
HANG = 10
"""Seconds by the clock after which libFuzzer gives an input up; of processor time an input has a second."""
ROOM = 2 << 30
"""Bytes of address space beside what the process has when it begins: a claim of more fails at once, not by swapping."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("work", type=Path, help="a folder for seeds, corpus and findings")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--count", type=int, help="with --blind: that many mutations instead, of the seeds alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rss-mb", type=int, default=2048)
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--sanitized", action="store_true", help="no limits of memory, and five times as long")
    args = parser.parse_args()
    print(STARTED, flush=True)
    run = _blindly if args.blind else _guided
    run(args)


def _prepared(args: argparse.Namespace) -> tuple[Any, Any, list[bytes]]:
    """The target, ready: its seeds are written and taken, so that whatever is loaded on first use has been."""
    targets = importlib.import_module("targets")
    importlib.import_module("torch").set_num_threads(1)
    logging.getLogger("laconic").setLevel(logging.CRITICAL)  # what is refused is logged; millions of lines help nobody
    target = targets.TARGETS[args.target]
    seeds = target.seeds()
    for name in ("seeds", "corpus", "findings"):
        (args.work / name).mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (args.work / "seeds" / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
        target.check(seed)
    if args.sanitized:
        targets.MAX_SECONDS, targets.MAX_GROWTH = 5 * targets.MAX_SECONDS, 1 << 40
        targets.REFERENCE_SHARE = 16
    else:
        with Path("/proc/self/statm").open() as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return targets, target, seeds


def _guided(args: argparse.Namespace) -> None:
    import atheris

    targets, target, _ = _prepared(args)
    # Not by atheris' import hook, which an editable install's own loader passes by.
    for thing in gc.get_objects():
        if isinstance(thing, types.FunctionType) and (thing.__module__ or "").partition(".")[0] == "laconic":
            atheris.instrument_func(thing)

    def look(data: bytes) -> None:
        try:
            targets.guarded(target, data)
        except BaseException:  # libFuzzer writes it down, too, as long as it lives
            _keep(data, args.work)
            raise

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        bent = target.bend(data, random.Random(seed), atheris.Mutate, max_size)
        return bent if 0 < len(bent) <= max_size else atheris.Mutate(data, max_size)

    options = {
        "max_total_time": args.seconds,
        "max_len": MAX_LEN,
        "timeout": HANG,
        "rss_limit_mb": args.rss_mb,
        "seed": args.seed + 1,  # 0 would be drawn
        "artifact_prefix": f"{args.work / 'findings'}/",
        "print_final_stats": 1,
    }
    flags = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup(
        [sys.argv[0], *flags, str(args.work / "corpus"), str(args.work / "seeds")],
        look,
        custom_mutator=mutator,
    )
    atheris.Fuzz()


def _blindly(args: argparse.Namespace) -> None:
    """Run a target on mutations of the seeds, and of what guided runs have found, without coverage."""
    targets, target, seeds = _prepared(args)
    bend = importlib.import_module("bend")
    rng = random.Random(args.seed)
    scramble = bend.blind(rng)
    corpus = [] if args.count else sorted((args.work / "corpus").iterdir())
    known = seeds + [path.read_bytes() for path in corpus]
    current = _Current(args.work / "current")
    count = taken = findings = 0
    end = time.monotonic() + args.seconds

    def inputs() -> Any:
        if not args.count:  # the same count and seed must give the same inputs
            yield from known
        while count < args.count if args.count else time.monotonic() < end:
            data = rng.choice(known)
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                data = target.bend(data, rng, scramble, MAX_LEN)
            yield data

    for data in inputs():
        current.write(data)
        count += 1
        try:
            taken += targets.guarded(target, data)
        except Exception as error:  # whatever it is, it is a finding
            findings += 1
            path = _keep(data, args.work)
            print(f"{args.target}: {path}: {type(error).__name__}: {error}", file=sys.stderr)
    current.close()
    print(json.dumps({"count": count, "taken": taken, "known": len(known), "findings": findings}))
    sys.exit(1 if findings else 0)


class _Current:
    """The input under way, in a file that a crash of the core leaves behind; a mapped one, because files are slow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(bytes(4 + 2 * MAX_LEN))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def write(self, data: bytes) -> None:
        if len(data) + 4 > len(self._map):
            self._map.resize(4 + 2 * len(data))
        self._map[: 4 + len(data)] = len(data).to_bytes(4, "little") + data

    def close(self) -> None:
        self._map.close()
        self._path.unlink(missing_ok=True)


def _keep(data: bytes, work: Path) -> Path:
    path = work / "findings" / f"crash-{hashlib.sha1(data).hexdigest()}"
    path.write_bytes(data)
    return path


if __name__ == "__main__":
    main()
