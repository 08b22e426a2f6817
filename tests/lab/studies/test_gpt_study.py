"""The GPT study: stacked replicas, inner optimizers, computed codecs and exchanges agree with torch and with frames."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic import counters
from laconic.errors import ConfigError, FileError
from laconic_lab.bench.corpus import Corpus
from laconic_lab.studies.gpt import model, runner, training
from laconic_lab.studies.gpt.experiments import EXPERIMENTS, settings_of
from laconic_lab.studies.gpt.frames import FrameLog
from laconic_lab.studies.gpt.inner import InnerOptimizer
from laconic_lab.studies.gpt.local_exchange import LocalExchange
from laconic_lab.studies.gpt.model import Replicas, Shape
from laconic_lab.studies.gpt.settings import Setting
from laconic_lab.studies.gpt.simulated import Simulated
from laconic_lab.studies.gpt.text import load_corpus
from laconic_lab.studies.gpt.training import Training
from laconic_lab.studies.text_runs import run_key

CPU = torch.device("cpu")
TINY = Shape(1, 64, 2, 16)
SMALL: dict[str, Any] = {"size": "tiny", "workers": 2, "batch": 4, "steps": 8, "warmup": 2}


@pytest.fixture(autouse=True)
def _tiny(tiny_text: Callable[..., None]) -> None:
    tiny_text(model, training, TINY)


def tokens(workers: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (workers, 3, TINY.context + 1), generator=generator)


def test_stacked_workers_have_the_gradients_of_single_ones() -> None:
    together, batch = Replicas(TINY, 2, 5, CPU), tokens(2)
    together.rows[1].mul_(1.1)
    losses = together.backward(batch)
    for worker in range(2):
        alone = Replicas(TINY, 1, 5, CPU)
        alone.rows.copy_(together.rows[worker : worker + 1])
        torch.testing.assert_close(alone.backward(batch[worker : worker + 1]), losses[worker : worker + 1])
        torch.testing.assert_close(alone.gradients[0], together.gradients[worker], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_inner_optimizer_steps_as_torch_does(kind: str) -> None:
    setting = Setting("x", optimizer=kind, lr=1e-2)
    replicas = Replicas(TINY, 2, 0, CPU)
    optimizer = InnerOptimizer(replicas, setting)
    optimizer.lr.fill_(setting.lr)
    matrices = [slots.of(replicas.rows)[1].clone() for slots in TINY.slots]
    hidden = [x for stack, slots in zip(matrices, TINY.slots, strict=True) if slots.hidden for x in stack.unbind(0)]
    others = [stack for stack, slots in zip(matrices, TINY.slots, strict=True) if not slots.hidden]
    steppers: list[torch.optim.Optimizer]
    if kind == "muon":
        muon = torch.optim.Muon(hidden, lr=20 * setting.lr, momentum=0.95, weight_decay=0.1, ns_steps=5)
        steppers = [muon, torch.optim.AdamW(others, lr=setting.lr, betas=(0.9, 0.95), weight_decay=0.1)]
    else:
        steppers = [torch.optim.AdamW([*hidden, *others], lr=setting.lr, betas=(0.9, 0.95), weight_decay=0.1)]
    for step in range(3):
        gradients = torch.randn(replicas.rows.shape, generator=torch.Generator().manual_seed(step))
        gradients[1] /= gradients[1].norm() * 2  # below the clipping norm
        replicas.gradients.copy_(gradients)
        views = [slots.of(gradients)[1] for slots in TINY.slots]
        stacks = [x for stack, slots in zip(views, TINY.slots, strict=True) if slots.hidden for x in stack.unbind(0)]
        for parameter, gradient in zip([*hidden, *others], [*stacks, *views[4:]], strict=True):
            parameter.grad = gradient.clone()
        for stepper in steppers:
            stepper.step()
        optimizer.step()
    expected = torch.cat([stack.flatten() for stack in (*hidden, *others)])
    # torch's Muon iterates in bfloat16
    tolerance = 2e-2 if kind == "muon" else 1e-5
    torch.testing.assert_close(replicas.rows[1], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "spec",
    [
        "sign",
        "topk:0.1",
        "topk:0.1|sign",
        "topk:0.03,chunk=4096|sign",
        "topk:0.1,code=rans|bf16",
        "bf16",
        "none",
        "topk:0.02|bins:2",
        "bins:3",
    ],
)
def test_computed_values_are_those_of_frames(spec: str) -> None:
    x = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(1))
    x[:, ::7] = x[:, ::7].round(decimals=1)  # equal magnitudes
    decoded = Simulated(spec).decode(x)
    for row, values in zip(x, decoded, strict=True):
        torch.testing.assert_close(values, laconic.decode(laconic.encode(row, spec)), rtol=1e-5, atol=1e-6)


def test_stage_that_is_not_computed_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not compute the stage 'qsgd'"):
        Simulated("topk:0.1|qsgd:4")


def test_exchange_is_that_of_channels_with_frames() -> None:
    codec, decay, rounds = "topk:0.1|sign", 0.9, 3
    setting = Setting("x", "local", size="tiny", workers=2, steps=100, every=1, up=codec, down=codec, decay=decay)
    setting = replace(setting, small="none")
    replicas = Replicas(TINY, 2, 0, CPU)
    exchange = LocalExchange(replicas, setting, FrameLog())
    policy = laconic.Policy(min_numel=0)
    up = [laconic.channel(f"ef:{decay}|{codec}", policy=policy) for _ in range(2)]
    down = laconic.channel(f"ef:{decay}|{codec}", policy=policy)
    anchors = {
        (slots.name, i): slots.of(exchange.anchor)[i].clone() for slots in TINY.slots for i in range(slots.count)
    }
    for step in range(rounds):
        changes = 1e-2 * torch.randn(replicas.rows.shape, generator=torch.Generator().manual_seed(step))
        replicas.rows.add_(changes)
        for slots in TINY.slots:
            for i in range(slots.count):
                name, anchor = f"{slots.name}.{i}", anchors[slots.name, i]
                parts = [slots.of(row)[i] for row in replicas.rows]
                sent = [laconic.decode(c.encode(name, anchor - x)) for c, x in zip(up, parts, strict=True)]
                anchor -= laconic.decode(down.encode(name, torch.stack(sent).mean(0)))
        exchange.after_step(step + 1)
        for (name, i), anchor in anchors.items():
            slots = next(each for each in TINY.slots if each.name == name)
            torch.testing.assert_close(slots.of(exchange.anchor)[i], anchor, rtol=1e-4, atol=1e-6)
        assert torch.equal(replicas.rows, exchange.anchor.expand_as(replicas.rows))


def test_one_worker_without_compression_is_the_bare_optimizer(corpus: Corpus) -> None:
    alone = Training(Setting("a", **{**SMALL, "workers": 1}), 0, corpus, CPU)
    local = Training(Setting("b", "local", every=3, small="none", **{**SMALL, "workers": 1}), 0, corpus, CPU)
    for run in (alone, local):
        run.run()
    torch.testing.assert_close(local.model, alone.model, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("exchange", ["codec", "powersgd", "onebit-adam", "demo"])
def test_methods_that_exchange_gradients_keep_workers_equal(exchange: str, corpus: Corpus) -> None:
    # 1-bit Adam freezes the second moment after 15 % of the steps, the first of which has no gradients of hidden layers
    setting = Setting("x", exchange, up="topk:0.1|sign", down="topk:0.1|sign", rank=2, **{**SMALL, "steps": 30})
    run = Training(setting, 0, corpus, CPU)
    values = run.run()
    assert torch.equal(run.replicas.rows[0], run.replicas.rows[1])
    assert values["ratio"] > 1 and values["frames_other"] == 0


def test_fragments_exchange_every_parameter_once_an_interval() -> None:
    setting = Setting("x", "local", size="tiny", workers=2, steps=16, every=8, fragments=4)
    replicas = Replicas(TINY, 2, 0, CPU)
    exchange = LocalExchange(replicas, setting, FrameLog())
    seen = [(slots.name, i) for part in exchange.fragments for slots, a, b in part for i in range(a, b)]
    assert sorted(seen) == sorted((slots.name, i) for slots in TINY.slots for i in range(slots.count))
    equal = []
    for step in range(1, 9):
        replicas.rows.add_(torch.randn(replicas.rows.shape, generator=torch.Generator().manual_seed(step)))
        exchange.after_step(step)
        equal.append(int((replicas.rows[0] == replicas.rows[1]).sum()))
    assert [count > 0 for count in equal] == [False, True] * 4


def exchanged_steps(setting: Setting) -> list[int]:
    """Return the steps after which the workers were equal."""
    replicas = Replicas(TINY, 2, 0, CPU)
    exchange = LocalExchange(replicas, setting, FrameLog())
    steps = []
    for step in range(1, setting.steps + 1):
        replicas.rows.add_(torch.randn(replicas.rows.shape, generator=torch.Generator().manual_seed(step)))
        exchange.after_step(step)
        if torch.equal(replicas.rows[0], replicas.rows[1]):
            steps.append(step)
    return steps


def test_pace_by_rate_exchanges_as_often_but_earlier() -> None:
    even = Setting("x", "local", size="tiny", workers=2, steps=80, warmup=4, final=0.0, every=8)
    paced = exchanged_steps(replace(even, pace="rate"))
    assert exchanged_steps(even) == list(range(8, 81, 8))
    assert len(paced) in (10, 11) and paced[-1] == 80
    assert paced[4] < 40 and paced[-1] - paced[-2] > 8


def test_settling_sends_residuals_and_averaging_takes_the_last_models() -> None:
    setting = Setting("x", "local", size="tiny", workers=2, steps=1, every=1, up="sign", down="sign", small="none")
    left = []
    for settle in (1, 8):
        replicas = Replicas(TINY, 2, 0, CPU)
        exchange = LocalExchange(replicas, replace(setting, settle=settle), FrameLog())
        replicas.rows.add_(torch.randn(replicas.rows.shape, generator=torch.Generator().manual_seed(0)))
        target = replicas.rows.mean(0)
        exchange.after_step(1)
        left.append(float((exchange.model - target).norm()))
    assert left[1] < 0.6 * left[0]
    averaged = replace(setting, up="none", down="none", steps=4, averaged=0.5)
    replicas = Replicas(TINY, 2, 0, CPU)
    exchange = LocalExchange(replicas, averaged, FrameLog())
    begin = exchange.anchor.clone()
    for step in range(1, 5):
        replicas.rows.add_(1.0)
        exchange.after_step(step)
    torch.testing.assert_close(exchange.model, begin + 3.0)  # of 2, 3 and 4


def test_finished_runs_are_not_repeated(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "load_corpus", lambda folder: corpus)
    settings = [Setting("a", **SMALL), Setting("b", "local", every=2, up="sign", down="sign", **SMALL)]
    first = runner.run("frontier", settings=settings, records=tmp_path, device="cpu")
    again = runner.run("frontier", settings=settings, records=tmp_path, device="cpu")
    assert [r.to_json() for r in first] == [r.to_json() for r in again]
    assert first[1].values["ratio"] > 10 and first[1].values["frames_compared"] > 0


def test_same_work_of_another_experiment_is_not_repeated(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "load_corpus", lambda folder: corpus)
    setting = Setting("a", **SMALL)
    (first,) = runner.run("frontier", settings=[setting], records=tmp_path, device="cpu")
    monkeypatch.setattr(runner, "Training", None)
    (again,) = runner.run("rates", settings=[setting], records=tmp_path, device="cpu")
    assert again.values["part"] == "rates" and again.at == first.at
    assert again.values["validation_loss"] == first.values["validation_loss"]


def test_one_of_64_values_takes_7_bits_with_ranks(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "load_corpus", lambda folder: corpus)
    setting = Setting("x", "local", every=2, up="sign", down="sign", **SMALL)
    records = runner.run("positions", settings=[setting], records=tmp_path, device="cpu")
    records = [record for record in records if record.kind == "gpt.positions"]
    bits = {record.values["spec"]: record.values["bits_per_sent"] for record in records}
    ranked = bits.pop("topk:0.015625,chunk=64,code=rank|sign")
    assert len(records) == 6 and all(ranked < other for other in bits.values())
    assert all(0 < record.values["arrived"] < 1 for record in records)


def test_settings_of_experiments_are_distinct() -> None:
    for name in EXPERIMENTS:
        keys = [run_key(setting, name, 0, "") for setting in settings_of(name)]
        assert keys and len(set(keys)) == len(keys)
    assert {s.size for s in settings_of("frontier", sizes=["1m"])} == {"1m"}
    assert {s.method for s in settings_of("frontier", methods=["DeMo"])} == {"DeMo"}


def test_text_that_is_read_more_than_once_is_counted(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    before, context = counters.counts().get("repeated_text", 0), model.SIZES["tiny"].context
    short = replace(corpus, train=corpus.train[: 8 * 4 * context])
    Training(Setting("a", **SMALL), 0, short, CPU)
    assert counters.counts().get("repeated_text", 0) == before
    Training(Setting("a", **SMALL), 0, replace(short, train=short.train[:-1]), CPU)
    assert counters.counts()["repeated_text"] == before + 1 and "by heart" in caplog.text


def test_corpus_has_the_packages_of_all_environments_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for i in range(64):
        (folder / f"{i}.py").write_bytes(bytes([i]) * (1 << 16))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(folder)])
    assert load_corpus().files == 64


def test_corpus_is_split_by_file(tmp_path: Path) -> None:
    for i in range(64):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i]) * (1 << 16))
    corpus = load_corpus(tmp_path)
    assert not set(corpus.train.tolist()) & set(corpus.validation.tolist())
    assert corpus.files == 64 and corpus.digest == load_corpus(tmp_path).digest
    with pytest.raises(FileError, match="expected at least 2 MB of text"):
        load_corpus(tmp_path / "missing")
