"""Record: one measurement with the machine, versions, seed and commit it came from; JSON lines in and out."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from laconic.errors import FileError, LaconicError
from laconic.json_files import parse_json, read_regular_text

__all__ = [
    "NOT_EMPTY", "POSITIVE", "Constraint", "Record", "RecordError", "append", "check_same_length", "checked_values",
    "commit", "machine", "read", "read_valid", "versions", "write",
]  # fmt: skip

Schema = TypeVar("Schema")


@lru_cache(maxsize=1)
def machine() -> dict[str, Any]:
    """Return the CPU, its cores and vector extension, the system and the GPU; no names of hosts or people."""
    model, flags = platform.processor() or platform.machine(), set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
                break
    import torch

    description: dict[str, Any] = {"cpu": model, "cores": os.cpu_count(), "system": platform.system()}
    description["vector"] = "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else platform.machine()
    if torch.cuda.is_available():
        description["gpu"] = torch.cuda.get_device_name(0)
    return description


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    import torch

    from laconic._version import __version__

    return {"laconic": __version__, "torch": torch.__version__, "python": platform.python_version()}


@lru_cache(maxsize=1)
def commit() -> str | None:
    """Return the commit of the checkout of this package, ``-dirty`` with local changes.

    On a copy without its history it is what the environment variable ``LACONIC_COMMIT`` says; otherwise None.
    """
    package = Path(__file__).resolve().parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=package, capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # An installed copy may be inside another repository, whose commit would be wrong.
    if git("ls-files", "--error-unmatch", "records.py") is None:
        return os.environ.get("LACONIC_COMMIT") or None
    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}-dirty" if head and git("status", "--porcelain", "--", "..") else head


@dataclass(frozen=True)
class Record:
    """One measurement.

    Args:
        kind: What was measured, e.g. ``bench.codec``.
        values: Figures and settings. The suffix of a name is its unit: ``encode_s`` in seconds, ``nbytes`` in bytes.
    """

    kind: str
    values: Mapping[str, Any]
    seed: int = 0
    machine: Mapping[str, Any] = field(default_factory=machine)
    versions: Mapping[str, str] = field(default_factory=versions)
    commit: str | None = field(default_factory=commit)
    at: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Return the Record of a line; ``ValueError`` if it is not one."""
        fields = parse_json(line)
        if not isinstance(fields, dict) or not fields.keys() <= _FIELDS.keys():
            raise ValueError(f"a Record is an object with {', '.join(_FIELDS)}")
        for name, kind in _FIELDS.items():
            if name not in fields and name in ("kind", "values"):
                raise ValueError(f"{name!r} is missing")
            if name in fields and (not isinstance(fields[name], kind) or isinstance(fields[name], bool)):
                raise ValueError(f"{name!r} has the type {type(fields[name]).__name__}")
        return cls(**fields)


_FIELDS: dict[str, Any] = {
    "kind": str, "values": dict, "seed": int, "machine": dict, "versions": dict, "commit": str | None, "at": str,
}  # fmt: skip
"""The types of a Record's fields in JSON."""


def write(records: Iterable[Record], path: Path) -> None:
    """Write records to a file, one JSON object a line; an existing file is replaced."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(record.to_json() + "\n" for record in records), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        blocking = next((parent for parent in path.parents if parent.exists()), path.parent)
        reason = error.strerror or str(error) if blocking.is_dir() else f"{blocking} is a file, not a folder"
        raise FileError(f"cannot write records to {path}: {reason}") from error


def append(record: Record, path: Path) -> None:
    """Add a record to the end of a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")  # one write, so that several processes may append
    except OSError as error:
        raise FileError(f"cannot append a record to {path}: {error.strerror or error}") from error


def read(path: Path) -> list[Record]:
    """Return the Records of a file; ``FileError`` if a line is not a Record."""
    records, problem = read_valid(path)
    if problem is not None:
        raise FileError(f"{path} does not hold records, one JSON object a line: {problem}")
    return records


def read_valid(path: Path) -> tuple[list[Record], str | None]:
    """Return the Records of a file, and how many lines are not Records, with the reason of the first."""
    records, invalid, first = [], 0, ""
    try:
        lines = read_regular_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot read records: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(Record.from_json(line))
        except ValueError as error:
            first = first or f"line {number}: {error}"
            invalid += 1
    more = f" (and {invalid - 1} more)" if invalid > 1 else ""
    return records, first + more if invalid else None


class RecordError(LaconicError, ValueError):
    """A Record lacks a field that is needed, or the field has a wrong type or length."""


