"""The documentation builds as a site without a warning."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
from doc_pages import ROOT


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    if find_spec("mkdocs") is None:
        pytest.skip("no mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "transformers.html").exists()
