"""Code lengths by context: they are those of known distributions, causal, and see what earlier messages tell."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.errors import ConfigError
from laconic_lab.bench.corpus import Corpus
from laconic_lab.studies.gpt import model, positions, runner, selections, training
from laconic_lab.studies.gpt.contexts import POSITIONS, SIGNS, code_length, position_features, sign_features
from laconic_lab.studies.gpt.messages import HISTORY, Exchange, Matrix
from laconic_lab.studies.gpt.model import Shape
from laconic_lab.studies.gpt.results import Results
from laconic_lab.studies.gpt.settings import Setting
from laconic_lab.studies.gpt.tables import make_tables

SHAPE = (96, 256)
INDEPENDENT = 64 * -(1 / 64 * math.log2(1 / 64) + 63 / 64 * math.log2(63 / 64))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed))


def matrix(changes: list[Tensor]) -> Matrix:
    """Return a matrix with these changes of two workers, who sent the largest values."""
    weights, exchanges = 0.1 * normal(99), deque[Exchange](maxlen=HISTORY + 2)
    for i, change in enumerate(changes):
        sent = torch.stack([torch.where(selections.largest(x), x.sign(), 0.0) for x in change]).to(torch.int8)
        exchanges.append(Exchange(weights + 0.01 * normal(50 + i), sent, change))
    return Matrix("mlp.up", True, weights, exchanges)


def measured(changes: list[Tensor]) -> dict[str, Any]:
    total = positions._Totals()
    total.add([matrix(changes)])
    return total.values()


def test_code_length_is_the_conditional_entropy() -> None:
    context = (normal(0, 200_000) > 0).double()
    p = torch.where(context > 0, 0.2, 0.01).double()
    outcomes = torch.rand(200_000, generator=torch.Generator().manual_seed(1)).double() < p
    entropy = float(selections._entropy(p).sum())
    informed, blind = (code_length(({"c": context}, outcomes), ({"c": context}, outcomes), n) for n in (("c",), ()))
    assert informed == pytest.approx(entropy, rel=0.02) and blind > 1.15 * informed


def test_features_so_far_do_not_see_what_follows() -> None:
    change = normal(3)
    selected = selections.largest(change)
    other = selected.clone()
    row, column = 40, 100
    other[row, column:] ^= True
    other[row + 1 :] ^= True
    at = row * SHAPE[1] + column + 1  # everything before this value, and its own features
    seen, blind = (position_features(x, 0, change, [], change, change) for x in (selected, other))
    for name in POSITIONS["row, column and neighbours so far"]:
        if name.endswith(("1", "8")):  # the mean rate is known; compare what is counted
            continue
        assert torch.equal(seen[name][:at], blind[name][:at]), name
    rates = [position_features(x, 0, change, [], change, change)["row so far 1"].view(SHAPE) for x in (selected, other)]
    same = rates[0][:, :1] == rates[1][:, :1]
    assert bool(same.all())  # nothing has been counted at the start of a row


def test_independent_positions_have_no_cheaper_context() -> None:
    bits = measured([torch.stack([normal(10 * i + w) for w in range(2)]) for i in range(5)])
    for context, found in bits["positions"].items():
        if "unsent" not in context:  # norms tell where the largest values are
            assert found == pytest.approx(INDEPENDENT, abs=0.35), context
    assert bits["positions"]["none"] == pytest.approx(INDEPENDENT, abs=0.01)
    assert bits["signs"]["all of these"] == pytest.approx(1.0, abs=0.05)


def test_uneven_rows_and_columns_are_cheaper_by_their_contexts() -> None:
    scale = torch.exp(1.5 * normal(7, SHAPE[0], 1))
    rows = measured([torch.stack([scale * normal(10 * i + w) for w in range(2)]) for i in range(5)])["positions"]
    assert rows["row so far"] < INDEPENDENT - 1.5 < rows["column so far"]
    assert rows["rows and columns of earlier messages"] < rows["row so far"]
    scale = torch.exp(1.5 * normal(8, 1, SHAPE[1]))
    columns = measured([torch.stack([scale * normal(10 * i + w) for w in range(2)]) for i in range(5)])["positions"]
    assert columns["column so far"] < INDEPENDENT - 1.5 < columns["row so far"]


def test_repeated_messages_are_cheap_by_what_was_sent_before() -> None:
    fixed = torch.stack([normal(w) for w in range(2)])
    bits = measured([fixed + 0.05 * normal(20 + i, 2, *SHAPE) for i in range(5)])
    assert bits["positions"]["what was sent here before"] < 0.5 * INDEPENDENT
    assert bits["signs"]["what was sent here before"] < 0.1 < 0.9 < bits["signs"]["none"]


def test_sign_features_are_those_of_sent_values() -> None:
    change = normal(1)
    selected = selections.largest(change)
    past = Exchange(change, torch.stack([change.sign()] * 2).to(torch.int8), torch.empty(0))
    features = sign_features(selected, 1, change, [past], change, torch.zeros_like(change))
    assert set(features) == {name for names in SIGNS.values() for name in names}
    assert torch.equal(features["own last"], change[selected].sign().double())
    assert torch.equal(features["weight"], change[selected].sign().double())


def test_chunks_keep_what_the_codec_keeps() -> None:
    change = normal(5)
    for chunk in (64, 4096):
        bits, norm = selections.largest_of_chunks(change, chunk)
        decoded = laconic.decode(laconic.encode(change, f"topk:0.015625,chunk={chunk}"))
        assert norm == pytest.approx(float(decoded.double().square().sum()), rel=1e-6)
        assert 6.0 <= bits < INDEPENDENT


def test_price_trades_norm_for_cheap_positions() -> None:
    change = normal(6)
    assert torch.equal(selections.priced(change, 0.0), selections.largest(change))
    norms = [float(change[selections.priced(change, price)].square().sum()) for price in (0.0, 0.1, 0.3)]
    assert norms[0] > norms[1] > norms[2] > 0
    rows = [float(selections.priced(change, price).double().sum(1).var()) for price in (0.0, 0.3)]
    assert rows[1] > 2 * rows[0]  # it prefers rows that are selected often


def test_least_information_grows_to_that_of_the_largest_values() -> None:
    change = normal(8)
    found = [selections.least_information(change, share) for share in (0.5, 0.9, 0.97, 0.999)]
    assert found == sorted(found) and found[0] > 0 and found[-1] < INDEPENDENT
    assert found[2] < selections.largest_of_chunks(change, 64)[0] + 1


def test_part_positions_records_contexts_and_shows_them(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tiny_text: Callable[..., None]
) -> None:
    tiny_text(model, training, Shape(1, 64, 2, 16))
    monkeypatch.setattr(runner, "load_corpus", lambda folder: corpus)
    sparse = "topk:0.015625|sign"
    setting = Setting("x", "local", size="tiny", workers=2, batch=4, warmup=2, every=2, up=sparse, down=sparse)
    records = runner.run("positions", settings=[setting], iterations=8, records=tmp_path, device="cpu")
    found = [record.values for record in records if record.kind == positions.CONTEXTS]
    assert [values["matrices"] for values in found] == list(positions.GROUPS)
    assert all(set(values["positions"]) == set(POSITIONS) and set(values["signs"]) == set(SIGNS) for values in found)
    again = runner.run("positions", settings=[setting], iterations=8, records=tmp_path, device="cpu")
    assert [r.to_json() for r in again] == [r.to_json() for r in records]
    tables = {table.title: table for table in make_tables(Results(records))}
    assert len(tables["Bits by context"].rows) == len(POSITIONS) + len(SIGNS)
    assert len(tables["Bits by selection"].rows) == 1 + len(selections.CHUNKS) + len(selections.PRICES) + 1
    with pytest.raises(ConfigError, match="contexts need two exchanges, got 2 steps"):
        runner.run("positions", settings=[setting], iterations=2, records=tmp_path / "short", device="cpu")
