"""The planner's model of pipelines: bubbles, links, schedules, and the command."""

from __future__ import annotations

import pytest

from laconic.errors import ConfigError
from laconic.plan.pipeline import PipelineRequest, plan_pipeline, step_seconds
from laconic.plan.profile import load


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages, micro_batches", [(2, 1), (2, 4), (4, 4), (4, 16)])
def test_without_a_link_the_step_is_work_and_bubble(schedule, stages, micro_batches):
    seconds, worked = step_seconds(schedule, stages, micro_batches, forward_s=1.0, transfer_s=0.0)
    assert seconds == 3.0 * (micro_batches + stages - 1) and worked == 3.0 * micro_batches


def test_a_slow_link_decides_the_step():
    # Two stages, GPipe: all activations follow one another on the link, then all gradients.
    seconds, _ = step_seconds("gpipe", 2, 8, forward_s=0.001, transfer_s=1.0)
    assert 16.0 < seconds < 16.1
    # 1F1B sends both ways at once, except that it waits for a gradient before the third micro-batch.
    seconds, _ = step_seconds("1f1b", 2, 8, forward_s=0.001, transfer_s=1.0)
    assert 9.0 < seconds < 16.1
    with_delay, _ = step_seconds("gpipe", 2, 8, forward_s=0.001, transfer_s=1.0, delay_s=0.5)
    assert with_delay == pytest.approx(step_seconds("gpipe", 2, 8, forward_s=0.001, transfer_s=1.0)[0] + 1.0)


def test_coding_takes_time_of_the_stages():
    plain, _ = step_seconds("gpipe", 2, 1, forward_s=1.0, transfer_s=0.0)
    coded, _ = step_seconds("gpipe", 2, 1, forward_s=1.0, transfer_s=0.0, encode_s=0.25, decode_s=0.5)
    assert coded == plain + 2 * 0.75


def test_rows_have_the_bytes_of_messages_and_are_faster_over_a_slow_link():
    rows = plan_pipeline(PipelineRequest(load("cpu"), 2, 4, 786_432, 0.05, rate=1e8))
    by_codec = {row.codec: row for row in rows}
    assert rows[0].codec == "none" and rows[0].nbytes == 4 * 786_432 and rows[0].speedup == 1
    assert 7.8 < rows[0].nbytes / by_codec["thc:4"].nbytes < 8
    assert by_codec["thc:4"].speedup > 4 > by_codec["bf16"].speedup > 1.5
    assert all(0 <= row.waiting < 1 for row in rows)
    fast = plan_pipeline(PipelineRequest(load("cpu"), 2, 4, 786_432, 0.05, rate=1e12))
    assert min(fast, key=lambda row: row.step_s).codec == "none"


def test_bad_input_names_the_field():
    for change, words in (
        ({"stages": 1}, "stages must be at least 2, got 1"),
        ({"micro_batches": 0}, "micro-batches must be at least 1, got 0"),
        ({"step_s": 0.0}, "step time must be finite and above 0"),
        ({"schedule": "zigzag"}, "schedule must be one of gpipe, 1f1b, got 'zigzag'"),
    ):
        with pytest.raises(ConfigError, match=words):
            PipelineRequest(
                **{"profile": load("cpu"), "stages": 2, "micro_batches": 4, "activations": 9, "step_s": 1.0} | change
            )
    with pytest.raises(ConfigError, match="a stage receives messages of a fixed size"):
        plan_pipeline(PipelineRequest(load("cpu"), 2, 4, 1000, 1.0, codecs=["qsgd:4|rans"]))
    with pytest.raises(ConfigError, match="'klt:2' cannot be planned: its time depends on the width"):
        PipelineRequest(load("cpu"), 2, 4, 1000, 1.0, codecs=["thc:4", "klt:2"])
