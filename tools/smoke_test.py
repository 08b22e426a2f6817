"""Run every command of an installed laconic in an empty folder: ``PYTHON tools/smoke_test.py``.

A program of its own: run it by the Python of any environment that has laconic, such as one with nothing but a wheel in
it. Every command must end well, or say in one line which missing package to install; the C++ core must code known data
into known bytes. The last line is a JSON object with the seconds of ``import laconic``, the bytes of the installed
files and the version of torch. Without torch most commands can only say what to install; the core is tested all the
same. Exits with 1 if anything failed.
"""

from __future__ import annotations

import hashlib
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


GRPC, CERTIFICATES, LAB = ("grpc",), ("cryptography",), ("laconic_lab",)


@dataclass(frozen=True)
class Case:
    """Words after ``laconic``, and the modules without which the command may only say what to install.

    Commands also need torch unless ``torch`` is false.
    """

    words: str
    needs: tuple[str, ...] = ()
    torch: bool = True

    @property
    def missing(self) -> list[str]:
        return [module for module in (*self.needs, *("torch",) * self.torch) if find_spec(module) is None]


CASES = (
    Case("--version", torch=False),
    Case("codecs --json"),
    Case("pack model.safetensors -o model.lac --codec uniform:8|rans"),
    Case("unpack model.lac --list"),
    Case("unpack model.lac -o again.safetensors"),
    Case("plan --model vgg11 --workers 4 --bandwidth 1gbit --json"),
    Case("tune --model mlp --data digits --steps 10 --codec qsgd:4 --bandwidth 10mbit"),
    Case("calibrate -o machine.json --model mlp --codec qsgd:4 --quick"),
    Case("report finished -o finished.html"),
    Case("watch finished --once", torch=False),
    Case("train --method 5 --explain"),
    Case("train --method laconic --model mlp --iterations 10 --run-dir trained", GRPC),
    Case("train --method 5 --iterations 5 --run-dir prepared --prepare"),
    Case("server prepared --help", torch=False),
    Case("worker prepared --help", torch=False),
    Case("server absent", GRPC),
    Case("worker absent --worker 0", GRPC),
    Case("demo --methods 1,5 --iterations 5 --run-dir demos --html demo.html", GRPC),
    Case("certs new certificates --job smoke --host 127.0.0.1 --workers 1", CERTIFICATES, torch=False),
    Case("bench qsgd:4 --quick --no-peers", LAB),
    Case("study jang2017 --help", LAB),
    Case("lab faults --list", LAB),
)
CODINGS = ("huffman", "rans")
DIGESTS = {"huffman": "2b5956c5b7833d12", "rans": "5054af9e32ee45fb", "qsgd": "d50f34e66046338f"}
"""First half of the SHA-256 of what the core writes for known data: the same for every Python and instruction set."""
FAILS = {"server absent", "worker absent --worker 0"}
"""Commands that end with an error of one line in every environment."""


def main() -> int:
    import_s = min(_import_seconds() for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        _write_inputs()
        problems = [problem for problem in (_problem(case) for case in CASES) if problem]
        problems += _commands_without_case() + core_problems()
        os.chdir("/")
    for problem in problems:
        print(problem, file=sys.stderr)
    results = {
        "python": sys.version.split()[0], "commands": len(CASES), "failed": len(problems),
        "import_s": round(import_s, 4), "torch": _version("torch"),
        "installed_bytes": {name: _installed_bytes(name) for name in ("laconic", "laconic-lab")},
    }  # fmt: skip
    print(json.dumps(results))
    return int(bool(problems))


def _import_seconds() -> float:
    """Return the seconds of ``import laconic`` in a process of its own."""
    program = "import time; begin = time.perf_counter(); import laconic; print(time.perf_counter() - begin)"
    return float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout)


def _write_inputs() -> None:
    import numpy as np
    from safetensors.numpy import save_file

    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    save_file({"layer.weight": weights}, "model.safetensors")
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
    missing = case.missing
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


def core_problems() -> list[str]:
    """Run coders of the C++ core on known data, by addresses as laconic does; return what is wrong with their bytes."""
    import numpy as np

    from laconic import _core

    problems = []
    if _core.crc32c_of(b"123456789") != 0xE3069283:  # the check value of CRC-32C
        problems.append(f"the core's CRC-32C of '123456789' is {_core.crc32c_of(b'123456789'):#x}, not 0xe3069283")
    mixed = np.arange(1, 100_001, dtype=np.uint32) * np.uint32(2654435761)  # numpy's own generators may change
    symbols = np.minimum(mixed >> 28, mixed >> 20 & 15).astype(np.uint8)
    coded = np.empty(_core.coded_max_nbytes(symbols.size, 16), np.uint8)
    for coding, name in enumerate(CODINGS):
        nbytes = _core.encode_symbols(symbols.ctypes.data, symbols.size, 16, coding, coded.ctypes.data, 2)
        again = np.empty_like(symbols)
        valid = _core.decode_symbols(coded.ctypes.data, nbytes, symbols.size, 16, again.ctypes.data, 2)
        if not valid or not np.array_equal(symbols, again):
            problems.append(f"the core does not decode the {name} code that it wrote")
        problems += _digest_problem(name, coded[:nbytes].tobytes())
    x = (mixed[:10_000] >> 8).astype(np.float32) / np.float32(2**24) - np.float32(0.5)
    norms, packed = np.empty(-(-x.size // 512), np.float32), np.empty(x.size // 2, np.uint8)
    _core.qsgd_encode(
        x.ctypes.data, x.size, 4, 512, False, True, 1234, norms.ctypes.data, packed.ctypes.data, 2
    )  # fmt: skip
    problems += _digest_problem("qsgd", norms.tobytes() + packed.tobytes())
    return problems


def _digest_problem(name: str, data: bytes) -> list[str]:
    found = hashlib.sha256(data).hexdigest()[:16]
    return [] if found == DIGESTS[name] else [f"{name}: the core wrote bytes with SHA-256 {found}, not {DIGESTS[name]}"]


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


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
