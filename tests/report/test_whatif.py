"""Formulas translated to JavaScript, and the data of the sliders."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import types
from importlib import resources
from typing import Any

import pytest

from laconic.plan import Bound, Naive, PlanRequest, Training, formulas, recommend
from laconic.plan.profile import load
from laconic.report import whatif
from laconic.report.javascript import UntranslatableError, formulas_script, translate

node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed: JavaScript is not run")


def evaluate(code: str, argument: object) -> Any:
    """Return the value of a JavaScript function of one argument, which may use the page's formulas and predictions."""
    page = (resources.files("laconic.report") / "assets" / "whatif.js").read_text(encoding="utf-8")
    call = f"console.log(JSON.stringify(({code})({json.dumps(argument)})));"
    script = f"{formulas_script()}\nconst laconic = {{}};\n{page}\n{call}"
    done = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_every_formula_is_translated() -> None:
    functions = [name for name, value in vars(formulas).items() if isinstance(value, types.FunctionType)]
    assert len(functions) > 15
    assert all(f"function {name}(" in formulas_script() for name in functions)


@pytest.mark.parametrize("source", ["while True:\n    pass", "x = {}", "return f(x=1)", "return a < b < c"])
def test_unknown_python_raises_untranslatable_error(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    body = source.replace("\n", "\n    ")
    monkeypatch.setattr("inspect.getsource", lambda module: f"def f(a, b, c):\n    {body}\n")
    with pytest.raises(UntranslatableError, match="line 2: cannot translate"):
        translate(math, "x")


@node
def test_translated_formulas_compute_the_papers_model() -> None:
    grid = list(itertools.product([1, 16, 256], [1e6, 4e9], [0.001, 10.0], [125e4, 125e8], [1, 200]))
    code = """(grid) => grid.map(([m, nbytes, step_s, bandwidth, every]) => {
      const f = formulas, k = f.slope(m, nbytes, step_s, bandwidth, every);
      const compute = f.ideal_s(m, step_s, every), transfer = f.transfer_s(m, nbytes, bandwidth);
      const homomorphic = f.total_s(f.homomorphic_update(compute, transfer, 0.2, 1.3));
      return [compute, transfer, f.total_s(f.naive_update(compute, transfer, 0.927, 8.079, 1.898, m)), homomorphic,
        f.speed_up(f.ideal_s(1, step_s, every), homomorphic), f.crossover(nbytes, step_s, bandwidth, every),
        f.training_s(homomorphic, 450000, every), k, f.r_min(k, 0.2, 1.3), f.over_one_node(k, m, 0.2, 1.3),
        f.over_vanilla(k, 0.2, 1.3), Number(1.3 < f.limit_of_h(k, 0.2))];
    })"""
    for (m, nbytes, step_s, bandwidth, every), values in zip(grid, evaluate(code, grid), strict=True):
        training, bound = Training(nbytes, step_s, bandwidth, every), Bound(m, nbytes, step_s, bandwidth, every)
        update = training.homomorphic(m, rho=0.2, h=1.3)
        assert values == pytest.approx([
            bound.ideal_s, training.vanilla(m).transfer, training.naive(m, Naive(0.927, 8.079, 1.898)).total,
            update.total, training.speed_up(update), training.crossover, training.total(update, 450_000), bound.slope,
            bound.r_min(0.2, 1.3), bound.over_one_node(0.2, 1.3), bound.over_vanilla(0.2, 1.3),
            float(bound.beats_vanilla(0.2, 1.3)),
        ], rel=1e-12)  # fmt: skip


@node
@pytest.mark.parametrize("profile", ["cpu", "jang2017"])
def test_page_predicts_and_recommends_what_plan_does(profile: str) -> None:
    settings = whatif.settings([{"name": "mlp", "workers": 4, "step_s": 0.04, "nbytes": 4 * 327_880, "every": 1}])
    states = [
        {"workers": workers, "rate": rate, "step_s": step_s, "nbytes": nbytes, "every": every, "profile": profile,
         "family": family, "optimizer": optimizer, "give_up": give_up}
        for nbytes, workers, (step_s, rate, every), (family, optimizer, give_up) in itertools.product(
            (4 * 327_880, 233e6), (1, 2, 64), [(0.01, 1e8, 1), (0.3, 1e9, 8), (10.0, 1e11, 1)],
            [("convolutional", "momentum", 0.0), ("transformer", "adamw", 2.0)],
        )
    ]  # fmt: skip
    code = """({ settings, states }) => states.map((state) => {
      const rows = laconic.predictCodecs(settings, state);
      return [rows, laconic.recommendCodec(rows, state.workers, settings.model_error).codec];
    })"""
    chosen = set()
    predictions = evaluate(code, {"settings": settings, "states": states})
    for state, (rows, codec) in zip(states, predictions, strict=True):
        request = PlanRequest.for_params(
            load(profile), round(state["nbytes"] / 4), state["step_s"] / state["workers"], workers=state["workers"],
            rate=state["rate"], every=state["every"], family=state["family"], optimizer=state["optimizer"],
            give_up=state["give_up"],
        )  # fmt: skip
        expected = recommend(request, break_even=False)
        assert [row["codec"] for row in rows] == [row.codec for row in expected.rows]
        for row, mine in zip(rows, expected.rows, strict=True):
            names = ("push", "pull", "memory", "step_s", "speedup_fp32", "speedup_bf16")
            values = [mine.message.push, mine.message.pull, mine.memory, mine.step.total_s, mine.speedup_fp32,
                      mine.speedup_bf16]  # fmt: skip
            assert [row[name] for name in names] == pytest.approx(values, rel=1e-9) and row["fits"] == mine.fits
            assert row["steps"] == mine.steps and bool(row["objection"]) == bool(mine.objection)
        assert codec == expected.codec
        chosen.add(codec)
    assert "none" in chosen
    if profile == "cpu":  # the paper's has no codec with evidence
        assert len(chosen) > 2 and any(codec.startswith("local") for codec in chosen)


def test_sliders_hold_the_values_of_all_presets() -> None:
    preset = {"name": "run", "workers": 7, "step_s": 0.0123, "nbytes": 4 * 327_880, "every": 3}
    settings = whatif.settings([preset])
    assert [one["name"] for one in settings["presets"]] == ["AlexNet of jang2017", "run"]
    for values in settings["presets"]:
        assert all(values[name] in settings["knobs"][name] for name in settings["knobs"])
    sizes = len(settings["knobs"]["nbytes"])
    for profile in settings["profiles"].values():
        assert all(len(codec["times"]) == sizes for codec in profile["codecs"].values())
    assert len(json.dumps(settings)) < 500_000
