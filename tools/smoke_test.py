"""Run every command of an installed laconic in an empty folder: ``PYTHON tools/smoke_test.py``.

A program of its own: run it by the Python of any environment that has laconic, such as one with nothing but a wheel in
it. Every command must end well, or say in one line which missing package to install. The last line is a JSON object
with the seconds of ``import laconic`` and the bytes of the installed files. Exits with 1 if a command failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

TIMEOUT_S = 900
RUN = {
    "method": "1", "model": "mlp", "data": "digits", "workers": 2, "servers": 1, "iterations": 20, "accuracy": 90.0,
    "wire_bytes_per_iteration": 1000.0, "compute_s": 1.0, "communication_s": 1.0, "total_s": 2.0,
}  # fmt: skip
"""Summary of a run, for commands that only read: they work without gRPC."""


@dataclass(frozen=True)
class Case:
    """Words after ``laconic``, and the modules without which the command may only say what to install."""

    words: str
    needs: tuple[str, ...] = ()


GRPC, CERTIFICATES, LAB = ("grpc",), ("cryptography",), ("laconic_lab",)
CASES = (
    Case("--version"),
    Case("codecs --json"),
    Case("pack model.safetensors -o model.lac --codec uniform:8|rans"),
    Case("unpack model.lac --list"),
    Case("unpack model.lac -o again.safetensors"),
    Case("plan --model vgg11 --workers 4 --bandwidth 1gbit --json"),
    Case("tune --model mlp --data digits --steps 10 --codec qsgd:4 --bandwidth 10mbit"),
    Case("calibrate -o machine.json --model mlp --codec qsgd:4 --quick"),
    Case("report finished -o finished.html"),
    Case("watch finished --once"),
    Case("train --method 5 --explain"),
    Case("train --method laconic --model mlp --iterations 10 --run-dir trained", GRPC),
    Case("train --method 5 --iterations 5 --run-dir prepared --prepare"),
    Case("server prepared --help"),
    Case("worker prepared --help"),
    Case("server absent", GRPC),
    Case("worker absent --worker 0", GRPC),
    Case("demo --methods 1,5 --iterations 5 --run-dir demos --html demo.html", GRPC),
    Case("certs new certificates --job smoke --host 127.0.0.1 --workers 1", CERTIFICATES),
    Case("bench qsgd:4 --quick --no-peers", LAB),
    Case("study jang2017 --help", LAB),
    Case("lab faults --list", LAB),
)
FAILS = {"server absent", "worker absent --worker 0"}
"""Commands that end with an error of one line in every environment."""


def main() -> int:
    import_s = min(_import_seconds() for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        _write_inputs()
        problems = [problem for problem in (_problem(case) for case in CASES) if problem]
        problems += _commands_without_case()
        os.chdir("/")
    for problem in problems:
        print(problem, file=sys.stderr)
    results = {
        "python": sys.version.split()[0], "commands": len(CASES), "failed": len(problems),
        "import_s": round(import_s, 4),
        "installed_bytes": {name: _installed_bytes(name) for name in ("laconic", "laconic-lab")},
    }  # fmt: skip
    print(json.dumps(results))
    return int(bool(problems))


def _import_seconds() -> float:
    """Return the seconds of ``import laconic`` in a process of its own."""
    program = "import time; begin = time.perf_counter(); import laconic; print(time.perf_counter() - begin)"
    return float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout)


def _write_inputs() -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"layer.weight": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}, "model.safetensors")
    Path("finished").mkdir()
    Path("finished/config.json").write_text("{}")
    Path("finished/summary.json").write_text(json.dumps(RUN))


def _problem(case: Case) -> str | None:
    """Run the command; return what is wrong with how it ended."""
    begin = time.perf_counter()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "laconic", *case.words.split()],
            capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"FAIL {TIMEOUT_S:5.1f} s  laconic {case.words}", flush=True)
        return f"laconic {case.words}: expected an end within {TIMEOUT_S} s"
    missing = [module for module in case.needs if find_spec(module) is None]
    errors = done.stderr.strip().splitlines()
    if missing or case.words in FAILS:
        well = done.returncode in (1, 2) and len(errors) == 1 and (not missing or "pip install" in errors[0])
    else:
        well = done.returncode == 0
    print(f"{'ok  ' if well else 'FAIL'} {time.perf_counter() - begin:5.1f} s  laconic {case.words}", flush=True)
    if well:
        return None
    wanted = f"one line that says how to install {', '.join(missing)}" if missing else "exit code 0"
    return f"laconic {case.words}: expected {wanted}, got exit code {done.returncode} and {done.stderr[-2000:]!r}"


def _commands_without_case() -> list[str]:
    from typer.main import get_command

    from laconic.cli.app import app

    names = set(getattr(get_command(app), "commands", {}))
    tried = {case.words.split()[0] for case in CASES}
    return [f"no case runs `laconic {name}`: add one to {__file__}" for name in sorted(names - tried)]


def _installed_bytes(name: str) -> int | None:
    """Return the bytes of a distribution's files, its bytecode left out; None where it is not installed."""
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in paths if path.exists())


if __name__ == "__main__":
    sys.exit(main())
