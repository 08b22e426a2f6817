"""Papers' experiments run again. A study is a package of this folder whose ``STUDY`` is a ``study.Study``."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Any

from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic_lab.studies.study import Study

__all__ = ["load_study", "study_names"]


def study_names() -> tuple[str, ...]:
    """Return the names of all studies, without importing them."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def load_study(name: str) -> Study[Any]:
    """Return the study of a name."""
    if name not in study_names():
        raise ConfigError(f"unknown study {name!r}: expected one of {', '.join(study_names())}")
    study: Study[Any] = import_module(f"{__name__}.{name}").STUDY
    return study
