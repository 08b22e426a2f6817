"""Fuzz every target for a while, or some of them, and say what came of it: ``python fuzz/run.py --seconds 60 lac``.

Seeds, corpus and findings are kept in build/fuzz/<target>; a later run goes on from the corpus. Ends with 1 when there
are findings. ``--replay FILE`` runs one input and shows the traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HOURS = 7200
"""The most seconds of a target whose inputs are counted."""
STARTED = "the process has started"
"""What one.py prints first. The memory of sanitizers may overlap that of the interpreter, which then ends before."""
HERE = Path(__file__).resolve().parent
COVERAGE = re.compile(r"^#(\d+)\s+(INITED|DONE).*? cov: (\d+) ft: (\d+) corp: (\d+)", re.MULTILINE)
NAMES = (
    "parser", "decode-casts", "decode-quantizers", "decode-lanes", "decode-adaptive", "decode-selectors",
    "decode-coders", "sums", "aggregate", "explain", "lac", "checkpoint", "messages", "server",
    "pipeline", "transform", "states", "files",
)  # fmt: skip

SLOW = {"lac", "checkpoint", "server", "states", "files"}
"""Targets that write files, or build a server or a model, for every input."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--count",
        type=int,
        help="with --blind: that many mutations of each target instead of a time; slow targets get a twentieth",
    )
    parser.add_argument("--json", action="store_true", help="with --count: print a JSON object for each target")
    parser.add_argument("--work", type=Path, default=HERE.parent / "build" / "fuzz")
    parser.add_argument("--blind", action="store_true", help="without atheris")
    parser.add_argument("--preload", help="for a core built with sanitizers: their libraries, loaded first")
    parser.add_argument(
        "--starts", type=int, default=1, help="with --preload: how often a process may end before it reads anything"
    )
    parser.add_argument("--list", action="store_true", help="print the names of all targets and exit")
    parser.add_argument("--replay", type=Path, help="an input, for the one target named")
    args = parser.parse_args()
    for name in args.targets:
        if name not in NAMES:
            parser.error(f"no target {name!r}; there are {', '.join(NAMES)}")
    if args.list:
        print("\n".join(NAMES))
        return 0
    if args.replay is not None:
        return replay(args.targets, args.replay)
    failed = [name for name in args.targets or NAMES if not fuzz(name, args)]
    if failed:
        print(f"findings in {', '.join(failed)}: see {args.work}/<target>/findings and log")
    return 1 if failed else 0


def replay(names: list[str], path: Path) -> int:
    import targets

    for name in names or NAMES:
        taken = targets.guarded(targets.TARGETS[name], path.read_bytes())
        print(f"{name}: {'taken' if taken else 'refused'}")
    return 0


def fuzz(name: str, args: argparse.Namespace) -> bool:
    """Whether a target stood its time; prints a line about it."""
    work = args.work / name
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *(["-S"] if sys.flags.no_site else []), str(HERE / "one.py"), name, str(work)]
    command += ["--seconds", str(args.seconds), "--seed", str(args.seed)]
    if args.count is not None:
        command += ["--count", str(max(1, args.count // (20 if name in SLOW else 1)))]
    command += [flag for flag, asked in (("--blind", args.blind), ("--sanitized", args.preload)) if asked]
    environment = os.environ | ({"LD_PRELOAD": args.preload} if args.preload else {})
    began = time.monotonic()
    timeout = HOURS if args.count is not None else 10 * args.seconds + 300
    for _ in range(args.starts):
        with (work / "log").open("w+") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=timeout, env=environment)
            log.seek(0)
            text = log.read()
        if STARTED in text:
            break
    else:  # nothing was read, so that this says nothing about the target
        raise SystemExit(f"{name}: its process did not start and ended with {done.returncode}: {text[-300:]!r}")
    seconds = time.monotonic() - began
    if args.json:
        counts = json.loads(text.splitlines()[-1]) if text.rstrip().endswith("}") else {}
        print(json.dumps({
            "target": name, "seed": args.seed, "isa": os.environ.get("LACONIC_ISA"), "seconds": seconds,
            "exit_code": done.returncode, **counts,
        }), flush=True)  # fmt: skip
    if done.returncode:
        current = work / "current"
        if current.exists():  # see one.py: the length, then the bytes
            held = current.read_bytes()
            (work / "findings" / f"died-{int(time.time())}").write_bytes(
                held[4 : 4 + int.from_bytes(held[:4], "little")]
            )
            current.unlink()
        print(f"{name}: FAILED with {done.returncode} after {seconds:.0f} s; the end of {work / 'log'}:")
        print("\n".join(text.splitlines()[-25:]), flush=True)
        return False
    if not args.json:
        print(f"{name}: {_summary(text)}, {seconds:.0f} s", flush=True)
    return True


def _summary(text: str) -> str:
    by_stage = {stage: numbers for *numbers, stage in ((a, c, f, n, s) for a, s, c, f, n in COVERAGE.findall(text))}
    if "DONE" in by_stage:
        first, last = by_stage.get("INITED", by_stage["DONE"]), by_stage["DONE"]
        return f"{last[0]} inputs, edges {first[1]} -> {last[1]}, features {first[2]} -> {last[2]}, corpus {last[3]}"
    counts = json.loads(text.splitlines()[-1])
    return f"{counts['count']} inputs, {counts['taken']} taken, {counts['known']} known before"


if __name__ == "__main__":
    sys.exit(main())
