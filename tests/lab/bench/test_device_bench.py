"""The GPU benchmark as far as it goes without a GPU; ``kernels/test_triton_kernels.py`` runs it in the interpreter."""

from __future__ import annotations

import pytest
import torch

import laconic
from laconic_lab.bench.device import FLOORS, SPECS, DeviceSettings, run_device
from laconic_lab.bench.device_step import StepSettings, run_steps
from laconic_lab.bench.device_tables import device_tables


def test_every_goal_belongs_to_a_timed_codec():
    assert {spec for spec, _ in FLOORS} <= set(SPECS)
    for spec in SPECS:
        laconic.codec(spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_missing_device_raises_config_error():
    with pytest.raises(laconic.ConfigError, match="torch sees no CUDA device"):
        run_device(["qsgd:4"])


def test_command_contains_non_default_settings():
    assert DeviceSettings().command(SPECS) == "laconic bench --device cuda"
    assert DeviceSettings(numel=1000, seed=2).command(["qsgd:4"]) == (
        "laconic bench qsgd:4 --device cuda --numel 1000 --seed 2"
    )


def test_step_benchmark_gives_a_record_per_codec():
    settings = StepSettings(model="lenet5", device="cpu", batch=4, repeat=2, accumulate=2)
    step, local = run_steps(["ef|qsgd:4", "local ef|topk:0.1|sign"], settings)
    assert step.kind == "bench.device.step" and local.kind == "bench.device.local"
    assert step.values["attached_s"] > 0 and local.values["exchange_s"] > 0
    assert step.values["command"].endswith("--step lenet5 --accumulate 2 --repeat 2")
    assert step.values["limit_percent"] == 2.0 and step.values["turns"] == 2
    tables = {table.name: table for table in device_tables([step, local])}
    assert list(tables) == ["device-step", "device-profile", "device-local"]
    assert tables["device-step"].rows[0][:2] == ("lenet5, 4 images, 2 backward passes", "`ef|qsgd:4`")


def test_step_benchmark_keeps_residuals_as_asked():
    """The pinned memory of a CPU's residuals is where they are anyway."""
    settings = StepSettings(model="lenet5", device="cpu", batch=4, repeat=1, residuals="bf16,pinned")
    step, local = run_steps(["ef|qsgd:4", "local ef|sign"], settings)
    assert step.values["command"].endswith("--step lenet5 --residuals bf16,pinned --repeat 1")
    # The policy leaves out small and one-dimensional parameters.
    assert 0.9 * step.values["fp32_bytes"] < 2 * step.values["residual_bytes"] <= step.values["fp32_bytes"]
    assert 0 < local.values["residual_bytes"] <= step.values["fp32_bytes"] / 2
    assert step.values["limit_percent"] is None
    assert device_tables([step])[0].rows[0][0] == "lenet5, 4 images, residuals bf16,pinned"
    with pytest.raises(laconic.ConfigError, match="--residuals must be one of fp32 bf16 pinned"):
        StepSettings(residuals="fp8")


def test_step_of_a_model_without_images_raises_config_error():
    with pytest.raises(laconic.ConfigError, match="must be an image model, gpt2 or vit, got 'gpt'"):
        run_steps(["qsgd:4"], StepSettings(model="gpt", device="cpu"))
