"""Schemas of Records."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import pytest

from laconic.records import NOT_EMPTY, POSITIVE, Record, RecordError, check_same_length, checked_values


class Point(TypedDict):
    x: float


class _Optional(TypedDict, total=False):
    note: str | None


class Series(_Optional):
    count: Annotated[int, POSITIVE]
    points: Annotated[list[Point], NOT_EMPTY]
    shares: dict[str, float]


class Failure(TypedDict):
    failed: str


VALID: dict[str, Any] = {"count": 2, "points": [{"x": 1}, {"x": 0.5, "more": "is ignored"}], "shares": {"a": 1.0}}


def record(values: dict[str, Any]) -> Record:
    return Record("test.series", values, machine={}, versions={}, commit=None)


@pytest.mark.parametrize("values", [VALID, VALID | {"note": None}, VALID | {"points": ({"x": 1.0},)}])
def test_values_that_fit_a_schema_are_returned(values: dict[str, Any]) -> None:
    assert checked_values(record(values), Series) == values


@pytest.mark.parametrize("changes, message", [
    ({"count": 0}, "count must be above 0, got 0"), ({"count": True}, "count must be int, got True"),
    ({"points": []}, "points must be not empty"), ({"points": [{"x": 1.0}, {}]}, r"points\[1\]\.x is missing"),
    ({"points": [{"x": "far"}]}, r"points\[0\]\.x must be float, got 'far'"), ({"points": 5}, "points must be"),
    ({"shares": {"a": None}}, r"shares\['a'\] must be float, got None"),
    ({"note": 5}, r"note must be str \| None, got 5"),
])  # fmt: skip
def test_wrong_field_raises_record_error_with_its_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=f"Record of kind test.series: {message}"):
        checked_values(record(VALID | changes), Series)


def test_union_of_schemas_accepts_either_and_names_a_field_of_the_first() -> None:
    schema: Any = Series | Failure
    assert checked_values(record({"failed": "no link"}), schema)
    with pytest.raises(RecordError, match="count is missing"):
        checked_values(record({}), schema)


def test_columns_of_different_lengths_raise_record_error() -> None:
    check_same_length("run", seconds=[1.0], loss=[2.0])
    with pytest.raises(RecordError, match="run: fields must have the same length, but seconds has 1, loss has 2"):
        check_same_length("run", seconds=[1.0], loss=[2.0, 3.0])
