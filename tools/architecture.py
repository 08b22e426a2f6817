"""The packages of both distributions and the imports that are allowed between them.

``ALLOWED`` is the architecture. ``tests/test_architecture.py`` compares it with the imports in the source files, and
``make docs`` draws it into docs/architecture.svg and docs/architecture.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from page_blocks import ROOT, fill

DISTRIBUTIONS = {"laconic": ROOT / "src" / "laconic", "laconic_lab": ROOT / "lab" / "src" / "laconic_lab"}

FOUNDATION = ("_core", "_version", "counters", "errors", "fsync", "json_files", "records", "tables", "units")
"""Modules without knowledge of tensors or codecs; every package may import them."""

ALLOWED: dict[str, tuple[str, ...]] = {
    # foundation
    "counters": (),
    "errors": (),
    "fsync": (),
    "json_files": (),
    "tables": (),
    "units": (),
    "records": (),
    "link_probe": (),
    # codecs and bytes
    "packet": (),
    "kernels": (),
    "wire": ("packet",),
    "codecs": ("kernels", "packet"),
    "frames": ("codecs", "packet", "wire"),
    "multi_tensor": ("codecs", "kernels", "packet", "wire"),
    "policy": ("codecs", "packet"),
    "residual_storage": ("kernels",),
    "residuals": ("residual_storage",),
    "suitability": ("codecs",),
    "channels": (
        "codecs", "frames", "kernels", "multi_tensor", "packet", "policy", "residual_storage", "residuals", "wire",
    ),
    "aggregate": ("codecs", "frames", "kernels", "packet", "residual_storage", "residuals", "wire"),
    "sums": ("aggregate",),
    "inspect": ("codecs", "frames", "kernels", "packet", "wire"),
    "catalog": ("codecs", "frames"),
    "checkpoints": ("codecs", "frames", "inspect", "packet", "policy", "wire"),
    # training
    "optim": ("frames", "wire"),
    "layers": ("codecs", "kernels"),
    "collective": (
        "aggregate", "channels", "codecs", "kernels", "multi_tensor", "packet", "policy", "residual_storage",
        "residuals", "suitability", "wire",
    ),
    "torchft": ("codecs", "collective", "policy"),
    "recipes": ("collective", "policy"),
    "pipeline": ("codecs", "frames", "kernels", "packet", "wire"),
    "cluster": ("aggregate", "channels", "codecs", "frames", "kernels", "optim", "packet", "policy", "wire"),
    "plan": (
        "aggregate", "channels", "codecs", "frames", "optim", "packet", "pipeline", "policy", "suitability", "wire",
    ),
    "tuning": ("aggregate", "channels", "codecs", "frames", "packet", "plan", "policy", "suitability", "sums"),
    "watch": (),
    "train": ("cluster", "frames", "kernels", "layers", "optim", "plan", "watch", "wire"),
    # people
    "report": ("plan", "suitability"),
    "cli": (
        "catalog", "checkpoints", "cluster", "collective", "inspect", "link_probe", "plan", "report", "suitability",
        "train", "tuning", "watch",
    ),
    "__init__": (
        "aggregate", "channels", "codecs", "collective", "frames", "inspect", "layers", "packet", "policy", "sums",
        "tuning",
    ),
    "__main__": ("cli",),
    # the laboratory, a distribution of its own
    "lab.network": ("lab.__init__", "link_probe"),
    "lab.bench": (
        "aggregate", "cluster", "codecs", "collective", "frames", "kernels", "lab.network", "layers", "optim",
        "packet", "train", "wire",
    ),
    "lab.faults": ("cluster", "frames", "lab.__init__", "lab.network", "optim", "packet", "torchft", "train", "wire"),
    "lab.studies": (
        "aggregate", "channels", "cluster", "codecs", "collective", "frames", "inspect", "kernels", "lab.bench",
        "lab.network", "layers", "optim", "packet", "pipeline", "plan", "policy", "report", "train", "wire",
    ),
    "lab.report": ("lab.studies", "report", "suitability"),
    "lab.cli": ("cli", "lab.bench", "lab.faults", "lab.network", "lab.studies"),
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


@lru_cache(maxsize=1)
def edges() -> set[tuple[str, str, str]]:
    """Return (importing package, imported package, file) for every import between two packages."""
    imports = set()
    for path, module in source_files():
        for target in imported_modules(path):
            pair = package_of(module), package_of(target)
            if pair[0] != pair[1]:
                imports.add((*pair, path.relative_to(ROOT).as_posix()))
    return imports


PICTURE = ROOT / "docs" / "architecture.svg"
PAGE = ROOT / "docs" / "architecture.md"
HIDDEN = {"__init__", "__main__", "lab.__init__", "link_probe", "sums", *FOUNDATION}
"""Not drawn: the foundation, which everybody imports, modules that only re-export names, and a stand-alone program."""
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 96, 30, 16, 46, 12
COLOURS = {"lab": "#fdf0dc", "library": "#e7eefb"}


def drawn_packages() -> list[str]:
    return [package for package in ALLOWED if package not in HIDDEN]


def direct_edges() -> list[tuple[str, str]]:
    """Return the allowed edges that do not follow from others: their transitive reduction."""
    reach: dict[str, set[str]] = {}

    def reachable(package: str) -> set[str]:
        if package not in reach:
            reach[package] = {name for low in ALLOWED[package] for name in (low, *reachable(low))}
        return reach[package]

    return [
        (package, low)
        for package in drawn_packages()
        for low in ALLOWED[package]
        if low not in HIDDEN
        and not any(low in reachable(other) for other in ALLOWED[package] if other != low and other not in HIDDEN)
    ]


def layers() -> list[list[str]]:
    """Return the packages in rows, each above everything it imports, ordered to keep edges short."""
    depth: dict[str, int] = {}

    def depth_of(package: str) -> int:
        if package not in depth:
            depth[package] = 1 + max((depth_of(low) for low in ALLOWED[package] if low not in HIDDEN), default=-1)
        return depth[package]

    rows: list[list[str]] = [[] for _ in range(1 + max(depth_of(package) for package in drawn_packages()))]
    for package in drawn_packages():
        rows[depth[package]].append(package)
    for row, below in zip(rows[1:], rows, strict=False):
        place = {package: index / max(1, len(below) - 1) for index, package in enumerate(below)}
        row.sort(key=lambda package: _mean([place[low] for low in ALLOWED[package] if low in place]))
    return rows[::-1]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.5


def draw() -> str:
    """Return the picture of packages and direct edges as SVG."""
    rows = layers()
    width = 2 * MARGIN + max(len(row) for row in rows) * (BOX_WIDTH + GAP_X) - GAP_X
    height = 2 * MARGIN + len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    corner = {}
    for level, row in enumerate(rows):
        left = (width - len(row) * (BOX_WIDTH + GAP_X) + GAP_X) / 2
        for index, package in enumerate(row):
            corner[package] = (left + index * (BOX_WIDTH + GAP_X), MARGIN + level * (BOX_HEIGHT + GAP_Y))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    for high, low in direct_edges():
        x1, y1 = corner[high][0] + BOX_WIDTH / 2, corner[high][1] + BOX_HEIGHT
        x2, y2 = corner[low][0] + BOX_WIDTH / 2, corner[low][1]
        middle = (y1 + y2) / 2
        path = f"M{x1:g} {y1:g}C{x1:g} {middle:g} {x2:g} {middle:g} {x2:g} {y2:g}"
        lines.append(f'<path d="{path}" fill="none" stroke="#8a94a6"/>')
    for package, (x, y) in corner.items():
        colour = COLOURS["lab" if package.startswith("lab.") else "library"]
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" fill="{colour}" '
            'stroke="#5b6b86"/>'
        )
        lines.append(f'<text x="{x + BOX_WIDTH / 2:g}" y="{y + 19:g}" text-anchor="middle">{package}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def table() -> str:
    """Return the allowed imports as a Markdown table."""
    rows = [f"| `{package}` | {', '.join(f'`{low}`' for low in ALLOWED[package]) or '–'} |" for package in ALLOWED]
    return "\n".join(["| package | may import, beside the foundation |", "|---|---|", *rows])


def page() -> str:
    """Return docs/architecture.md with its generated table."""
    return fill(PAGE.read_text(encoding="utf-8"), "packages", table())
