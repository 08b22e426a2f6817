"use strict";
/* Sliders, and the curves that follow them. All arithmetic is in model.js. */

laconic.whatIf = (settings) => {
  const { html, precise } = laconic;
  const steps = (low, high, inner = [1, 1.5, 2, 3, 5, 7]) => {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      for (const m of inner) {
        const x = Number((m * 10 ** e).toPrecision(3));
        if (x >= low * 0.999 && x <= high * 1.001) found.push(x);
      }
    return found;
  };
  const unit = (x, units) => { const [size, name] = units.find(([one]) => x >= one) ?? units.at(-1); return `${precise(x / size)} ${name}`; };
  const KNOBS = {
    workers: { label: "Workers M", values: settings.workers, show: (x) => String(x) },
    rate: { label: "Bandwidth", values: steps(1e7, 1e11), show: (x) => unit(x, [[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1, "bit/s"]]) },
    rho: { label: "ρ, compressed over original size", values: steps(0.001, 1), show: precise },
    h: { label: "h, compressed over dense time", values: steps(0.05, 5, [1, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]), show: precise },
    step_s: { label: "Step time C, one node", values: steps(0.001, 10), show: (x) => unit(x, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) },
    nbytes: { label: "Model W, float32", values: steps(1e6, 4e9), show: (x) => unit(x, [[1e9, "GB"], [1e6, "MB"], [1, "B"]]) },
    every: { label: "Iterations an update i", values: [1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 200, 400, 500, 1000], show: (x) => String(x) },
  };
  const state = { profile: Object.keys(settings.profiles)[0], ...settings.presets[0] };
  delete state.name;

  const nearest = (values, x) => values.reduce((best, one, i) => (Math.abs(Math.log(one / x)) < Math.abs(Math.log(values[best] / x)) ? i : best), 0);
  const inputs = {}, outputs = {};
  for (const [name, knob] of Object.entries(KNOBS)) {
    const input = html("input", { type: "range", min: 0, max: knob.values.length - 1, step: 1, id: `knob-${name}` });
    const output = html("output", {});
    output.setAttribute("for", input.id);
    input.addEventListener("input", () => { state[name] = knob.values[Number(input.value)]; refresh(); });
    const label = html("label", { htmlFor: input.id }, knob.label, output);
    document.getElementById("knobs").append(html("div", { className: "knob" }, label, input));
    inputs[name] = input; outputs[name] = output;
  }
  const presets = html("select", { id: "knob-preset" }), profiles = html("select", { id: "knob-profile" });
  settings.presets.forEach((one, i) => presets.append(html("option", { textContent: one.name, value: i })));
  Object.keys(settings.profiles).forEach((name) => profiles.append(html("option", { textContent: name, value: name })));
  presets.addEventListener("change", () => {
    const { name, ...values } = settings.presets[presets.selectedIndex];
    Object.assign(state, values);
    refresh();
  });
  profiles.addEventListener("change", () => { state.profile = profiles.value; refresh(); });
  document.getElementById("presets").append(html("label", {}, "Begin with", presets), html("label", {}, "Machine of codecs", profiles));

  /* ---------------------------------------------------------------------------------------------------- curves */

  const table = (columns, rows) => new laconic.Table({
    columns, cells: columns.map((_, i) => ({ numbers: rows.map((row) => row[i]) })),
  });
  const training = () => ({ nbytes: state.nbytes, step_s: state.step_s, bandwidth: state.rate / 8, every: state.every });
  const gzip = () => {
    const { nbytes, rho, compress_s, decompress_s } = settings.gzip, share = state.nbytes / nbytes;
    return { rho, compress_s: compress_s * share, decompress_s: decompress_s * share };
  };
  const crowd = () => {
    const most = Math.max(25, state.workers), stride = Math.ceil(most / 64);
    return Array.from({ length: most }, (_, i) => i + 1).filter((m) => m % stride === 0 || m === 1 || m === state.workers);
  };
  const compressed = () => `ρ ${precise(state.rho)}, h ${precise(state.h)}`;
  const ways = (t, m) => [["vanilla", model.vanilla(t, m)], ["gzip", model.naive(t, m, gzip())], [compressed(), model.homomorphic(t, m, state.rho, state.h)]];

  const curves = {
    "if-split": () => {
      const t = training(), rows = crowd().flatMap((m) => [["T_cmt, computation", m, model.vanilla(t, m).compute], ["T_inf, transfer", m, model.vanilla(t, m).transfer]]);
      const cross = model.crossover(t), seen = cross >= 1 && cross <= Math.max(25, state.workers);
      return [table(["part", "workers", "seconds"], rows), seen ? [{ axis: "x", value: cross, label: `both as long at ${precise(Number(cross.toPrecision(3)))}` }] : []];
    },
    "if-update": () => {
      const t = training(), rows = crowd().flatMap((m) => [["ideal", model.ideal(t, m)], ...ways(t, m)].map(([name, one]) => [name, m, model.total(one)]));
      return [table(["way", "workers", "seconds"], rows), [{ axis: "x", value: state.workers, label: `${state.workers} workers` }]];
    },
    "if-speedup": () => {
      const t = training(), rows = crowd().flatMap((m) => [["ideal", model.ideal(t, m)], ...ways(t, m)].map(([name, one]) => [name, m, model.speedUp(t, one)]));
      return [table(["way", "workers", "speed-up"], rows), [{ axis: "y", value: 1, label: "one node" }]];
    },
    "if-h": () => {
      const t = training(), rows = [];
      const most = Math.max(2, 1.5 * state.h);
      for (let k = 0; k <= 40; k++) rows.push([`ρ ${precise(state.rho)}`, (most * k) / 40, model.total(model.homomorphic(t, state.workers, state.rho, (most * k) / 40))]);
      const plain = model.total(model.vanilla(t, state.workers));
      return [table(["size", "h", "seconds"], rows), [{ axis: "y", value: plain, label: "vanilla" }, { axis: "x", value: state.h, label: `h ${precise(state.h)}` }]];
    },
    "if-hours": () => {
      const t = training(), rows = crowd().flatMap((m) => [["ideal", model.ideal(t, m)], ...ways(t, m)].map(([name, one]) => [name, m, model.training(t, one, settings.iterations) / 3600]));
      return [table(["way", "workers", "hours"], rows), [{ axis: "y", value: model.training(t, model.oneNode(t), settings.iterations) / 3600, label: "one node" }]];
    },
    "if-codecs": () => {
      const found = advice(), rows = [...found.rows].sort((a, b) => a.step_s - b.step_s);
      return [table(["codec", "seconds an iteration", "kB pushed", "over float32", "over bfloat16"], rows.map((one) => [one.codec, one.step_s, one.push / 1e3, one.speedup_fp32, one.speedup_bf16])), []];
    },
  };
  const advice = () => model.advise(settings.profiles[state.profile], {
    params: Math.round(state.nbytes / 4), step_s: state.step_s / state.workers, workers: state.workers, rate: state.rate, every: state.every,
  }, settings.fixed);
  const SHAPES = {
    "if-split": { kind: "line", series: "part", x: "workers", y: "seconds", log: "y", title: "Computation and transfer" },
    "if-update": { kind: "line", series: "way", x: "workers", y: "seconds", log: "y", title: "An update, way by way" },
    "if-speedup": { kind: "line", series: "way", x: "workers", y: "speed-up", log: "", title: "Speed-up over one node" },
    "if-h": { kind: "line", series: "size", x: "h", y: "seconds", log: "", title: "What h may cost" },
    "if-hours": { kind: "line", series: "way", x: "workers", y: "hours", log: "y", title: "A whole training" },
    "if-codecs": { kind: "bars", x: "seconds an iteration", y: "codec", log: "", title: "Codecs on such a link" },
  };

  const about = (x) => precise(Number(x.toPrecision(3)));
  function words() {
    const t = training(), { workers, rho, h } = state, bold = (text) => html("b", { textContent: text });
    const gain = model.overVanilla(t, workers, rho, h), one = model.overOneNode(t, workers, rho, h);
    const pays = model.beatsVanilla(t, workers, rho, h);
    const least = model.rMin(t, workers, rho, h), found = advice();
    const lines = [
      ["Compressed ", bold(pays ? `pays: ${about(gain)} times as fast as vanilla` : `does not pay: ${about(gain)} times as fast as vanilla`),
        `, ${about(one)} times as fast as one node. An update takes ${about(least)} times the ideal; vanilla ${about(model.rMin(t, workers, 1, 1))}.`],
      [`It would pay up to h ${about(1 + model.slope(t, workers) * (1 - rho))} at this ρ. More than ${precise(Math.floor(model.mostUseful(t)))} workers are slower than one node as they are.`],
      ["Codec to take: ", bold(found.codec === "none" ? "none: don't compress" : found.codec), `; ${found.why}.`],
    ];
    document.getElementById("advice").replaceChildren(...lines.map((line) => html("p", {}, ...line)));
  }

  const charts = {};
  function refresh() {
    for (const [name, knob] of Object.entries(KNOBS)) {
      inputs[name].value = nearest(knob.values, state[name]);
      outputs[name].textContent = knob.show(state[name]);
      inputs[name].setAttribute("aria-valuetext", knob.show(state[name]));
    }
    for (const [id, curve] of Object.entries(curves)) {
      const [rows, marks] = curve();
      if (charts[id]) charts[id].update(rows, marks);
      else {
        const figure = document.querySelector(`figure[data-if="${id}"]`);
        charts[id] = new laconic.Chart(figure, { id, detail: id === "if-codecs" ? ["kB pushed", "over float32", "over bfloat16"] : [], stacked: false, diagonals: [], marks, ...SHAPES[id] }, rows);
      }
    }
    words();
  }
  refresh();
  Object.assign(laconic, { knobs: KNOBS, state, refresh, advice });
};
