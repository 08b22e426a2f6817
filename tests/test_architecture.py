"""The architecture: allowed imports, public names, an import without side effects, docstring examples that run."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from architecture import ALLOWED, FOUNDATION, ROOT, edges, source_files

import laconic

FORBIDDEN_STEMS = ("utils", "util", "helpers", "common", "misc")


def loaded(module: str):
    """Import a module; Triton kernels can only be imported where Triton is installed."""
    if module.startswith("laconic.kernels.triton."):
        pytest.importorskip("triton")
    return importlib.import_module(module)


def test_every_package_has_a_row_in_the_table():
    packages = {importer for importer, _, _ in edges()} | {imported for _, imported, _ in edges()}
    assert packages - set(ALLOWED) - set(FOUNDATION) == set()


def test_every_import_between_packages_is_allowed():
    refused = [
        (importer, imported, path)
        for importer, imported, path in edges()
        if imported not in FOUNDATION and imported not in ALLOWED[importer]
    ]
    assert refused == []


def test_every_allowed_import_exists():
    """A table that allows more than the code needs would hide the next wrong import."""
    existing = {(importer, imported) for importer, imported, _ in edges()}
    unused = [
        (importer, name) for importer, names in ALLOWED.items() for name in names if (importer, name) not in existing
    ]
    assert unused == []


def test_allowed_imports_have_no_cycle():
    remaining = {package: set(names) for package, names in ALLOWED.items()}
    while remaining:
        leaves = [package for package, names in remaining.items() if not names & set(remaining)]
        assert leaves, f"a cycle among {sorted(remaining)}"
        for leaf in leaves:
            del remaining[leaf]


def test_the_library_does_not_import_the_laboratory():
    assert [edge for edge in edges() if not edge[0].startswith("lab.") and edge[1].startswith("lab.")] == []


def test_edges_finds_known_imports():
    """Guards the tests above: a walk that finds nothing would pass them."""
    pairs = {edge[:2] for edge in edges()}
    assert {("frames", "wire"), ("frames", "codecs"), ("codecs", "kernels"), ("kernels", "_core")} <= pairs


def test_no_module_is_called_utils():
    assert [path for path, _ in source_files() if path.stem in FORBIDDEN_STEMS] == []


MOST_LINES = 450
FOLDERS = ("csrc", "src", "lab", "tests", "tools", "fuzz", "examples")


def code_files():
    return [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".hpp", ".inc") and not {"build", ".venv"} & set(path.parts)
    ]  # fmt: skip


def test_no_file_is_longer_than_450_lines():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in code_files()}
    assert len(lines) > 800 and {"csrc/topk.cpp", "src/laconic/frames.py"} <= set(lines)
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def public(path: Path):
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return ast.literal_eval(node.value)
    return None


def in_order(name: str):
    """Constants, classes, functions, each by the alphabet: the order that ruff keeps."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize(
    "path, module",
    [f for f in source_files() if public(f[0]) is not None],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_all_is_sorted_and_true(path, module):
    names = public(path)
    assert names == sorted(names, key=in_order) and len(names) == len(set(names))
    imported = loaded(module.removesuffix(".__init__"))
    assert [name for name in names if not hasattr(imported, name)] == []


def test_the_front_door_lists_everything_it_shows():
    shown = {name for name in vars(laconic) if not name.startswith("_")}
    packages = set(ALLOWED) | set(FOUNDATION) | {"TYPE_CHECKING", "annotations"}
    assert shown - packages <= set(laconic.__all__)
    assert {"__version__", "aggregate"} <= set(laconic.__all__)
    for named in (
        "codec", "encode", "encode_into", "decode", "codec_names", "channel", "compress", "expand", "measure",
    ):  # fmt: skip
        assert named in laconic.__all__


def test_errors_are_one_tree():
    from laconic import errors

    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.LaconicError)
        assert name in laconic.__all__
    assert issubclass(laconic.ConfigError, ValueError) and issubclass(laconic.FrameError, ValueError)
    assert issubclass(laconic.NonFiniteError, ValueError) and issubclass(laconic.FileError, OSError)


IMPORT = """
import json, os, sys, threading
import torch
before, tasks, variables = set(sys.modules), len(os.listdir("/proc/self/task")), dict(os.environ)
import laconic
from laconic.codecs import registry
new = sorted({name.split(".")[0] for name in set(sys.modules) - before})
print(json.dumps({
    "new": new,
    "threads": threading.active_count(),
    "tasks": len(os.listdir("/proc/self/task")) - tasks,
    "walked": registry.stages.cache_info().currsize,
    "environ": dict(os.environ) == variables,
}))
"""


def test_importing_needs_only_torch_and_starts_nothing():
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    ours = {"typer", "click", "rich", "safetensors", "zstandard", "hypothesis", "pytest", "grpc", "numpy"}
    assert not ours & set(seen["new"])
    assert set(seen["new"]) - set(sys.stdlib_module_names) <= {"laconic"}
    assert (seen["threads"], seen["tasks"], seen["walked"]) == (1, 0, 0)
    assert seen["environ"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    "module", [m.removesuffix(".__init__") for _, m in source_files() if not m.endswith("__main__")]
)
def test_examples_in_docstrings_run(module):
    results = doctest.testmod(loaded(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
    if module in ("laconic", "laconic.frames", "laconic.channels", "laconic.codecs.chain"):
        assert results.attempted > 0
