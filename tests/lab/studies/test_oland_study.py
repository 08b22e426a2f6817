"""Experiments of oland2015: planned, trained, recorded and resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from laconic.errors import ConfigError, FileError
from laconic.records import Record
from laconic.train.data import Images, load
from laconic_lab.studies.oland2015 import STUDY, buckets, error_decomposition, experiments
from laconic_lab.studies.oland2015.coding import CODEC, huffman_bits, lzw_nbytes
from laconic_lab.studies.oland2015.experiments import TRAINED
from laconic_lab.studies.oland2015.runner import batched
from laconic_lab.studies.oland2015.settings import BASELINE, Setting

SMALL = Setting(batch=40, lr=0.4)


@pytest.fixture(scope="module")
def images() -> Images:
    digits = load("digits")
    return replace(
        digits, train_images=digits.train_images[:160], train_labels=digits.train_labels[:160],
        test_images=digits.test_images[:100], test_labels=digits.test_labels[:100],
    )  # fmt: skip


@pytest.mark.parametrize("experiment", TRAINED)
def test_experiment_computes_what_real_frames_give(images: Images, experiment: str) -> None:
    last = list(experiments.settings_of(experiment, SMALL))[-1]
    one, other = (
        STUDY.run(experiment, runs=1, epochs=1, workers=2, data=images, settings=[last], real_packets=real)[0]
        for real in (False, True)
    )
    assert (one.values["part"], one.values["runs"], one.kind) == (experiment, 1, "study.oland2015")
    for name in ("peak", "final", "peak_epoch", "raw_bits", "whole_bits"):
        assert one.values[name] == other.values[name], name
    assert one.values["packets_compared"] == 3 and other.values["packets_compared"] == 0
    assert one.values["packets_other_values"] == one.values["packets_other_sizes"] == 0
    # Computed: one worker's frame an epoch; sent: all workers'.
    assert one.values["coded_bits"] == pytest.approx(other.values["coded_bits"], rel=0.1)
    assert json.loads(one.to_json())["values"]["codec"] == last.quantizer.spec


def test_settings_of_an_experiment_are_distinct() -> None:
    assert {one: len(list(experiments.settings_of(one, Setting()))) for one in TRAINED} == {
        "headline": 3, "fixed": 30, "grid": 16, "entropy": 1, "map": 108, "collapse": 1, "beyond": 64, "gradients": 7,
    }  # fmt: skip
    for experiment in TRAINED:
        settings = list(experiments.settings_of(experiment, Setting()))
        assert len(set(settings)) == len(settings)


def test_interrupted_experiment_continues_from_its_records(images: Images, tmp_path: Path) -> None:
    def go(runs: int, seen: list[int]) -> list[Record]:
        def progress(name: str, done: int, total: int) -> None:
            seen.append(done)
            if runs == 3 and done == 4:
                raise KeyboardInterrupt

        settings = [replace(SMALL, quantizer=q) for q in experiments.HEADLINE]
        return STUDY.run(
            "headline", runs=2, epochs=1, workers=2, data=images, settings=settings, records=tmp_path, batch_runs=2,
            progress=progress,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        go(3, [])
    assert len((tmp_path / "headline.jsonl").read_text().splitlines()) == 1
    seen: list[int] = []
    first = go(2, seen)
    assert seen == [2, 4, 6]
    with (tmp_path / "headline.jsonl").open("a") as file:
        file.write('{"kind": "study')  # as after a power cut
    seen = []
    assert go(2, seen) == first and seen == [6]
    (tmp_path / "headline.jsonl").write_text("nonsense\n")
    with pytest.raises(FileError, match=r"line 1 of .* is no record"):
        go(2, [])


def test_batches_of_units_have_at_most_so_many_runs() -> None:
    units = experiments.units_of("headline", list(experiments.settings_of("headline", Setting())), 600)
    assert [unit.runs for unit in units[:3]] == [250, 250, 100]
    assert [sum(unit.runs for unit in batch) for batch in batched(units, 700)] == [600, 600, 600]
    assert [len(batch) for batch in batched(units, 1)] == [1] * 9


def test_step_by_exchanged_gradients_equals_a_step_of_one_worker(images: Images) -> None:
    """Two workers that send exact gradients act like one worker with twice the mini-batch."""
    from laconic_lab.studies.oland2015.network import Batches, Networks
    from laconic_lab.studies.oland2015.trials import _Exchange, _train_by_step

    device = torch.device("cpu")
    setting = replace(SMALL, l1=0.0, sends="gradients")
    data = Batches(images.train_images, images.train_labels, workers=2, batch=80, seed=0, pixels="unit", device=device)
    networks = Networks([setting], [0], 2, 0, device)
    alone = Networks([setting], [0], 1, 0, device)
    exchange = _Exchange(networks, [BASELINE], data, real_packets=False)
    traffic = _train_by_step(networks, 0, data, exchange, 0, 0, [])
    x, t = (torch.cat([one[0] for one in both]) for both in zip(*data.epoch(0), strict=True))
    alone.step(0, x, t, alone.rates(0, len(x)))
    for i in range(3):
        torch.testing.assert_close(networks.layer(1, i), alone.layer(0, i), rtol=1e-4, atol=1e-6)
    assert traffic.raw_bits.eq(32).all()


def test_error_decomposition_restores_the_networks_and_finds_the_shift() -> None:
    from laconic_lab.studies.oland2015.network import Networks

    networks = Networks([SMALL], [0], 2, 0, torch.device("cpu"))
    for k in range(2):  # nearly all weights tiny, a few large ones of one sign: the fullest bin is off zero
        networks.w1[k].mul_(1e-3)
        networks.w1[k].view(-1)[:300] = 0.7
    before = [networks.state(k) for k in range(2)]
    decomposition = error_decomposition.dissect(networks, 0, lambda: torch.tensor([7]))
    assert all(torch.equal(x, y) for k in range(2) for x, y in zip(networks.state(k), before[k], strict=True))
    assert set(error_decomposition.VARIANTS) < set(decomposition)
    assert decomposition["share"] > 0.99 and decomposition["offset"] > 10 * decomposition["spread"]


@pytest.mark.parametrize("arguments, words", [
    ({"runs": 0}, "at least 1"), ({"epochs": 0}, "epochs must be at least 1"), ({"device": "tpu"}, "device must be"),
    ({"batch_runs": 0}, "at least 1"),
])  # fmt: skip
def test_invalid_arguments_raise_config_error(images: Images, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        STUDY.run(**{"experiment": "headline", "data": images} | arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"lr": 0.0}, {"decay": 1.1}, {"l1": -1.0}, {"pixels": "red"}, {"sends": "mail"}])
def test_invalid_settings_raise_config_error(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Setting(**fields)  # type: ignore[arg-type]


def test_lzw_and_huffman_count_what_they_would_write() -> None:
    noise = torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8).numpy().tobytes()
    assert lzw_nbytes(b"") == 0 and lzw_nbytes(noise) > len(noise) and lzw_nbytes(b"ab" * 10_000) < 1000
    assert lzw_nbytes(b"abab") == 4  # a, b and ab, of nine bits each
    assert huffman_bits([4, 2, 1, 1]) == 4 * 1 + 2 * 2 + 3 + 3


def test_coded_weights_are_recorded_once(images: Images, tmp_path: Path) -> None:
    def go() -> list[Record]:
        return STUDY.run("coding", runs=2, epochs=1, workers=2, data=images, records=tmp_path, default=SMALL)

    first, second = go()
    values = first.values
    assert values["codec"] == CODEC and values["nbytes"] == 4 * (784 * 392 + 392 * 50 + 50 * 10)
    assert 0 < values["side_nbytes"] < values["frame_nbytes"] < values["nbytes"] and values["encode_s"] > 0
    assert [one.to_json() for one in go()] == [first.to_json(), second.to_json()]
    (table,) = [one for one in STUDY.all_tables(STUDY.load(tmp_path)) if one.title == "What coding saves and costs"]
    assert len(table.rows) == 2
    assert {one.claim.key for one in STUDY.findings(STUDY.load(tmp_path))} == {"lzw", "side", "cost"}


def test_buckets_are_recorded_once(images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets.run_all, "__kwdefaults__", {"specs": ("none", "adaptive:5.0|rans"), "epochs": 1})
    recorded = STUDY.run("buckets", data=images, records=tmp_path)
    assert [one.values["codec"] for one in recorded] == ["none"] * 2 + ["adaptive:5.0|rans"] * 2
    monkeypatch.setattr(buckets, "_train", None)
    assert STUDY.run("buckets", data=images, records=tmp_path) == recorded
    tables = {table.title: table for table in STUDY.all_tables(STUDY.load(tmp_path))}
    assert [row[0] for row in tables["Gradients of the whole network in one packet"].rows] == [
        "`none`", "`adaptive:5.0|rans`",
    ]  # fmt: skip
