"""The walk in docs/adding-a-codec.md that adds a quantizer with a C++ kernel, followed in a copy of the sources."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks

PAGE = ROOT / "docs" / "adding-a-codec.md"
KERNELS = "src/laconic/kernels/"
TOOLS = shutil.which("cmake") and importlib.util.find_spec("nanobind")


def insert(path: Path, anchor: str, text: str) -> None:
    source = path.read_text()
    assert source.count(anchor) == 1, (path, anchor)
    path.write_text(source.replace(anchor, text + anchor))


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + "\n\n" + text)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not TOOLS, reason="needs cmake and nanobind")
def test_the_walk_adds_a_quantizer_whose_backends_agree(tmp_path):
    for folder in ("csrc", "src", "lab", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for file in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    section = PAGE.read_text().split("## In laconic itself")[0].count("\n")
    steps = [block.text for block in blocks(PAGE) if block.line > section and block.language in ("python", "cpp")]
    signature, reference, header, loop, binding, stub, cpu, stage = steps

    insert(tmp_path / KERNELS / "interface.py", "    def sign_decode(", signature + "\n")
    append(tmp_path / KERNELS / "reference/quantizers.py", reference)
    (tmp_path / "csrc/simd/maxsign.hpp").write_text(header)
    insert(tmp_path / "csrc/simd.cpp", '#include "simd/momentum.hpp"', '#include "simd/maxsign.hpp"\n')
    insert(tmp_path / "csrc/simd/table.inc", "LOOP(sign_encode,", loop)
    insert(tmp_path / "csrc/bindings/quantizers.cpp", '  m.def("qsgd_decode",', binding)
    insert(tmp_path / "src/laconic/_core.pyi", "def qsgd_decode(", stub)
    append(tmp_path / KERNELS / "cpu/quantizers.py", cpu)
    append(tmp_path / KERNELS / "triton/backend.py", "maxsign_encode = torch_fallback.maxsign_encode\n")
    (tmp_path / "src/laconic/codecs/maxsign.py").write_text(stage)
    insert(
        tmp_path / "src/laconic/codecs/registry.py",
        "from laconic.codecs.sign import",
        "from laconic.codecs.maxsign import MaxSign\n",
    )
    insert(tmp_path / "src/laconic/codecs/registry.py", "    Sign,\n", "    MaxSign,\n")
    insert(tmp_path / "tests/laws.py", '    "sign",\n', '    "maxsign",\n    "maxsign:128",\n')

    build = tmp_path / "build"
    subprocess.run(["cmake", "-S", tmp_path, "-B", build, f"-DPython_EXECUTABLE={sys.executable}"], check=True)
    subprocess.run(["cmake", "--build", build, "--parallel", "2"], check=True)
    (core,) = build.glob("_core*.so")
    shutil.copy(core, tmp_path / "src/laconic")
    tests = ["tests/kernels/test_parity.py", "tests/kernels/test_stub.py", "tests/test_hostile.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", "maxsign or stub"]
    path = f"{tmp_path / 'src'}{os.pathsep}{tmp_path / 'lab/src'}"
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "maxsign" not in (ROOT / "tests/laws.py").read_text()
