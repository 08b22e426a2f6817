"""Base of the settings of benchmarks: checks of their numbers, and the command line that they come from."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar

from laconic.errors import ConfigError

__all__ = ["BenchSettings"]


class BenchSettings:
    """Base of a frozen dataclass whose fields are options of ``laconic bench NAME``.

    A tuple is written as one option with commas, unless ``ARGUMENTS`` or ``REPEATED`` names it.
    """

    NAME: ClassVar[str]
    ARGUMENTS: ClassVar[str] = ""
    """The field whose values are arguments without an option."""
    REPEATED: ClassVar[Mapping[str, str]] = {}
    """Fields that have an option for each value, and its name."""

    def require_at_least(self, lowest: Mapping[str, int]) -> None:
        """Raise if a field is below its lowest value."""
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(self, name)}")

    def require_positive(self, names: Iterable[str]) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be > 0, got {getattr(self, name):g}")

    def command(self) -> str:
        """Return the command line of this run, with the options that differ from their defaults."""
        words = ["laconic", "bench", self.NAME]
        in_order = sorted(fields(self), key=lambda field: (field.name != self.ARGUMENTS, field.kw_only))  # type: ignore[arg-type]
        for field in in_order:
            if getattr(self, field.name) != _default(field):
                words += self._words(field.name, getattr(self, field.name))
        return shlex.join(words)

    def _words(self, name: str, value: Any) -> Iterator[str]:
        option = "--" + self.REPEATED.get(name, name.replace("_", "-"))
        if name == self.ARGUMENTS:
            yield from value
        elif name in self.REPEATED:
            yield from (word for each in value for word in (option, each))
        else:
            yield option
            if isinstance(value, tuple):
                yield ",".join(map(str, value))
            elif not isinstance(value, bool):
                yield f"{value:g}" if isinstance(value, float) else str(value)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
