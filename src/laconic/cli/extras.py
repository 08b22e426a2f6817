"""What to install for a package that is missing."""

from __future__ import annotations

__all__ = ["advice_for"]

EXTRAS = {
    "cluster": ("cryptography", "grpc"),
    "plots": ("matplotlib",),
    "ray": ("ray",),
    "tensorboard": ("tensorboardX",),
    "torchft": ("torchft",),
    "watch": ("prometheus_client",),
}
"""Modules of the extras of pyproject.toml."""

OTHERS = ("constriction", "zstandard")
"""Packages of no extra, by which coders are compared."""

REQUIRED = ("numpy", "safetensors", "torch")
"""Dependencies of laconic itself, which ``pip install --no-deps`` leaves out."""


def advice_for(error: BaseException) -> str | None:
    """Return what to install if an error, or one that caused it, is about a package that is not installed."""
    missing: BaseException | None = error
    while missing is not None and not isinstance(missing, ModuleNotFoundError):
        missing = missing.__cause__ or missing.__context__
    if missing is None or missing.name is None:
        return None
    package = missing.name.partition(".")[0]
    for extra, modules in EXTRAS.items():
        if package in modules:
            return f"this command needs the package {package}: pip install 'laconic[{extra}]'"
    if package in (*OTHERS, *REQUIRED):
        return f"this command needs the package {package}: pip install {package}"
    return None
