"""The grammar of specs: ``topk:0.01|qsgd:bits=4,bucket=512`` <-> stages.

Stages are joined by ``|``; arguments are positional or ``name=value``, separated by commas. In the canonical spec the
first argument is positional and the others are named and left out if they have their default value, so that equal
codecs have equal specs. The first argument is left out, too, if it has its default value and its dataclass field has
``omit_default`` in its metadata: ``ef`` stays ``ef``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from laconic.codecs import registry
from laconic.codecs.base import Stage
from laconic.errors import ConfigError

__all__ = ["MAX_SPEC", "Named", "format_named", "format_stages", "parse", "parse_named"]

MAX_SPEC = 256
"""The most bytes of a canonical spec on the wire."""


class Named(Protocol):
    """A dataclass that a name and arguments are parsed into; its class has the name."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


def parse(spec: str) -> list[Stage]:
    """Return the stages of a spec, in order. ``ConfigError`` names the stage, the value and the valid set."""
    if len(spec) > 4 * MAX_SPEC:
        raise ConfigError(f"a codec spec has at most {MAX_SPEC} bytes, got {len(spec)}")
    stages = [_stage(part.strip(), spec) for part in spec.split("|")]
    canonical = format_stages(stages)
    if len(canonical.encode()) > MAX_SPEC:
        raise ConfigError(f"a codec spec has at most {MAX_SPEC} bytes, {canonical[:40]!r}… has {len(canonical)}")
    return stages


def format_stages(stages: list[Stage]) -> str:
    return "|".join(format_named(stage) for stage in stages)


def _stage(part: str, spec: str) -> Stage:
    if not part.partition(":")[0].strip():
        raise ConfigError(f"empty stage in {spec!r}: expected stages joined by '|', such as 'topk:0.01|qsgd:4'")
    return parse_named(part, registry.stages(), whole=spec)


def parse_named(part: str, known: Mapping[str, type[N]], *, noun: str = "stage", whole: str | None = None) -> N:
    """Parse ``name:argument,name=value`` into a dataclass.

    Args:
        known: Dataclasses by name.
        noun: What messages call them.
        whole: The text that contains ``part``, for messages.
    """
    spec = part if whole is None else whole
    name, colon, arguments = part.partition(":")
    name = name.strip()
    cls = known.get(name)
    if cls is None:
        names = sorted(known)
        close = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown {noun} {name!r} in {spec!r}; valid {noun}s: {', '.join(names)}.{hint}")
    fields = [f.name for f in dataclasses.fields(typing.cast(Any, cls))]
    if colon and not arguments.strip():
        raise ConfigError(f"{noun} {name!r} in {spec!r} has ':' but no argument; it takes {_takes(fields)}")
    values: dict[str, Any] = {}
    named = False
    for index, argument in enumerate(arguments.split(",") if arguments else []):
        field, equals, raw = argument.partition("=")
        if equals:
            named, field = True, field.strip()
            if field not in fields:
                raise ConfigError(f"{noun} {name!r} has no argument {field!r}; it takes {_takes(fields)}")
        else:
            if named:
                raise ConfigError(f"in {part!r} the positional argument {argument.strip()!r} follows a named one")
            if index >= len(fields):
                raise ConfigError(f"{noun} {name!r} takes {_takes(fields)}, got {argument.strip()!r} as well")
            field, raw = fields[index], argument
        if field in values:
            raise ConfigError(f"in {part!r} the argument {field!r} is given twice")
        values[field] = _convert(cls, noun, field, raw.strip())
    missing = [f.name for f in dataclasses.fields(typing.cast(Any, cls)) if _is_required(f) and f.name not in values]
    if missing:
        raise ConfigError(f"{noun} {name!r} in {spec!r} needs {_takes(missing)}; it takes {_takes(fields)}")
    return cls(**values)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _takes(fields: list[str]) -> str:
    return ", ".join(fields) if fields else "no arguments"


def _word_for_zero(cls: type[Named], name: str) -> str | None:
    """Return the word that may stand for 0: ``word_for_zero`` in the metadata of the dataclass field."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return next((field.metadata.get("word_for_zero") for field in fields if field.name == name), None)


def _convert(cls: type[Named], noun: str, field: str, raw: str) -> Any:
    """Convert text to the type of a field."""
    target = typing.get_type_hints(cls)[field]
    if isinstance(target, types.UnionType):
        target = next(t for t in typing.get_args(target) if t is not type(None))
    try:
        if target is bool:
            return {"true": True, "false": False}[raw.lower()]
        if target is int:
            return 0 if raw == _word_for_zero(cls, field) else int(raw)
        if target is float:
            value = float(raw)
            if not math.isfinite(value):
                raise ValueError
            return value
    except (ValueError, KeyError, OverflowError):
        kind = {bool: "true or false", int: "a whole number", float: "a finite number"}[target]
        raise ConfigError(f"{noun} {cls.name!r}: {field} must be {kind}, got {raw!r}") from None
    return raw


def format_named(instance: Named) -> str:
    """Return the canonical text of a dataclass: the reverse of ``parse_named``."""
    parts = []
    for index, field in enumerate(dataclasses.fields(typing.cast(Any, instance))):
        value = getattr(instance, field.name)
        if index == 0 and not field.metadata.get("omit_default"):
            parts.append(_format(value))
        elif value != field.default:
            parts.append(f"{field.name}={_format(value)}" if index else _format(value))
    return f"{instance.name}:{','.join(parts)}" if parts else instance.name


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
