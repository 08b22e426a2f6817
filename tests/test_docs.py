"""Every Python block of the README and the docs runs as it stands, in order; every example runs, too."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_on_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(page.stem.lower())
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for found in BLOCK.finditer(page.read_text()):
        line = page.read_text()[: found.start()].count("\n") + 1
        code = compile("\n" * line + found.group(1), str(page), "exec")
        exec(code, vars(module))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_an_example_runs(script, tmp_path):
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_pages_point_to_files_that_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
