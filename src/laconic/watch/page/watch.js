// Asks for /status again and again and shows it. All that comes from the run's folder is set as text, never as markup.
"use strict";

const EVERY_MS = 500;
const SVG = "http://www.w3.org/2000/svg";
const SAID = {
  absent: "no run here yet", prepared: "prepared: its server has not started", running: "running",
  silent: "its server is not heard of", stopped: "stopped: go on with --resume", failed: "failed", ended: "ended",
};

const of = (id) => document.getElementById(id);
const say = (id, text) => { const at = of(id); if (at.textContent !== text) at.textContent = text; };

function size(bytes) {
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
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Curves over time. Each is [class, values]; gaps where there is no value.
function chart(id, times, curves, label) {
  const svg = of(id), left = 52, right = 592, top = 12, bottom = 160;
  svg.replaceChildren();
  const all = curves.flatMap(([, values]) => values).filter((y) => y !== null);
  if (all.length < 2 || times.length < 2) return;
  const low = Math.min(...all), high = Math.max(...all), span = high - low || 1;
  const begin = times[0], end = times[times.length - 1], duration = end - begin || 1;
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
  say("run", view.run);
  of("phase").className = `phase ${view.phase}`;
  say("phase", SAID[view.phase] + (view.phase === "silent" ? ` for ${Math.round(view.silent_s)} s` : ""));
  const about = [config.method && `method ${config.method}`, config.model, config.data, config.mode];
  for (const way of ["push", "pull"]) if (config[way] && config[way] !== "none") about.push(`${way} ${config[way]}`);
  say("about", about.filter(Boolean).join(", "));
  const notes = [...view.notes, ...(view.failure ? [view.failure] : [])];
  of("alert").hidden = notes.length === 0;
  say("alert", notes.join("; "));
  say("iteration", `${view.iteration} of ${view.iterations}`);
  of("bar").max = Math.max(1, view.iterations);
  of("bar").value = view.iteration;
  say("left", view.left_s !== null && !over ? `${clock(view.left_s)} left` : clock(view.elapsed_s));
  say("loss", number(view.loss));
  const accuracy = view.summary && view.summary.accuracy;
  say("accuracy", typeof accuracy === "number" ? `accuracy ${accuracy.toFixed(2)} %` : "");
  say("bytes", view.bytes_per_s !== null && !over ? `${size(view.bytes_per_s)}/s` : size(view.received + view.sent));
  say("saved", `in ${size(view.received)}, out ${size(view.sent)}, ${size(view.saved)} saved`);
  say("staleness", String(view.missed));
  say("stalest", `updates missed; mean ${view.missed_mean.toFixed(2)}, at most ${view.missed_most}`);
  const kinds = Object.entries(view.faults);
  say("faults", String(kinds.reduce((sum, [, count]) => sum + count, 0)));
  say("kinds", kinds.map(([kind, count]) => `${kind.replaceAll("_", " ")} ${count}`).join(", "));
  const times = view.points.map((point) => point.at);
  chart("loss-chart", times, [["", view.points.map((point) => point.loss)]], number);
  chart("bytes-chart", times, [["", view.points.map((point) => point.received)], ["second", view.points.map((point) => point.sent)]], size);
  of("workers").replaceChildren(...view.workers.map((worker, i) => row([
    [String(i)], [worker.state, worker.state], [String(worker.iteration)], [number(worker.loss)],
    [size(worker.bytes_sent)], [size(worker.bytes_received)], [`${worker.missed} (at most ${worker.missed_most})`],
    [String(worker.lives)], [`${worker.seconds.compute.toFixed(1)} s`], [`${worker.seconds.encode.toFixed(1)} s`],
    [`${worker.seconds.communication.toFixed(1)} s`],
    [worker.heard_at === null ? "never" : over ? "" : `${Math.max(0, Math.round(view.at - worker.heard_at))} s ago`],
  ])));
  of("recent").replaceChildren(...[...view.recent].reverse().map((fault) => {
    const item = document.createElement("li");
    item.textContent = `${new Date(fault.at * 1000).toLocaleTimeString()}  ${fault.what}`;
    return item;
  }));
  if (view.recent.length === 0) say("recent", "nothing so far");
}

async function keepUp() {
  try {
    const answer = await fetch("/status");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
    document.body.dataset.connected = "yes";
  } catch (error) {
    document.body.dataset.connected = "no";
    of("alert").hidden = false;
    say("alert", `laconic watch does not answer (${error.message}): what is shown may be old`);
  }
  setTimeout(keepUp, document.hidden ? 4 * EVERY_MS : EVERY_MS);
}
keepUp();
