"""The stub of the C++ core is complete."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import laconic
from laconic import _core


def test_stub_lists_all_names_of_the_core():
    stub = Path(inspect.getfile(laconic)).parent / "_core.pyi"
    listed = set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            listed.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            listed.add(node.target.id)
    assert listed == {name for name in dir(_core) if not name.startswith("_")}
