"""Every command at 80 columns, without colour, in ASCII and without extras prints its golden text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from golden_outputs import ENVIRONMENT

from laconic.cli.extras import EXTRAS, OTHERS, advice_for

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOLDEN = HERE / "golden"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what the commands print, by the name of the file."""
    folder = tmp_path_factory.mktemp("outputs")
    environment = {**os.environ, **ENVIRONMENT}
    subprocess.run([sys.executable, HERE / "golden_outputs.py", folder], check=True, env=environment, timeout=240)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_commands_print_the_golden_text(outputs: dict[str, str]) -> None:
    golden = {path.name: path.read_text(encoding="utf-8") for path in GOLDEN.glob("*.txt")}
    different = [name for name in outputs.keys() | golden.keys() if outputs.get(name) != golden.get(name)]
    assert not different, "if that was intended: make golden, then look at the difference"


def test_commands_end_without_traceback_and_say_what_to_install(outputs: dict[str, str]) -> None:
    for name, text in outputs.items():
        *lines, code = text.splitlines()
        errors = [line for line in lines if line.startswith("stderr: ")]
        assert code in ("exit code 0", "exit code 2"), text
        assert "Traceback" not in text and len(errors) <= 1, text
        assert "No module named" not in text, text
        if code == "exit code 2" and name.split("-")[0] in ("server", "worker", "certs", "demo"):
            assert "pip install 'laconic[" in errors[0], text


def test_outputs_fit_80_columns_of_ascii(outputs: dict[str, str]) -> None:
    for text in outputs.values():
        assert text.isascii(), text
        for line in text.splitlines():
            if not line.startswith(("$ ", "stderr: ", "laconic ")):  # command lines and errors are one line each
                assert len(line) <= 80, line
        assert "<bool>" not in text and "[default: (" not in text and "?." not in text


def test_every_extra_for_users_is_known() -> None:
    """An extra that is not listed would have no advice, and would not be hidden from the commands above."""
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = dict(re.findall(r"^(\w+) = \[(.*?)\]$", section, re.DOTALL | re.MULTILINE))
    packages = {extra: set(re.findall(r'"([\w-]+)', text)) for extra, text in extras.items()}
    modules = {"grpcio": "grpc", "prometheus-client": "prometheus_client"}
    of_users = packages.keys() - {"dev", "fuzz"}
    assert {extra: {modules.get(name, name) for name in packages[extra]} for extra in of_users} == {
        extra: set(names) for extra, names in EXTRAS.items()
    }


def test_missing_dependency_of_laconic_itself_is_named() -> None:
    """`pip install --no-deps`, which leaves an installed torch alone, also leaves out what is missing."""
    missing = ModuleNotFoundError("No module named 'torch'", name="torch.distributed")
    assert advice_for(missing) == "this command needs the package torch: pip install torch"
    assert advice_for(ModuleNotFoundError("No module named 'mine'", name="mine")) is None


@pytest.mark.slow
def test_commands_in_an_environment_without_extras(tmp_path: Path) -> None:
    """In a virtual environment that has what a bare installation brings, the commands work or say what to install."""
    venv.create(tmp_path / "bare", symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    hidden = (*OTHERS, *(module.lower() for names in EXTRAS.values() for module in names))
    source = Path(pytest.__file__).parents[1]
    for path in source.iterdir():
        name = path.name.lower().replace("-", "_")
        if "laconic_lab" not in name and not name.startswith(hidden):
            (site / path.name).symlink_to(path)
    for words, code, text in (
        (["calibrate", "-o", "machine.json", "--quick", "--codec", "qsgd:4", "--processes", "1"], 0, "transport"),
        (["plan", "--profile", "machine.json", "--params", "1000000", "--step-time", "0.1"], 0, "recommended"),
        (["train", "--iterations", "2"], 2, "pip install 'laconic[cluster]'"),
        (["demo"], 2, "pip install 'laconic[cluster]'"),
        (["bench"], 2, "pip install laconic-lab"),
    ):
        done = subprocess.run(
            [python, "-m", "laconic", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code and text in done.stdout + done.stderr, done.stdout + done.stderr
        assert "Traceback" not in done.stderr and (code == 0 or len(done.stderr.splitlines()) == 1)
