"""The packages of both distributions and the imports that are allowed between them.

``ALLOWED`` is the architecture. ``tests/test_architecture.py`` compares it with the imports in the source files, and
``python tools/architecture.py`` draws it into docs/architecture.svg and docs/architecture.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = {"laconic": ROOT / "src" / "laconic", "laconic_lab": ROOT / "lab" / "src" / "laconic_lab"}

FOUNDATION = ("_core", "_version", "counters", "errors", "fsync", "tables", "units")
"""Modules without knowledge of tensors or codecs; every package may import them."""

ALLOWED: dict[str, tuple[str, ...]] = {
    # foundation
    "counters": (),
    "errors": (),
    "fsync": (),
    "tables": (),
    "units": ("errors",),
    "records": ("_version", "errors"),
    "link_probe": (),
    # codecs and bytes
    "packet": (),
    "kernels": (),
    "wire": ("packet",),
    "codecs": ("kernels", "packet"),
    "frames": ("codecs", "packet", "wire"),
    "multi_tensor": ("codecs", "kernels", "packet", "wire"),
    "policy": ("codecs", "packet"),
    "residuals": (),
    "channels": ("codecs", "frames", "kernels", "multi_tensor", "packet", "policy", "residuals", "wire"),
    "aggregate": ("codecs", "frames", "kernels", "packet", "residuals", "wire"),
    "sums": ("aggregate",),
    "inspect": ("codecs", "frames", "kernels", "packet", "wire"),
    "catalog": ("codecs", "frames"),
    "checkpoints": ("codecs", "frames", "inspect", "packet", "policy", "wire"),
    # training
    "optim": ("frames", "wire"),
    "layers": ("codecs", "kernels"),
    "collective": (
        "aggregate", "channels", "codecs", "frames", "kernels", "multi_tensor", "packet", "policy", "wire",
    ),
    "cluster": ("aggregate", "channels", "codecs", "frames", "kernels", "packet", "policy", "wire"),
    "plan": ("aggregate", "channels", "codecs", "frames", "optim", "packet", "policy", "wire"),
    "watch": (),
    "train": ("cluster", "frames", "kernels", "layers", "optim", "plan", "records", "watch", "wire"),
    # people
    "report": ("codecs", "plan", "policy", "records"),
    "cli": (
        "catalog", "checkpoints", "cluster", "codecs", "inspect", "link_probe", "plan", "records", "report", "train",
        "watch",
    ),
    "__init__": (
        "aggregate", "channels", "codecs", "collective", "frames", "inspect", "layers", "packet", "policy", "sums",
    ),
    "__main__": ("cli",),
    # the laboratory, a distribution of its own
    "lab.network": ("lab.__init__", "link_probe"),
    "lab.bench": (
        "aggregate", "cluster", "codecs", "collective", "frames", "kernels", "lab.network", "layers", "optim",
        "packet", "records", "train", "wire",
    ),
    "lab.faults": ("cluster", "frames", "lab.network", "optim", "packet", "wire"),
    "lab.studies": (
        "aggregate", "channels", "cluster", "codecs", "collective", "frames", "inspect", "kernels", "lab.bench",
        "lab.network", "layers", "optim", "packet", "plan", "policy", "records", "train", "wire",
    ),
    "lab.report": ("lab.studies", "records", "report"),
    "lab.cli": ("cli", "lab.bench", "lab.faults", "lab.network", "lab.studies", "records"),
    "lab.__init__": (),
}  # fmt: skip
"""What each package may import besides ``FOUNDATION``: everything that is not listed is refused."""


def source_files() -> Iterator[tuple[Path, str]]:
    """Yield each Python file of both distributions and the dotted name of its module."""
    for distribution, folder in DISTRIBUTIONS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (distribution, *path.relative_to(folder).with_suffix("").parts)
            yield path, ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def package_of(module: str) -> str:
    """Return the package of a module: laconic.codecs.topk -> codecs, laconic_lab.bench.ddp -> lab.bench."""
    distribution, *rest = module.split(".")
    package = rest[0] if rest else "__init__"
    return f"lab.{package}" if distribution == "laconic_lab" else package


def imported_modules(path: Path) -> Iterator[str]:
    """Yield every module of ours that a file imports: at the top, inside a function or for types only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in DISTRIBUTIONS)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in DISTRIBUTIONS:
            if node.module not in DISTRIBUTIONS:
                yield node.module
                continue
            folder = DISTRIBUTIONS[node.module]  # `from laconic import wire` names a package, `encode` does not
            for alias in node.names:
                inside = (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
                yield f"{node.module}.{alias.name}" if inside or alias.name == "_core" else node.module


def edges() -> set[tuple[str, str, str]]:
    """Return (importing package, imported package, file) for every import between two packages."""
    found = set()
    for path, module in source_files():
        for target in imported_modules(path):
            pair = package_of(module), package_of(target)
            if pair[0] != pair[1]:
                found.add((*pair, path.relative_to(ROOT).as_posix()))
    return found
