"""The page in headless Chromium: drawing, accessibility, downloads and sliders."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laconic.plan import Naive, PlanRequest, Training, recommend
from laconic.plan.profile import load
from laconic.records import read, write
from laconic.report import Prices, build, gather, whatif, write_page

RESULTS = Path(__file__).parents[2] / "results"
RUN_PLOTS = {
    "accuracy-bytes", "accuracy-time", "accuracy-along-bytes", "accuracy-along-time", "loss-bytes", "loss-time",
    "bits-epoch", "time-split", "layer-bytes", "slot-error", "staleness",
}  # fmt: skip
IF_PLOTS = {"if-split", "if-update", "if-speedup", "if-h", "if-hours", "if-codecs"}

Open = Callable[..., Any]


UNLABELLED = """[...document.querySelectorAll("button, select, input, svg[data-chart]")]
  .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"""
TWICE = """[...document.querySelectorAll("[id]")].map((e) => e.id).filter((id, i, all) => all.indexOf(id) !== i)"""


CUT_OFF = """() => {
  const boxes = [...document.querySelectorAll("div.wide")].filter((box) => !box.hidden);
  const wide = boxes.filter((box) => box.scrollWidth > box.clientWidth + 1);
  const found = wide.map((box) => box.getAttribute("aria-labelledby"));
  for (const chart of document.querySelectorAll("svg[data-chart]")) {
    const box = chart.getBoundingClientRect();
    for (const text of chart.querySelectorAll("text")) {
      const place = text.getBoundingClientRect();
      const out = place.left < box.left - 3 || place.right > box.right + 3 || place.bottom > box.bottom + 3;
      if (out || text.textContent.includes("…")) found.push(`${chart.dataset.chart}: ${text.textContent}`);
    }
  }
  for (const legend of document.querySelectorAll(".legend"))
    if (legend.scrollHeight > legend.clientHeight + 1) found.push(`legend: ${legend.textContent}`);
  return found;
}"""
COVERED = """() => {
  const found = [];
  for (const chart of document.querySelectorAll("svg[data-chart]")) {
    const boxes = [...chart.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    for (const [i, [a, one]] of boxes.entries())
      for (const [b, other] of boxes.slice(i + 1)) {
        const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
        const tall = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
        if (wide > 4 && tall > 5) found.push(`${chart.dataset.chart}: ${a} / ${b}`);
      }
  }
  return found;
}"""
COLOURS_OF_NAMES = """() => {
  const found = {};
  for (const chart of laconic.charts.values())
    for (const drawn of chart.canvas.querySelectorAll("[data-series]"))
      if (chart.plot.series) (found[drawn.dataset.series] ??= new Set()).add(drawn.style.fill || drawn.style.stroke);
  return Object.fromEntries(Object.entries(found).map(([name, colours]) => [name, [...colours]]));
}"""


@pytest.fixture(scope="module")
def report(demo_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_page(build(gather([demo_runs]).records, prices=Prices(1.0, 0.1)).html, path)
    return path


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def close(a: Any, b: Any) -> None:
    assert a == pytest.approx(b, rel=1e-9, abs=1e-15)


def test_every_plot_of_runs_is_drawn_without_a_request(report: Path, opened: Open) -> None:
    page = opened(report)
    drawn = page.js(
        "[...laconic.charts].map(([id, chart]) => [id, chart.canvas.querySelectorAll('[data-series]').length])"
    )
    assert {name for name, _ in drawn} == RUN_PLOTS | IF_PLOTS and all(count > 0 for _, count in drawn), drawn
    assert page.js("laconic.ready") and page.errors == []
    assert page.requests == [report.resolve().as_uri()]
    assert page.js(UNLABELLED) == [] and page.js(TWICE) == []


def test_every_plot_of_the_published_records_is_drawn(opened: Open, tmp_path: Path) -> None:
    records = gather([RESULTS]).records
    made = build(records)
    write_page(made.html, tmp_path / "all.html")
    page = opened(tmp_path / "all.html", viewport={"width": 1400, "height": 900})
    drawn = page.js(
        "[...laconic.charts].map(([id, chart]) => [id, chart.canvas.querySelectorAll('[data-series]').length])"
    )
    assert {name for name, _ in drawn} == set(made.plots) | IF_PLOTS and all(count > 0 for _, count in drawn)
    claimed = page.js("[...document.querySelectorAll('[data-mark]')].map((e) => e.dataset.mark)")
    assert {"paper, method 1", "paper, method 5", "paper, c = 5", "paper, gzip on AlexNet"} <= set(claimed)
    assert page.errors == [] and len(page.requests) == 1
    assert page.js(CUT_OFF) == [] and page.js("document.documentElement.scrollWidth") <= 1400
    assert page.js(COVERED) == []
    of_names = page.js(COLOURS_OF_NAMES)
    assert len(of_names) > 50 and {name for name, colours in of_names.items() if len(colours) > 1} == set()
    assert (tmp_path / "all.html").stat().st_size < 1.2e6  # it grows with the published Records
    page.page.set_viewport_size({"width": 390, "height": 800})
    page.page.wait_for_function("[...laconic.charts.values()].every((chart) => chart.width <= 390)")
    assert page.js("document.documentElement.scrollWidth") <= 390 and page.js(COVERED) == [] and page.errors == []
    assert [cut for cut in page.js(CUT_OFF) if ":" in cut] == []  # wide tables scroll there, and say so


def test_page_fits_a_phone_and_follows_the_dark_theme(report: Path, opened: Open) -> None:
    page = opened(report, viewport={"width": 390, "height": 800}, color_scheme="dark")
    assert page.js("document.documentElement.scrollWidth") <= 390
    hints = page.js("[...document.querySelectorAll('.hint')].map((e) => [e.hidden, e.nextSibling.scrollWidth > 390])")
    assert hints and all(hidden != wide for hidden, wide in hints if wide) and any(wide for _, wide in hints)
    page.js("document.querySelector('.hint + .wide').scrollLeft = 200")
    page.page.wait_for_function("document.querySelector('.hint').hidden")
    paper, ink = "getComputedStyle(document.body).backgroundColor", "getComputedStyle(document.body).color"
    assert page.js(paper) == "rgb(18, 20, 23)" and page.page.locator("#theme").inner_text() == "Light"
    page.page.locator("#theme").click()
    assert page.js(paper) == "rgb(255, 255, 255)" and page.js(ink) == "rgb(28, 32, 36)"


CONTRAST = """(theme) => {
  document.documentElement.dataset.theme = theme;
  const style = getComputedStyle(document.documentElement), probe = document.createElement("i");
  document.body.append(probe);
  const light = (name) => {
    probe.style.color = style.getPropertyValue(name);
    const [r, g, b] = getComputedStyle(probe).color.match(/\\d+/g).map((x) => x / 255)
      .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = light("--paper");
  const against = (x) => (Math.max(x, paper) + 0.05) / (Math.min(x, paper) + 0.05);
  const numbered = Array.from({length: 10}, (_, i) => `--c${i}`);
  const names = ["--ink", "--soft", "--accent", "--claim", "--bar", ...numbered];
  return Object.fromEntries(names.map((name) => [name, against(light(name))]));
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_enough_contrast(report: Path, opened: Open, theme: str) -> None:
    contrast = opened(report).js(CONTRAST, theme)
    assert all(contrast[name] >= 4.5 for name in ("--ink", "--soft", "--accent", "--claim")), contrast
    assert all(ratio >= 3 for ratio in contrast.values()), contrast


def test_points_are_read_by_pointer_and_arrow_keys(report: Path, opened: Open) -> None:
    page = opened(report)
    chart = page.page.locator("svg[data-chart='accuracy-bytes']")
    chart.scroll_into_view_if_needed()
    name, x, y = page.js("""(() => {
      const one = laconic.charts.get("accuracy-bytes").shown[1];
      return [one.name, one.points[0].px, one.points[0].py];
    })()""")
    chart.hover(position={"x": x + 2, "y": y + 2})
    tip = page.page.locator("figure[data-plot='accuracy-bytes'] .tip")
    assert tip.is_visible() and tip.inner_text().startswith(name) and "accuracy %" in tip.inner_text()
    chart.focus()
    page.page.keyboard.press("ArrowRight")
    spoken = page.page.locator("figure[data-plot='accuracy-bytes'] .spoken")
    first = spoken.inner_text()
    page.page.keyboard.press("ArrowDown")
    assert "accuracy %" in first and spoken.inner_text() not in ("", first)
    page.page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_series_axes_and_rows_can_be_switched(report: Path, opened: Open) -> None:
    page = opened(report)
    figure = page.page.locator("figure[data-plot='loss-time']")
    count = "laconic.charts.get('loss-time').canvas.querySelectorAll('path[data-series]').length"
    before = page.js(count)
    button = figure.locator(".legend button").first
    button.focus()
    page.page.keyboard.press("Enter")
    assert page.js(count) < before and figure.locator(".legend button").first.get_attribute("aria-pressed") == "false"
    first = "laconic.charts.get('loss-time').canvas.querySelector('path[data-series]').getAttribute('d')"
    linear = page.js(first)
    figure.get_by_role("button", name="logarithmic y axis").click()
    assert page.js(first) != linear
    picker = page.page.locator("figure[data-plot='layer-bytes'] select")
    bars = "[...laconic.charts.get('layer-bytes').canvas.querySelectorAll('rect')].map((e) => e.outerHTML).join()"
    before = page.js(bars)
    picker.select_option("one")
    assert page.js(bars) != before
    figure.get_by_role("button", name="show rows").click()
    assert figure.locator("tbody tr").count() > 10 and page.errors == []


def test_downloads_match_the_records(report: Path, demo_runs: Path, opened: Open) -> None:
    page = opened(report)
    with page.page.expect_download() as waiting:
        page.page.locator("figure[data-plot='loss-time']").get_by_role("button", name="CSV").click()
    assert waiting.value.suggested_filename == "loss-time.csv"
    downloaded = rows(Path(waiting.value.path()).read_text())
    with page.page.expect_download() as waiting:
        page.page.locator("button[data-name='overview']").click()
    table = {row["run"]: row for row in rows(Path(waiting.value.path()).read_text())}
    along = rows(page.js("laconic.charts.get('accuracy-along-time').table.csv()"))
    layers = rows(page.js("laconic.charts.get('layer-bytes').table.csv()"))
    errors = rows(page.js("laconic.charts.get('slot-error').table.csv()"))
    missed = rows(page.js("laconic.charts.get('staleness').table.csv()"))
    for run in ("one", "five", "free"):
        records = read(demo_runs / run / "records.jsonl")
        by_kind = {record.kind: record.values for record in reversed(records)}  # the first track is worker 0's
        summary, track, slots = (by_kind[kind] for kind in ("train.run", "train.track", "train.slots"))
        assert track["worker"] == 0
        mine = [row for row in downloaded if row["run"] == run]
        assert [float(row["loss"]) for row in mine] == track["loss"]
        judged = [row for row in along if row["run"] == run]
        assert [float(row["accuracy %"]) for row in judged] == track["judged"]["accuracy"]
        assert [int(row["iteration"]) for row in judged] == track["judged"]["iteration"]
        assert len(judged) >= 2 and float(judged[-1]["accuracy %"]) > 30  # fewer on a busy machine
        assert [float(row["seconds"]) for row in mine] == track["seconds"]
        assert [int(row["iteration"]) for row in mine] == track["iteration"]
        together = [a + b for a, b in zip(track["bytes_sent"], track["bytes_received"], strict=True)]
        close([1e6 * float(row["MB"]) for row in mine], together)
        assert float(table[run]["accuracy %"]) == summary["accuracy"] and table[run]["method"] == summary["method"]
        assert float(table[run]["total s"]) == summary["total_s"]
        close(float(table[run]["MB in all"]) * 1e6, summary["wire_bytes_per_iteration"] * 20)
        cost = summary["total_s"] / 3600 * 3 * 1.0 + summary["wire_bytes_per_iteration"] * 20 / 1e9 * 0.1
        close(float(table[run]["cost"]), cost)
        for slot in slots["slots"]:
            for direction, key in (("push", "sent"), ("pull", "received")):
                (row,) = (x for x in layers if (x["run"], x["layer"], x["direction"]) == (run, slot["slot"], direction))
                close(float(row["kB per exchange"]) * 1e3 * slots["exchanges"], slot[key])
            (row,) = (x for x in errors if (x["run"], x["layer"]) == (run, slot["slot"]))
            close(float(row["relative squared error"]), sum(slot["errors"]) / len(slot["errors"]))
        # Slots and run count the same frames.
        sent = sum(slot["sent"] + slot["received"] for slot in slots["slots"])
        close(sent, summary["wire_bytes_per_iteration"] * 20)
    stale = read(demo_runs / "free" / "records.jsonl")[-1].values["missed"]
    assert sum(stale.values()) == 40 and {row["run"] for row in missed} == {"free"}
    assert sorted(int(row["gradients"]) for row in missed) == sorted(stale.values())


def test_csv_with_quotes_and_newlines_can_be_read(report: Path, opened: Open) -> None:
    cells = [['a "b", c', "x\ny", "plain"], [1.5, None, 1e-300]]
    made = (
        "(cells) => new laconic.Table({columns: ['name, with', 'x'], cells: cells.map((numbers) => ({numbers}))}).csv()"
    )
    read_back = rows(opened(report).js(made, cells))
    assert [row["name, with"] for row in read_back] == cells[0]
    assert [row["x"] for row in read_back] == ["1.5", "", "1e-300"]


def test_sliders_redraw_the_curves_that_python_computes(report: Path, opened: Open) -> None:
    page = opened(report)
    drawn = "laconic.charts.get('if-speedup').canvas.querySelector(\"path[data-series='vanilla']\").getAttribute('d')"
    advice = page.page.locator("#advice")
    before, words = page.js(drawn), advice.inner_text()
    wanted = {"workers": 64, "rate": 1e10, "rho": 0.05, "h": 1.3, "step_s": 0.1, "nbytes": 1e8, "every": 10}
    for name, value in wanted.items():
        place = page.js("([name, value]) => laconic.knobs[name].indexOf(value)", [name, value])
        assert place >= 0, name
        page.page.locator(f"#knob-{name}").fill(str(place))
    assert page.js(drawn) != before and advice.inner_text() != words
    t = Training(1e8, 0.1, 1e10 / 8, 10)
    paper = whatif.settings()["gzip"]
    gzip = Naive(paper["rho"], 1e8 * paper["compress_byte_s"], 1e8 * paper["decompress_byte_s"])
    shown = rows(page.js("laconic.charts.get('if-speedup').table.csv()"))
    assert {row["way"] for row in shown} == {"ideal", "vanilla", "gzip", "ρ 0.05, h 1.3"}
    assert {int(row["workers"]) for row in shown} >= {1, 2, 25, 64}
    for row in shown:
        m = int(row["workers"])
        update = {"ideal": t.ideal(m), "vanilla": t.vanilla(m), "gzip": t.naive(m, gzip)}.get(
            row["way"], t.homomorphic(m, rho=0.05, h=1.3)
        )
        close(float(row["speed-up"]), t.speed_up(update))
    for row in rows(page.js("laconic.charts.get('if-h').table.csv()")):
        close(float(row["seconds"]), t.homomorphic(64, rho=0.05, h=float(row["h"])).total)
    for row in rows(page.js("laconic.charts.get('if-split').table.csv()")):
        plain = t.vanilla(int(row["workers"]))
        close(float(row["seconds"]), plain.compute if row["part"].startswith("T_cmt") else plain.transfer)
    family, optimizer = page.js("[laconic.state.family, laconic.state.optimizer]")
    request = PlanRequest.for_params(
        load("cpu"), 25_000_000, 0.1 / 64, workers=64, rate=1e10, every=10, family=family, optimizer=optimizer
    )
    ours = recommend(request, break_even=False)
    codecs = {
        row["codec"]: float(row["seconds an iteration"])
        for row in rows(page.js("laconic.charts.get('if-codecs').table.csv()"))
    }
    close(codecs, {row.codec: row.step.total_s for row in ours.rows})
    assert (ours.codec if ours.codec != "none" else "don't compress") in advice.inner_text()
    place = page.js("laconic.knobs.workers.indexOf(64)")
    page.page.locator("#knob-workers").focus()
    page.page.keyboard.press("ArrowLeft")
    assert page.js("laconic.state.workers") == whatif.KNOBS["workers"][place - 1]
    page.page.locator("#knob-preset").select_option(label="five")
    assert page.js("laconic.state.nbytes") == 4 * 327_880 and page.errors == []


def test_markup_in_the_name_of_a_run_stays_text(demo_runs: Path, opened: Open, tmp_path: Path) -> None:
    nasty = "</script><script>document.title='gone'</script><img src=x onerror=\"document.title='gone'\">"
    records = []
    for record in read(demo_runs / "five" / "records.jsonl"):
        values = json.loads(json.dumps(record.values).replace("fc1.weight", json.dumps(nasty)[1:-1]))
        records.append(type(record)(record.kind, {**values, "run": nasty, "model": nasty}))
    write_page(build(records, title=nasty).html, tmp_path / "nasty.html")
    page = opened(tmp_path / "nasty.html")
    assert page.page.title() == nasty and page.errors == [] and len(page.requests) == 1
    assert nasty in page.js("laconic.charts.get('layer-bytes').table.csv()").replace('""', '"')
    assert page.js("document.querySelectorAll('img').length") == 0 and page.js("laconic.ready")


def test_hundred_runs_make_a_small_page_in_seconds(demo_runs: Path, opened: Open, tmp_path: Path) -> None:
    template = read(demo_runs / "five" / "records.jsonl")
    points = [i + 0.123456789 for i in range(200)]
    for number in range(100):
        folder = tmp_path / "runs" / f"run-{number:03}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        grown = []
        for record in template:
            values = dict(record.values)
            if record.kind == "train.track":
                sent = [10_000 * i for i in range(200)]
                values |= {"iteration": list(range(1, 201)), "seconds": points, "loss": [1 / (x + 0.3) for x in points]}
                values |= {"bytes_sent": sent, "bytes_received": sent}
            if record.kind == "train.slots":
                values["slots"] = [
                    {**slot, "slot": f"{slot['slot']}.{k}"} for slot in values["slots"] for k in range(6)
                ]
            grown.append(type(record)(record.kind, values))
        write(grown, folder / "records.jsonl")
    began = time.perf_counter()
    made = build(gather([tmp_path / "runs"]).records)
    write_page(made.html, tmp_path / "hundred.html")
    seconds = time.perf_counter() - began
    assert made.runs == 100 and seconds < 10, seconds
    assert (tmp_path / "hundred.html").stat().st_size < 8e6
    page = opened(tmp_path / "hundred.html")
    assert page.js("laconic.ready") and page.errors == []
    assert page.js("laconic.charts.get('loss-time').shown.length") == 100
