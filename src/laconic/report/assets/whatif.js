"use strict";
/* Sliders, and the curves that follow them. Formulas are generated from Python; data comes from whatif.py. */

/* The codecs of a profile: bytes, seconds of an iteration, whether a worker's memory suffices, and their quality. */
laconic.predictCodecs = (settings, state) => {
  const f = formulas, { workers } = state;
  const profile = settings.profiles[state.profile], size = settings.knobs.nbytes.indexOf(state.nbytes);
  const rate = f.payload_bytes_s(state.rate, settings.goodput), step = f.ideal_s(workers, state.step_s, 1);
  const known = settings.trainings.filter((one) => one.family === state.family && one.optimizer === state.optimizer);
  const rows = [];
  for (const [label, codec] of Object.entries(profile.codecs)) {
    const sizes = codec.nbytes.any ?? codec.nbytes[workers], trained = known.some((one) => one.labels.includes(label));
    if (!sizes || (codec.local && state.every > 1) || (!codec.own && !trained)) continue; // a sum may not hold so many
    const every = codec.local ? Math.floor(codec.every / codec.fragments) : state.every, interval = codec.local ? codec.every : state.every;
    const [push, pull, memory] = sizes[size], [encode_s, decode_s, add_s] = codec.times[size];
    const step_s = f.server_iteration_s(settings.ready, settings.shares, step, every, profile.spare_core, workers, rate,
      profile.byte_s, profile.fixed_s[codec.fragments][size], push, pull, encode_s, decode_s, add_s, codec.summable, codec.overlap);
    const quality = laconic.codecQuality(codec, known.find((one) => one.codec === label.split(" ").at(-1) && one.every === interval), interval, state);
    rows.push({ codec: label, push, pull, memory, step_s, every, ...quality, fits: profile.memory === null || memory <= profile.memory });
  }
  const [none, bf16] = ["none", "bf16"].map((name) => rows.find((row) => row.codec === name).step_s);
  for (const row of rows) Object.assign(row, { speedup_fp32: f.speed_up(none, row.step_s), speedup_bf16: f.speed_up(bf16, row.step_s) });
  return rows;
};

/* What trainings say of a codec: the steps it needs, and what speaks against recommending it. */
laconic.codecQuality = (codec, trained, interval, state) => {
  if (codec.lossless) return { steps: 1, objection: "", evidence: "" };
  const never = interval === 1 ? codec.never[state.optimizer] : null;
  if (never) return { steps: 1, objection: never, evidence: "" };
  const place = !trained ? -1 : formulas.worst_training(trained.given_up, trained.numels, trained.workers, interval > 1, state.nbytes / 4, state.workers);
  if (place < 0) return { steps: 1, objection: "no evidence", evidence: "" };
  const keeps = formulas.keeps_quality(trained.given_up[place], trained.noise[place], state.give_up ?? 0), evidence = trained.text[place];
  return { steps: trained.steps[place], objection: keeps ? "" : evidence, evidence };
};

laconic.recommendCodec = (rows, workers, error) => {
  if (workers === 1) return { codec: "none", why: "one worker has no one to exchange with" };
  const plain = rows.find((row) => row.codec === "none"), seconds = rows.map((row) => row.step_s * row.steps);
  const place = formulas.fastest(seconds, rows.map((row) => row.fits && !row.objection)), best = rows[place];
  if (!best) return { codec: "none", why: "model, gradient and momentum alone do not fit into the machine's memory" };
  if (best === plain) return { codec: "none", why: "nothing that kept the quality of such models is faster" };
  if (!formulas.exceeds_error(plain.step_s, seconds[place], error))
    return { codec: "none", why: `${best.codec}, the fastest that kept the quality of such models, gains ${(100 * (plain.step_s / seconds[place] - 1)).toFixed(1)} %, and such predictions may be ${(100 * error).toFixed(0)} % off` };
  return { codec: best.codec, why: `${best.speedup_fp32.toFixed(2)} times as fast as float32 and ${best.speedup_bf16.toFixed(2)} times as fast as ` +
    `bfloat16; it pushes ${Number((plain.push / plain.every / best.push * best.every).toPrecision(3))} times fewer bytes` + (best.evidence ? `. It ${best.evidence}` : "") };
};

