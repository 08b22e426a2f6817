"""Schemes of compressed layers: their text, and errors in it."""

from __future__ import annotations

import pytest

from laconic.errors import ConfigError
from laconic.layers import parse_scheme


@pytest.mark.parametrize(
    "text", ["monarch:0.1", "monarch:0.05,conv=0.2", "lowrank:0.2", "subspace:0.1", "subspace:0.1,T=7", "hashed:0.5"]
)
def test_scheme_round_trips_through_its_text(text: str) -> None:
    assert str(parse_scheme(text)) == text and parse_scheme(parse_scheme(text)) == parse_scheme(text)


def test_rho_may_be_a_separate_argument() -> None:
    assert parse_scheme("monarch", rho=0.1) == parse_scheme("monarch:0.1") == parse_scheme("monarch:0.1", rho=0.1)
    assert parse_scheme("subspace:T=5,rho=0.2") == parse_scheme("subspace:0.2,T=5")
    assert str(parse_scheme("subspace:0.1,T=100")) == "subspace:0.1"


@pytest.mark.parametrize("text, rho, message", [
    ("monarch", None, "scheme 'monarch' needs rho, the fraction of entries that is kept, such as monarch:0.1"),
    ("monarc:0.1", None, "unknown scheme 'monarc' in 'monarc:0.1'; valid schemes: hashed, lowrank, monarch, subs"),
    ("lowrank:0", None, r"scheme 'lowrank': rho must be in \(0, 1\), got 0"),
    ("lowrank:1.5", None, r"rho must be in \(0, 1\), got 1.5"), ("lowrank:nan", None, "rho must be a finite number"),
    ("monarch:0.1,conv=2", None, r"conv must be in \(0, 1\), got 2"),
    ("subspace:0.1,T=-1", None, "T must not be negative, got -1"),
    ("subspace:0.1,T=x", None, "T must be a whole number"),
    ("subspace:T=4", None, "scheme 'subspace' in 'subspace:T=4' needs rho"),
    ("hashed:0.1,T=4", None, "scheme 'hashed' has no argument 'T'; it takes rho"),
    ("hashed:0.1", 0.2, "'hashed:0.1' contains rho 0.1, but rho=0.2 was given as well"),
])  # fmt: skip
def test_wrong_scheme_raises_config_error(text: str, rho: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_scheme(text, rho=rho)
