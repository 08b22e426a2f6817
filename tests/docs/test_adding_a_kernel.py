"""The walk in docs/adding-a-codec.md that adds a quantizer with a C++ kernel, followed in a copy of the sources."""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from doc_pages import ROOT, blocks

PAGE = ROOT / "docs" / "adding-a-codec.md"
KERNELS = "src/laconic/kernels/"
TOOLS = shutil.which("cmake") and importlib.util.find_spec("nanobind")


class Place(NamedTuple):
    """Where a step of the walk inserts its code: before a text that stands once in a file, or after it."""

    file: str
    anchor: str
    after: bool = False


PLACES = {
    "signature": Place(KERNELS + "interface.py", "    def sign_decode("),
    "include": Place("csrc/simd.cpp", '#include "simd/momentum.hpp"'),
    "loop": Place("csrc/simd/table.inc", "LOOP(sign_encode,"),
    "binding": Place("csrc/bindings/quantizers.cpp", '  m.def("qsgd_decode",'),
    "stub": Place("src/laconic/_core.pyi", "def qsgd_decode("),
    "import": Place("src/laconic/codecs/registry.py", "from laconic.codecs.sign import"),
    "class": Place("src/laconic/codecs/registry.py", "BUILT_IN: tuple[type[Stage], ...] = (\n", after=True),
    "specs": Place("tests/laws.py", "QUANTIZERS = (\n", after=True),
}


def insert(root: Path, place: Place, text: str) -> None:
    path = root / place.file
    before, after = path.read_text().split(place.anchor)
    path.write_text(before + (place.anchor + text if place.after else text + place.anchor) + after)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + "\n\n" + text)


def steps() -> list[str]:
    """Return the code that the page adds to the sources, in its order."""
    section = PAGE.read_text().split("## In laconic itself")[0].count("\n")
    return [block.text for block in blocks(PAGE) if block.line > section and block.language in ("python", "cpp")]


def test_page_has_a_block_for_each_file_that_the_walk_changes():
    assert len(steps()) == 8


@pytest.mark.parametrize("step", PLACES)
def test_text_beside_which_a_step_inserts_stands_once_in_its_file(step):
    place = PLACES[step]
    assert (ROOT / place.file).read_text().count(place.anchor) == 1, place


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not TOOLS, reason="needs cmake and nanobind")
def test_the_walk_adds_a_quantizer_whose_backends_agree(tmp_path):
    for folder in ("csrc", "src", "lab", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for file in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    signature, reference, header, loop, binding, stub, cpu, stage = steps()

    insert(tmp_path, PLACES["signature"], signature + "\n")
    append(tmp_path / KERNELS / "reference/quantizers.py", reference)
    (tmp_path / "csrc/simd/maxsign.hpp").write_text(header)
    insert(tmp_path, PLACES["include"], '#include "simd/maxsign.hpp"\n')
    insert(tmp_path, PLACES["loop"], loop)
    insert(tmp_path, PLACES["binding"], binding)
    insert(tmp_path, PLACES["stub"], stub)
    append(tmp_path / KERNELS / "cpu/quantizers.py", cpu)
    append(tmp_path / KERNELS / "triton/backend.py", "maxsign_encode = torch_fallback.maxsign_encode\n")
    (tmp_path / "src/laconic/codecs/maxsign.py").write_text(stage)
    insert(tmp_path, PLACES["import"], "from laconic.codecs.maxsign import MaxSign\n")
    insert(tmp_path, PLACES["class"], "    MaxSign,\n")
    insert(tmp_path, PLACES["specs"], '    "maxsign", "maxsign:128",\n')

    build = tmp_path / "build"
    subprocess.run(["cmake", "-S", tmp_path, "-B", build, f"-DPython_EXECUTABLE={sys.executable}"], check=True)
    subprocess.run(["cmake", "--build", build, "--parallel", "2"], check=True)
    (core,) = build.glob("_core*.so")
    shutil.copy(core, tmp_path / "src/laconic")
    tests = ["tests/kernels/test_parity.py", "tests/kernels/test_stub.py", "tests/test_hostile.py"]
    # -S leaves out the finder of the installed laconic, which would be asked before any path.
    command = [sys.executable, "-S", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", "maxsign or stub"]
    folders = (str(tmp_path / "src"), str(tmp_path / "lab/src"), *site.getsitepackages())
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "maxsign" not in (ROOT / "tests/laws.py").read_text()