class Constraint(NamedTuple):
    """What a value must be besides its type, as ``Annotated`` metadata of a schema."""

    description: str
    holds: Callable[[Any], object]


POSITIVE = Constraint("above 0", lambda value: value > 0)
NOT_EMPTY = Constraint("not empty", len)


def checked_values(record: Record, schema: type[Schema]) -> Schema:
    """Return the values of a Record after comparing them with a TypedDict.

    Fields that the TypedDict does not name may hold anything. ``float`` accepts whole numbers, ``list[X]`` lists and
    tuples; ``Annotated[int, POSITIVE]`` and ``Annotated[list[X], NOT_EMPTY]`` say more than a type does. The schema may
    be a union of TypedDicts, one of which must fit.

    Raises:
        RecordError: A required field is missing or a field has a wrong type; the message names kind and field.

    >>> from typing import TypedDict
    >>> class Point(TypedDict):
    ...     step: int
    ...     losses: list[float | None]
    >>> checked_values(Record("run.point", {"step": 1, "losses": [0.5, None]}), Point)["step"]
    1
    >>> checked_values(Record("run.point", {"step": 1, "losses": [0.5, "low"]}), Point)
    Traceback (most recent call last):
    laconic.records.RecordError: Record of kind run.point: losses[1] must be float | None, got 'low'
    """
    problem = _mismatch(record.values, schema, "")
    if problem is not None:
        raise RecordError(f"Record of kind {record.kind}: {problem}")
    return cast(Schema, record.values)


def check_same_length(where: str, **columns: Sequence[Any]) -> None:
    """Raise ``RecordError`` unless lists of a Record that belong together have the same length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise RecordError(f"{where}: fields must have the same length, but {listed}")


def _mismatch(value: Any, expected: Any, field_name: str) -> str | None:
    """Return what is wrong with a value of a Record, or None."""
    if expected is Any:
        return None
    scalars = _scalar_types(expected)
    if scalars is not None:
        return None if type(value) in scalars else _wrong_type(value, expected, field_name)
    if is_typeddict(expected):
        if not isinstance(value, Mapping):
            return _wrong_type(value, expected, field_name)
        prefix = f"{field_name}." if field_name else ""
        for name, hint in _type_hints(expected).items():
            if name not in value:
                if name in expected.__required_keys__:
                    return f"{prefix}{name} is missing"
                continue
            if problem := _mismatch(value[name], hint, f"{prefix}{name}"):
                return problem
        return None
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is Annotated:
        problem = _mismatch(value, arguments[0], field_name)
        broken = (one.description for one in arguments[1:] if not one.holds(value)) if problem is None else ()
        return next((f"{field_name} must be {description}, got {value!r}" for description in broken), problem)
    if origin in (Union, UnionType):
        problems = [_mismatch(value, option, field_name) for option in arguments]
        if None in problems:
            return None
        return problems[0] if is_typeddict(arguments[0]) else _wrong_type(value, expected, field_name)
    if origin is dict and isinstance(value, Mapping):
        items = ((f"{field_name}[{key!r}]", item) for key, item in value.items())
        return next((wrong for name, item in items if (wrong := _mismatch(item, arguments[1], name))), None)
    if origin is list and isinstance(value, list | tuple):
        scalars = _scalar_types(arguments[0])
        if scalars is not None and set(map(type, value)) <= scalars:  # long lists of numbers: no call for each
            return None
        items = ((f"{field_name}[{i}]", item) for i, item in enumerate(value))
        return next((wrong for name, item in items if (wrong := _mismatch(item, arguments[0], name))), None)
    return _wrong_type(value, expected, field_name)


_SCALARS: dict[Any, frozenset[type]] = {
    bool: frozenset({bool}), int: frozenset({int}), float: frozenset({int, float}), str: frozenset({str}),
    NoneType: frozenset({NoneType}),
}  # fmt: skip


def _scalar_types(expected: Any) -> frozenset[type] | None:
    """Return the types that a scalar annotation accepts; None for containers and schemas."""
    if get_origin(expected) in (Union, UnionType):
        options = [_scalar_types(option) for option in get_args(expected)]
        return None if None in options else frozenset[type]().union(*cast("list[frozenset[type]]", options))
    return _SCALARS.get(expected)


@lru_cache(maxsize=128)
def _type_hints(schema: Any) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


def _wrong_type(value: Any, expected: Any, field_name: str) -> str:
    name = expected.__name__ if isinstance(expected, type) and not get_args(expected) else str(expected)
    shown = repr(value)
    return f"{field_name or 'its values'} must be {name}, got {shown if len(shown) < 60 else shown[:57] + '...'}"
