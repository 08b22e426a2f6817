"""The stub of the C++ core names what the core has, no more and no less."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import laconic
from laconic import _core


def test_the_stub_names_what_the_core_has():
    stub = Path(inspect.getfile(laconic)).parent / "_core.pyi"
    named = set()
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            named.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            named.add(node.target.id)
    assert named == {name for name in dir(_core) if not name.startswith("_")}
