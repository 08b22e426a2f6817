// Polls /status and shows it. Texts of the run's folder are set as text, never as markup.
"use strict";

const EVERY_MS = 500;
const SVG = "http://www.w3.org/2000/svg";
const PHASE_TEXTS = {
  absent: "no run in this folder yet", prepared: "prepared: its server has not started", running: "running",
  silent: "no sign of its server", stopped: "stopped: continue with --resume", failed: "failed", ended: "ended",
};

const byId = (id) => document.getElementById(id);
const setText = (id, text) => { const node = byId(id); if (node.textContent !== text) node.textContent = text; };

function formatBytes(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 999.5 || unit === "GB") return `${unit === "B" ? Math.round(bytes) : Number(bytes.toPrecision(3))} ${unit}`;
    bytes /= 1000;
  }
}
const number = (x) => (x === null || x === undefined ? "–" : String(Number(x.toPrecision(4))));
function clock(seconds) {
  const s = Math.round(seconds), two = (x) => String(x).padStart(2, "0");
  return s >= 3600 ? `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}` : `${Math.floor(s / 60)}:${two(s % 60)}`;
}

function element(kind, attributes, text) {
  const node = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Curves over time, from begin to end. Each is [class, values]; gaps where there is no value. A logarithmic axis leaves out
// what is not positive.
function chart(id, [begin, end], times, curves, label, logarithmic = false) {
  const svg = byId(id), wide = svg.clientWidth || 600, left = 60, right = wide - 8, top = 12, bottom = 160;
  svg.setAttribute("viewBox", `0 0 ${wide} 180`);
  svg.replaceChildren();
  if (logarithmic) {
    const shown = label;
    label = (value) => shown(10 ** value);
    curves = curves.map(([kind, values]) => [kind, values.map((value) => (value > 0 ? Math.log10(value) : null))]);
  }
  const all = curves.flatMap(([, values]) => values).filter((y) => y !== null);
  if (all.length < 2 || times.length < 2) return;
  const low = Math.min(...all), high = Math.max(...all), span = high - low || 1;
  const duration = end - begin || 1;
  const x = (t) => left + ((t - begin) / duration) * (right - left);
  const y = (v) => bottom - ((v - low) / span) * (bottom - top);
  for (const value of [low, (low + high) / 2, high]) {
    svg.append(element("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }));
    svg.append(element("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, label(value)));
  }
  svg.append(element("text", { x: left, y: 175 }, "0:00"));
  svg.append(element("text", { x: right, y: 175, "text-anchor": "end" }, clock(duration)));
  for (const [kind, values] of curves) {
    let path = "", pen = "M";
    values.forEach((value, i) => {
      if (value === null) { pen = "M"; return; }
      path += `${pen}${x(times[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    });
    svg.append(element("path", { class: `curve ${kind}`, d: path }));
  }
}

function row(cells) {
  const tr = document.createElement("tr");
  for (const [text, kind] of cells) {
    const td = document.createElement("td");
    td.textContent = text;
    if (kind) td.className = kind;
    tr.append(td);
  }
  return tr;
}

function show(view) {
  const over = ["stopped", "failed", "ended"].includes(view.phase), config = view.config;
  document.title = `${view.iteration}/${view.iterations} ${view.run}`;
  setText("run", view.run);
  byId("phase").className = `phase ${view.phase}`;
  setText("phase", PHASE_TEXTS[view.phase] + (view.phase === "silent" ? ` for ${Math.round(view.silent_s)} s` : ""));
  const about = [config.method && `method ${config.method}`, config.model, config.data, config.mode];
  for (const way of ["push", "pull"]) if (config[way] && config[way] !== "none") about.push(`${way} ${config[way]}`);
  setText("about", about.filter(Boolean).join(", "));
  const notes = [...view.notes, ...(view.failure ? [view.failure] : [])];
  byId("alert").hidden = notes.length === 0;
  setText("alert", notes.join("; "));
  setText("iteration", `${view.iteration} of ${view.iterations}`);
  byId("bar").max = Math.max(1, view.iterations);
  byId("bar").value = view.iteration;
  setText("left", view.left_s !== null && !over ? `${clock(view.left_s)} left` : clock(view.elapsed_s));
  setText("loss", number(view.loss));
  const accuracy = view.summary && view.summary.accuracy, last = view.accuracies.at(-1);
  const sampled = last ? `accuracy ${last.accuracy.toFixed(1)} % of ${last.examples} test examples` : "";
  setText("accuracy", typeof accuracy === "number" ? `accuracy ${accuracy.toFixed(2)} %` : sampled);
  byId("accuracy-figure").hidden = view.accuracies.length < 2;
  const times = view.points.map((point) => point.at), tested = view.accuracies.map((point) => point.at);
  const range = [Math.min(...times.slice(0, 1), ...tested.slice(0, 1)), Math.max(...times.slice(-1), ...tested.slice(-1))];
  chart("accuracy-chart", range, tested, [["", view.accuracies.map((point) => point.accuracy)]], number);
  setText("bytes", view.bytes_per_s !== null && !over ? `${formatBytes(view.bytes_per_s)}/s` : formatBytes(view.received + view.sent));
  setText("saved", `in ${formatBytes(view.received)}, out ${formatBytes(view.sent)}`);
  const frames = view.raw - view.saved, saves = frames > 0 && view.saved > 0;
  const fewer = saves ? `, ${Number((view.raw / frames).toPrecision(3))} times the ${formatBytes(frames)} of frames` : "";
  setText("float32", view.raw ? `float32: ${formatBytes(view.raw)}${fewer}` : "");
  setText("staleness", String(view.missed));
  setText("stalest", `updates; mean ${view.missed_mean.toFixed(2)}, at most ${view.missed_most}`);
  const kinds = Object.entries(view.faults);
  setText("faults", String(kinds.reduce((sum, [, count]) => sum + count, 0)));
  setText("kinds", kinds.map(([kind, count]) => `${kind.replaceAll("_", " ")} ${count}`).join(", "));
  chart("loss-chart", range, times, [["", view.points.map((point) => point.loss)]], (x) => String(Number(x.toPrecision(3))));
  chart("bytes-chart", range, times, [["", view.points.map((point) => point.received)], ["second", view.points.map((point) => point.sent)], ["third", view.points.map((point) => (view.iteration ? (view.raw / 2 / view.iteration) * point.iteration : null))]], formatBytes, true);
  byId("workers").replaceChildren(...view.workers.map((worker, i) => row([
    [String(i)], [worker.state, worker.state], [String(worker.iteration)], [number(worker.loss)],
    [formatBytes(worker.bytes_sent)], [formatBytes(worker.bytes_received)], [`${worker.missed} (at most ${worker.missed_most})`],
    [String(worker.lives)], [`${worker.seconds.compute.toFixed(1)} s`], [`${worker.seconds.encode.toFixed(1)} s`],
    [`${worker.seconds.communication.toFixed(1)} s`],
    [worker.heard_at === null ? "never" : over ? "" : `${Math.max(0, Math.round(view.at - worker.heard_at))} s ago`],
  ])));
  byId("recent").replaceChildren(...[...view.recent].reverse().map((fault) => {
    const item = document.createElement("li");
    item.textContent = `${new Date(fault.at * 1000).toLocaleTimeString()}  ${fault.what}`;
    return item;
  }));
  if (view.recent.length === 0) setText("recent", "no faults so far");
}

async function poll() {
  try {
    const response = await fetch("/status");
    if (!response.ok) throw new Error(`status ${response.status}`);
    show(await response.json());
    document.body.dataset.connected = "yes";
  } catch (error) {
    document.body.dataset.connected = "no";
    byId("alert").hidden = false;
    setText("alert", `laconic watch does not answer (${error.message}): the status shown may be old`);
  }
  setTimeout(poll, document.hidden ? 4 * EVERY_MS : EVERY_MS);
}
poll();
