"""The house itself: imports go one way, importing does nothing, the public names are all there, examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import laconic

SRC = Path(laconic.__file__).resolve().parent

# From the ground up: a room may import from those before it (and from within itself), never from those after.
ROOMS = (
    "_version",
    "_core",
    "errors",
    "durable",
    "notices",
    "records",
    "watch",
    "lab",
    "packet",
    "kernels",
    "wire",
    "codecs",
    "frames",
    "batches",
    "aggregate",
    "policy",
    "channels",
    "sums",
    "collective",
    "explanations",
    "checkpoints",
    "optim",
    "plan",
    "layers",
    "cluster",
    "faults",
    "train",
    "bench",
    "studies",
    "report",
    "__init__",
    "cli",
    "__main__",
)
# Not said by the order: the wire knows no codec, and no codec knows the wire.
STRANGERS = {("wire", "codecs"), ("codecs", "wire"), ("wire", "kernels"), ("packet", "kernels"), ("kernels", "packet")}


def loaded(module: str):
    """The module; what Triton compiles can only be read where Triton is."""
    if module.startswith("laconic.kernels.triton."):
        pytest.importorskip("triton")
    return importlib.import_module(module)


def room_of(module: str) -> str:
    """laconic.codecs.topk -> codecs; laconic itself -> __init__."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def files():
    for path in sorted(SRC.rglob("*.py")):
        parts = ("laconic", *path.relative_to(SRC).with_suffix("").parts)
        package = parts[:-1] if parts[-1] == "__init__" else parts
        yield path, ".".join(parts) if parts == ("laconic", "__init__") else ".".join(package)


def imports(path: Path, module: str):
    """Every laconic module that a file names in an import, at the top, inside a function or for types only."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "laconic")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            if (
                base == "laconic"
            ):  # `from laconic import wire` names a room, `from laconic import encode` the front door
                for name in node.names:
                    inside = (SRC / f"{name.name}.py").exists() or (SRC / name.name).is_dir() or name.name == "_core"
                    yield f"laconic.{name.name}" if inside else "laconic"
            elif base.split(".")[0] == "laconic":
                yield base


ARROWS = {
    (room_of(module), room_of(target), path.relative_to(SRC).as_posix())
    for path, module in files()
    for target in imports(path, module)
}


def test_every_room_is_on_the_plan():
    assert {room_of(module) for _, module in files()} <= set(ROOMS)


def test_imports_go_one_way():
    upward = [arrow for arrow in ARROWS if arrow[0] != arrow[1] and ROOMS.index(arrow[0]) < ROOMS.index(arrow[1])]
    assert upward == []


def test_strangers_do_not_know_each_other():
    assert [arrow for arrow in ARROWS if arrow[:2] in STRANGERS] == []


def test_the_walk_sees_imports():
    """Guards the tests above: a walk that finds nothing would pass them."""
    assert {("frames", "wire"), ("frames", "codecs"), ("codecs", "kernels"), ("kernels", "_core")} <= {
        a[:2] for a in ARROWS
    }


def test_no_room_is_called_utils():
    assert [path for path, _ in files() if path.stem in ("utils", "util", "helpers", "common", "misc")] == []


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
    "path, module", [f for f in files() if public(f[0]) is not None], ids=lambda v: v if isinstance(v, str) else ""
)
def test_all_is_sorted_and_true(path, module):
    names = public(path)
    assert names == sorted(names, key=in_order) and len(names) == len(set(names))
    found = loaded(module.removesuffix(".__init__"))
    assert [name for name in names if not hasattr(found, name)] == []


def test_the_front_door_lists_everything_it_shows():
    shown = {name for name in vars(laconic) if not name.startswith("_")}
    rooms = set(ROOMS) | {"TYPE_CHECKING", "annotations"}
    assert shown - rooms <= set(laconic.__all__)
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


@pytest.mark.parametrize("module", [m.removesuffix(".__init__") for _, m in files() if not m.endswith("__main__")])
def test_examples_in_docstrings_run(module):
    found = doctest.testmod(loaded(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0
    if module in ("laconic", "laconic.frames", "laconic.channels", "laconic.codecs.chain"):
        assert found.attempted > 0
