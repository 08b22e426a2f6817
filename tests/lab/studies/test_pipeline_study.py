"""The pipeline study: stages of a GPT, boundaries in one process, Records, tables, and real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from laconic.errors import ConfigError
from laconic.pipeline import compress
from laconic.records import Record
from laconic.train.models import GPT, GPTConfig, seeded
from laconic_lab.bench.corpus import Corpus
from laconic_lab.studies.pipeline import STUDY, model, runner, training
from laconic_lab.studies.pipeline.experiments import EXPERIMENTS, TIMES, settings_of
from laconic_lab.studies.pipeline.model import Boundary, build_stages, chain, stages_of
from laconic_lab.studies.pipeline.settings import REPEATED, Setting
from laconic_lab.studies.pipeline.training import Training
from ranks import failures, run_ranks, same

CPU = torch.device("cpu")
TINY = GPTConfig(context=16, width=32, layers=2, heads=2)
SMALL: dict[str, Any] = {"size": "tiny", "steps": 4, "warmup": 1, "micro_batches": 2, "windows": 4}


@pytest.fixture(autouse=True)
def _tiny(tiny_text: Callable[..., None]) -> None:
    tiny_text(model, training, TINY)


def test_stages_compute_what_the_model_computes() -> None:
    with seeded(3):
        gpt = GPT(GPTConfig(context=16, width=32, layers=4, heads=2))
    x = torch.randint(256, (3, 16))
    for count in (1, 2, 3, 4):
        assert torch.equal(chain(stages_of(gpt, count), [], x), gpt(x))
    with pytest.raises(ConfigError, match="a GPT of 4 layers has 1 to 4 stages, got 5"):
        stages_of(gpt, 5)


def test_uncompressed_boundaries_change_nothing_and_bytes_are_those_of_messages(corpus: Corpus) -> None:
    one = Training(Setting(1, **SMALL), 0, corpus, CPU)
    two = Training(Setting(2, **SMALL), 0, corpus, CPU)
    assert [one.step(step) for step in range(3)] == [two.step(step) for step in range(3)]
    values = Training(Setting(2, "thc:4", "qsgd:8", **SMALL), 0, corpus, CPU).run()
    assert values["plain_bytes"] == 4 * 4 * 8 * 16 * 32
    assert 4 < values["plain_bytes"] / values["forward_bytes"] < 8
    assert 2 < values["plain_bytes"] / values["backward_bytes"] < 4
    assert len(values["validation_loss"]) == 2 and values["validation_loss"][-1] < 6


def test_differences_and_projections_train(corpus: Corpus) -> None:
    setting = Setting(2, "qsgd:3", "thc:4", delta=True, samples=REPEATED, pool=4, **SMALL)
    run = Training(setting, 0, corpus, CPU)
    run.run()
    assert len(run.boundaries[0].forward_sender.copies.by_sample) == 4  # type: ignore[union-attr]
    narrow = Training(Setting(2, "thc:4", "thc:4", bottleneck=4, **{**SMALL, "windows": 32}), 0, corpus, CPU)
    assert narrow.run()["ratio"] > 20


def test_stage_that_reads_the_tokens_completes_what_a_bottleneck_leaves_out(corpus: Corpus) -> None:
    with seeded(3):
        gpt = GPT(GPTConfig(context=16, width=32, layers=2, heads=2))
        for block in gpt.blocks:  # without blocks all activations are known from the tokens
            torch.nn.init.zeros_(block.attention.out.weight), torch.nn.init.zeros_(block.down.weight)
        narrow, completed = (stages_of(gpt, 2, 4, reads_tokens=reads) for reads in (False, True))
    x = torch.randint(256, (3, 16))
    assert torch.allclose(chain(completed, [], x), gpt(x), atol=1e-5)
    assert not torch.allclose(chain(narrow, [], x), gpt(x), atol=1e-3)
    setting = Setting(2, "thc:4", "thc:4", bottleneck=8, reads_tokens=True, **{**SMALL, "windows": 32})
    run = Training(setting, 0, corpus, CPU)
    before = [p.detach().clone() for p in run.stages[1].parameters()]
    assert run.run()["ratio"] > 40 and setting.method == "thc:4, 4 of 32, tokens"
    assert not any(torch.equal(p, q) for p, q in zip(run.stages[1].parameters(), before, strict=True))
    with pytest.raises(ConfigError, match="give a bottleneck"):
        replace(setting, bottleneck=0)


def test_finished_runs_are_not_repeated_and_fill_the_tables(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "load_corpus", lambda *_, **__: corpus)
    monkeypatch.setattr(
        runner, "settings_of",
        lambda *_: [Setting(2, **SMALL), Setting(2, "thc:4", "thc:4", **SMALL), Setting(2, "bf16", "bf16", **SMALL)],
    )  # fmt: skip
    first = runner.run("bits", records=tmp_path, device="cpu", iterations=3)
    again = runner.run("bits", records=tmp_path, device="cpu", iterations=3)
    assert [one.values for one in first] == [one.values for one in again]
    times = [
        Record("pipeline.time", {
            "key": codec, "link": "100mbit", "stages": 2, "model": "gpt2", "codec": codec, "seconds": [seconds],
            "sent_nbytes": 1e6, "encode_s": 0.0, "decode_s": 0.0, "valid": True, "made_of": "paced sockets",
            "micro_batches": 4,
        })
        for codec, seconds in (("none", 6.0), ("thc:4", 1.0))
    ]  # fmt: skip
    results = STUDY.results([*first, *times])
    tables = {table.title: table for table in STUDY.all_tables(results)}
    assert {"Scoreboard", "Both directions by bits", "Step times"} == set(tables)
    assert tables["Step times"].rows[1][5] == "6.00"
    findings = {finding.claim.key: finding for finding in STUDY.findings(results)}
    assert findings["time"].verdict == "yes, one run" and set(findings) == {"loss2", "bytes", "time"}
    assert STUDY.plots(results)[0].ident == "pipeline-bits"


def test_settings_of_experiments_are_distinct() -> None:
    for experiment in EXPERIMENTS:
        if experiment != TIMES:
            methods = [(each.method, each.stages, each.samples) for each in settings_of(experiment)]
            assert len(set(methods)) == len(methods) > 4
    assert [each.stages for each in settings_of("bits", ["1m"], ["thc:4"])] == [2, 4]
    with pytest.raises(ConfigError, match="size must be one of"):
        Setting(2, size="9t")
    with pytest.raises(ConfigError, match="samples must be fresh or repeated"):
        replace(Setting(2), samples="stale")


def real(rank: int, world: int) -> dict[str, Any]:
    """A GPT on two ranks has the gradients of the boundaries in one process, bit for bit."""
    model.SIZES["tiny"] = TINY
    tokens, results = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(1)), {}
    for width, reads in ((0, False), (8, True)):
        ours = build_stages("tiny", world, 0, width, reads_tokens=reads)[rank]
        stage = PipelineStage(ours, rank, world, CPU)
        compress(stage, "thc:3", "qsgd:4")
        schedule = Schedule1F1B(stage, 4, loss_fn=loss)
        stages = build_stages("tiny", world, 0, width, reads_tokens=reads)
        boundary = Boundary(0, "thc:3", "qsgd:4", False)
        for _ in range(2):
            ours.zero_grad()
            if rank == 0:
                schedule.step(tokens[:, :-1])
            else:  # each rank reads the tokens itself
                schedule.step(target=tokens[:, 1:], **({"tokens": tokens[:, :-1]} if reads else {}))
            for part in stages:
                part.zero_grad()
            for number, batch in enumerate(tokens.tensor_split(4)):
                received = boundary.cross(stages[0](batch[:, :-1]), number)
                loss(stages[1](received, batch[:, :-1]), batch[:, 1:]).backward()
        expected = [p.grad / 4 for p in stages[rank].parameters() if p.grad is not None]
        results[f"same {width}"] = same([p.grad for p in ours.parameters()], expected)
    return results


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.slow
def test_real_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    assert not failures(run_ranks(real, 2, tmp_path), "same")


@pytest.mark.slow
def test_steps_of_real_ranks_are_timed_over_paced_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic_lab.studies.pipeline import times

    monkeypatch.setattr(times, "STAGES", (2,))
    monkeypatch.setattr(times, "MODELS", {"gpt2": {"width": 64, "context": 512, "windows": 1, "pause_s": 0.001}})
    records = runner.run("times", methods=["none", "thc:4"], links=["20mbit"], iterations=2, records=tmp_path)
    by_codec = {record.values["codec"]: record.values for record in records}
    assert 7 < by_codec["none"]["sent_nbytes"] / by_codec["thc:4"]["sent_nbytes"] < 8
    assert min(by_codec["none"]["seconds"]) > 2 * min(by_codec["thc:4"]["seconds"])
