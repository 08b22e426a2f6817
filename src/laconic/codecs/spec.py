"""The grammar: ``topk:0.01|qsgd:bits=4,bucket=512`` <-> stages.

Stages are joined by ``|``; arguments are positional or ``name=value``, separated by commas. The canonical text names
the first argument by place and the others only where they differ from their default, so equal codecs have equal text.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from typing import Any, TypeVar

from laconic.codecs import registry
from laconic.codecs.base import Stage, field_names
from laconic.errors import ConfigError

__all__ = ["MAX_SPEC", "parse", "text"]

MAX_SPEC = 256
"""Bytes of a canonical spec on the wire."""

T = TypeVar("T")


def parse(spec: str) -> list[Stage]:
    """The stages of a spec, in order. ``ConfigError`` names the stage, the value and the valid set."""
    if len(spec) > 4 * MAX_SPEC:
        raise ConfigError(f"a codec spec has at most {MAX_SPEC} bytes, got {len(spec)}")
    stages = [_stage(part.strip(), spec) for part in spec.split("|")]
    canonical = text(stages)
    if len(canonical.encode()) > MAX_SPEC:
        raise ConfigError(f"a codec spec has at most {MAX_SPEC} bytes, {canonical[:40]!r}… has {len(canonical)}")
    return stages


def text(stages: list[Stage]) -> str:
    return "|".join(_stage_text(stage) for stage in stages)


def _stage(part: str, spec: str) -> Stage:
    name, colon, arguments = part.partition(":")
    name = name.strip()
    if not name:
        raise ConfigError(f"empty stage in {spec!r}: expected stages joined by '|', such as 'topk:0.01|qsgd:4'")
    cls = registry.find(name)
    if cls is None:
        names = registry.names()
        close = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown stage {name!r} in {spec!r}; valid stages: {', '.join(names)}.{hint}")
    fields = field_names(cls)
    if colon and not arguments.strip():
        raise ConfigError(f"stage {name!r} in {spec!r} has ':' but no argument; it takes {_takes(fields)}")
    values: dict[str, Any] = {}
    named = False
    for place, argument in enumerate(arguments.split(",") if arguments else []):
        word, equals, raw = argument.partition("=")
        if equals:
            named, word = True, word.strip()
            if word not in fields:
                raise ConfigError(f"stage {name!r} has no argument {word!r}; it takes {_takes(fields)}")
        else:
            if named:
                raise ConfigError(f"in {part!r} the positional argument {argument.strip()!r} follows a named one")
            if place >= len(fields):
                raise ConfigError(f"stage {name!r} takes {_takes(fields)}, got {argument.strip()!r} as well")
            word, raw = fields[place], argument
        if word in values:
            raise ConfigError(f"in {part!r} the argument {word!r} is given twice")
        values[word] = _convert(cls, word, raw.strip())
    return cls(**values)


def _takes(fields: list[str]) -> str:
    return ", ".join(fields) if fields else "no arguments"


def _convert(cls: type[Stage], field: str, raw: str) -> Any:
    """Text to the type of the field."""
    wanted = typing.get_type_hints(cls)[field]
    if isinstance(wanted, types.UnionType):
        wanted = next(t for t in typing.get_args(wanted) if t is not type(None))
    try:
        if wanted is bool:
            return {"true": True, "false": False}[raw.lower()]
        if wanted is int:
            return int(raw)
        if wanted is float:
            value = float(raw)
            if not math.isfinite(value):
                raise ValueError
            return value
    except (ValueError, KeyError, OverflowError):
        kind = {bool: "true or false", int: "a whole number", float: "a finite number"}[wanted]
        raise ConfigError(f"stage {cls.name!r}: {field} must be {kind}, got {raw!r}") from None
    return raw


def _stage_text(stage: Stage) -> str:
    parts = []
    for place, field in enumerate(dataclasses.fields(typing.cast(Any, stage))):
        value = getattr(stage, field.name)
        if place == 0:
            parts.append(_show(value))
        elif value != field.default:
            parts.append(f"{field.name}={_show(value)}")
    return f"{stage.name}:{','.join(parts)}" if parts else stage.name


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
