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
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from laconic.codecs import registry
from laconic.codecs.base import Stage
from laconic.errors import ConfigError

__all__ = ["MAX_SPEC", "Named", "parse", "read", "show", "text"]

MAX_SPEC = 256
"""Bytes of a canonical spec on the wire."""


class Named(Protocol):
    """Something that a word and arguments stand for: a dataclass with the word on its class."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


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
    return "|".join(show(stage) for stage in stages)


def _stage(part: str, spec: str) -> Stage:
    if not part.partition(":")[0].strip():
        raise ConfigError(f"empty stage in {spec!r}: expected stages joined by '|', such as 'topk:0.01|qsgd:4'")
    return read(part, registry.stages(), within=spec)


def read(part: str, known: Mapping[str, type[N]], *, noun: str = "stage", within: str | None = None) -> N:
    """What ``name:argument,name=value`` stands for.

    Args:
        part: The text.
        known: Dataclasses by name.
        noun: What they are called in messages.
        within: The text that this is a part of, for messages.
    """
    spec = part if within is None else within
    name, colon, arguments = part.partition(":")
    name = name.strip()
    cls = known.get(name)
    if cls is None:
        names = sorted(known)
        close = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown {noun} {name!r} in {spec!r}; valid {noun}s: {', '.join(names)}.{hint}")
    fields = [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
    if colon and not arguments.strip():
        raise ConfigError(f"{noun} {name!r} in {spec!r} has ':' but no argument; it takes {_takes(fields)}")
    values: dict[str, Any] = {}
    named = False
    for place, argument in enumerate(arguments.split(",") if arguments else []):
        word, equals, raw = argument.partition("=")
        if equals:
            named, word = True, word.strip()
            if word not in fields:
                raise ConfigError(f"{noun} {name!r} has no argument {word!r}; it takes {_takes(fields)}")
        else:
            if named:
                raise ConfigError(f"in {part!r} the positional argument {argument.strip()!r} follows a named one")
            if place >= len(fields):
                raise ConfigError(f"{noun} {name!r} takes {_takes(fields)}, got {argument.strip()!r} as well")
            word, raw = fields[place], argument
        if word in values:
            raise ConfigError(f"in {part!r} the argument {word!r} is given twice")
        values[word] = _convert(cls, noun, word, raw.strip())
    needed = [f.name for f in dataclasses.fields(typing.cast(Any, cls)) if _is_required(f) and f.name not in values]
    if needed:
        raise ConfigError(f"{noun} {name!r} in {spec!r} needs {_takes(needed)}; it takes {_takes(fields)}")
    return cls(**values)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _takes(fields: list[str]) -> str:
    return ", ".join(fields) if fields else "no arguments"


def _convert(cls: type[Named], noun: str, field: str, raw: str) -> Any:
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
        raise ConfigError(f"{noun} {cls.name!r}: {field} must be {kind}, got {raw!r}") from None
    return raw


def show(found: Named) -> str:
    """The reverse of ``read``: canonical text."""
    parts = []
    for place, field in enumerate(dataclasses.fields(typing.cast(Any, found))):
        value = getattr(found, field.name)
        if place == 0:
            parts.append(_show(value))
        elif value != field.default:
            parts.append(f"{field.name}={_show(value)}")
    return f"{found.name}:{','.join(parts)}" if parts else found.name


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