laconic.whatIf = (settings) => {
  const { html, precise } = laconic;
  const f = formulas;
  const unit = (x, units) => { const [size, name] = units.find(([one]) => x >= one) ?? units.at(-1); return `${precise(x / size)} ${name}`; };
  const LABELS = {
    workers: ["Workers M", String],
    rate: ["Bandwidth", (x) => unit(x, [[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1, "bit/s"]])],
    rho: ["ρ, compressed over original size", precise],
    h: ["h, compressed over dense time", precise],
    step_s: ["Step time C, one node", (x) => unit(x, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]])],
    nbytes: ["Model W, float32", (x) => unit(x, [[1e9, "GB"], [1e6, "MB"], [1, "B"]])],
    every: ["Iterations an update i", String],
  };
  const family = Object.keys(settings.families)[0], optimizer = settings.families[family];
  const state = { profile: Object.keys(settings.profiles)[0], family, optimizer, ...settings.presets[0] };
  delete state.name;

  const inputs = {}, outputs = {};
  for (const [name, [words]] of Object.entries(LABELS)) {
    const values = settings.knobs[name];
    const input = html("input", { type: "range", min: 0, max: values.length - 1, step: 1, id: `knob-${name}` });
    const output = html("output", {});
    output.setAttribute("for", input.id);
    input.addEventListener("input", () => { state[name] = values[Number(input.value)]; refresh(); });
    const label = html("label", { htmlFor: input.id }, words, output);
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
  const choice = (name, values) => {
    const select = html("select", { id: `knob-${name}` });
    values.forEach((value) => select.append(html("option", { textContent: value, value })));
    select.value = state[name];
    return select;
  };
  const families = choice("family", Object.keys(settings.families)), optimizers = choice("optimizer", settings.optimizers);
  families.addEventListener("change", () => {
    state.family = families.value;
    state.optimizer = optimizers.value = settings.families[state.family];
    refresh();
  });
  optimizers.addEventListener("change", () => { state.optimizer = optimizers.value; refresh(); });
  document.getElementById("presets").append(html("label", {}, "Begin with", presets), html("label", {}, "Machine of codecs", profiles),
    html("label", {}, "Family of the model", families), html("label", {}, "Optimizer", optimizers));

  /* ---------------------------------------------------------------------------------------------------- curves */

  const table = (columns, rows) => new laconic.Table({
    columns, cells: columns.map((_, i) => ({ numbers: rows.map((row) => row[i]) })),
  });
  const workerCounts = () => {
    const most = Math.max(25, state.workers), stride = Math.ceil(most / 64);
    return Array.from({ length: most }, (_, i) => i + 1).filter((m) => m % stride === 0 || m === 1 || m === state.workers);
  };
  const compute = (m) => f.ideal_s(m, state.step_s, state.every);
  const transfer = (m) => f.transfer_s(m, state.nbytes, state.rate / 8);
  const oneNode = () => compute(1);
  const slope = () => f.slope(state.workers, state.nbytes, state.step_s, state.rate / 8, state.every);
  const compressed = () => `ρ ${precise(state.rho)}, h ${precise(state.h)}`;
  const homomorphic = (m, h = state.h) => f.total_s(f.homomorphic_update(compute(m), transfer(m), state.rho, h));
  const dense = (m) => f.total_s([compute(m), transfer(m)]);
  const gzip = (m) => {
    const { rho, compress_byte_s, decompress_byte_s } = settings.gzip;
    return f.total_s(f.naive_update(compute(m), transfer(m), rho, state.nbytes * compress_byte_s, state.nbytes * decompress_byte_s, m));
  };
  const hours = (seconds) => f.training_s(seconds, settings.iterations, state.every) / 3600;
  const byWorkers = (show) => workerCounts().flatMap((m) =>
    [["ideal", compute(m)], ["vanilla", dense(m)], ["gzip", gzip(m)], [compressed(), homomorphic(m)]].map(([name, seconds]) => [name, m, show(seconds)]));

  const curves = {
    "if-split": () => {
      const rows = workerCounts().flatMap((m) => [["T_cmt, computation", m, compute(m)], ["T_inf, transfer", m, transfer(m)]]);
      const cross = f.crossover(state.nbytes, state.step_s, state.rate / 8, state.every), seen = cross >= 1 && cross <= Math.max(25, state.workers);
      return [table(["part", "workers", "seconds"], rows), seen ? [{ axis: "x", value: cross, label: `both as long at ${precise(Number(cross.toPrecision(3)))}` }] : []];
    },
    "if-update": () => [table(["way", "workers", "seconds"], byWorkers((seconds) => seconds)), [{ axis: "x", value: state.workers, label: `${state.workers} workers` }]],
    "if-speedup": () => [table(["way", "workers", "speed-up"], byWorkers((seconds) => f.speed_up(oneNode(), seconds))), [{ axis: "y", value: 1, label: "one node" }]],
    "if-h": () => {
      const most = Math.max(2, 1.5 * state.h), hs = Array.from({ length: 41 }, (_, k) => (most * k) / 40);
      const marks = [{ axis: "y", value: dense(state.workers), label: "vanilla" }, { axis: "x", value: state.h, label: `h ${precise(state.h)}` }];
      return [table(["size", "h", "seconds"], hs.map((h) => [`ρ ${precise(state.rho)}`, h, homomorphic(state.workers, h)])), marks];
    },
    "if-hours": () => [table(["way", "workers", "hours"], byWorkers(hours)), [{ axis: "y", value: hours(oneNode()), label: "one node" }]],
    "if-codecs": () => {
      const rows = laconic.predictCodecs(settings, state).sort((a, b) => a.step_s - b.step_s);
      return [table(["codec", "seconds an iteration", "kB pushed", "over float32", "over bfloat16"], rows.map((one) => [one.codec, one.step_s, one.push / 1e3, one.speedup_fp32, one.speedup_bf16])), []];
    },
  };
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
    const { workers, rho, h } = state, k = slope(), bold = (text) => html("b", { textContent: text });
    const gain = f.over_vanilla(k, rho, h), limit = f.limit_of_h(k, rho), useful = f.crossover(state.nbytes, state.step_s, state.rate / 8, state.every) ** 2;
    const { codec, why } = laconic.recommendCodec(laconic.predictCodecs(settings, state), workers, settings.model_error);
    const lines = [
      ["Compressed ", bold(`${h < limit ? "pays" : "does not pay"}: ${about(gain)} times as fast as vanilla`),
        `, ${about(f.over_one_node(k, workers, rho, h))} times as fast as one node. An update takes ${about(f.r_min(k, rho, h))} times the ideal; vanilla ${about(f.r_min(k, 1, 1))}.`],
      [`It would pay up to h ${about(limit)} at this ρ. More than ${precise(Math.floor(useful))} workers are slower than one node as they are.`],
      ["Codec to use: ", bold(codec === "none" ? "none: don't compress" : codec), `; ${why}.`],
    ];
    document.getElementById("advice").replaceChildren(...lines.map((line) => html("p", {}, ...line)));
  }

  const charts = {};
  function refresh() {
    for (const [name, [, show]] of Object.entries(LABELS)) {
      inputs[name].value = settings.knobs[name].indexOf(state[name]);
      outputs[name].textContent = show(state[name]);
      inputs[name].setAttribute("aria-valuetext", show(state[name]));
    }
    for (const [id, curve] of Object.entries(curves)) {
      const [rows, marks] = curve();
      if (charts[id]) charts[id].update(rows, marks);
      else {
        const figure = document.querySelector(`figure[data-if="${id}"]`);
        charts[id] = new laconic.Chart(figure, { id, detail: id === "if-codecs" ? ["kB pushed", "over float32", "over bfloat16"] : [], stacked: false, diagonals: [], zero: true, marks, ...SHAPES[id] }, rows);
      }
    }
    words();
  }
  refresh();
  Object.assign(laconic, { knobs: settings.knobs, state, refresh });
};
