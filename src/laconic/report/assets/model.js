"use strict";
/* Models of time, as in laconic.plan: jang2017's (paper.py, bound.py), and what an exchange through one server takes with
   each codec of a profile (costs.py, advice.py). Tests compare every function with Python's. Bytes, seconds. */

const model = (() => {
  const total = (update) => update.compute + update.transfer + update.compress + update.decompress;
  const update = (compute, transfer, compress = 0, decompress = 0) => ({ compute, transfer, compress, decompress });

  /* training: { nbytes W, step_s C, bandwidth bytes/s, every i } */
  const idealS = (t, workers) => (t.every * t.step_s) / workers;
  const slope = (t, workers) => (workers ** 2 * t.nbytes) / (t.every * t.step_s * t.bandwidth);
  const rMin = (t, workers, rho, h) => h + slope(t, workers) * rho;

  const oneNode = (t) => update(t.every * t.step_s, 0);
  const ideal = (t, workers) => update(idealS(t, workers), 0);
  const vanilla = (t, workers) => update(idealS(t, workers), (workers * t.nbytes) / t.bandwidth);
  function naive(t, workers, by, serverDecompressions = workers) {
    const plain = vanilla(t, workers);
    return update(plain.compute, by.rho * plain.transfer, 2 * by.compress_s, (1 + serverDecompressions) * by.decompress_s);
  }
  function homomorphic(t, workers, rho, h) {
    const plain = vanilla(t, workers);
    return update(h * plain.compute, rho * plain.transfer);
  }
  const speedUp = (t, one) => total(oneNode(t)) / total(one);
  const crossover = (t) => Math.sqrt((t.every * t.step_s * t.bandwidth) / t.nbytes);
  const mostUseful = (t) => crossover(t) ** 2;
  const training = (t, one, iterations, once = 0) => once + (total(one) * iterations) / t.every;

  const overOneNode = (t, workers, rho, h) => workers / rMin(t, workers, rho, h);
  const overVanilla = (t, workers, rho, h) => (1 + slope(t, workers)) / rMin(t, workers, rho, h);
  const beatsVanilla = (t, workers, rho, h) => h < 1 + slope(t, workers) * (1 - rho);
  const largestRho = (t, workers, h, target) => Math.min(1, Math.max(0, (target - h) / slope(t, workers)));
  const largestH = (t, workers, rho, target) => target - slope(t, workers) * rho;

  /* --------------------------------------------------------------------------------------- codecs of a profile */

  /* Between measured sizes on a line; points are [numel, nbytes, encode_s, decode_s, add_s]. */
  function point(points, numel) {
    const first = points[0], last = points[points.length - 1];
    if (numel <= first[0]) {
      const share = numel / first[0];
      return [first[1] * share, ...first.slice(2).map((s) => s * Math.max(share, 0.25))];
    }
    if (numel >= last[0]) return last.slice(1).map((x) => (x * numel) / last[0]);
    const above = points.findIndex((one) => one[0] >= numel), a = points[above - 1], b = points[above];
    const part = (numel - a[0]) / (b[0] - a[0]);
    return a.slice(1).map((x, i) => x + part * (b[i + 1] - x));
  }

  function slots(params, fixed) {
    const whole = Math.floor(params / fixed.slot), rest = params - whole * fixed.slot;
    return [...Array(whole).fill(fixed.slot), ...(rest ? [rest] : [])];
  }

  function message(profile, spec, params, workers, fixed) {
    const one = profile.codecs[spec], sizes = slots(params, fixed);
    const parts = sizes.map((n) => point(spec !== "gzip" && n < fixed.minNumel ? profile.codecs.none.points : one.points, n));
    const sum = (i) => parts.reduce((found, part) => found + part[i], 0);
    let push = sum(0), pull = push;
    if (one.sums) {
      const large = sizes.filter((n) => n >= fixed.minNumel).reduce((a, b) => a + b, 0), small = params - large;
      const [up, down] = large ? one.sums[String(workers)] : [0, 0];
      push = up * large + (2 + 4 / 1024) * small;
      pull = down * large + (4 + 4 / 1024) * small;
    }
    return { codec: spec, push, pull, encode_s: sum(1), decode_s: sum(2), add_s: sum(3), summable: Boolean(one.sums),
      memory: push + pull + 4 * params * (1 + (one.remembers ? 1 : 0)) };
  }

  /* When pieces that come at these times have passed a stage, one after the other, that takes so long for all. */
  function served(times, shares, seconds) {
    let free = 0;
    return times.map((time, i) => (free = Math.max(free, time) + shares[i] * seconds));
  }

  function pieces(work, encode_s) {
    const shares = work.ready.map(([, share], i) => share - (i ? work.ready[i - 1][1] : 0));
    if (work.every > 1) return [served(shares.map(() => work.step_s), shares, encode_s), shares];
    if (work.spare) return [served(work.ready.map(([time]) => time * work.step_s), shares, encode_s), shares];
    return [work.ready.map(([time]) => time * (work.step_s + encode_s)), shares];
  }

  /* Seconds of an iteration through one server. */
  function step(work, network, one) {
    if (network.workers === 1) return work.step_s;
    const toServer = (nbytes) => {
      const bytesS = (network.rate * network.goodput) / 8, load = network.workers * nbytes;
      return Math.max(nbytes / bytesS, load / bytesS, load * network.byte_s);
    };
    const push = toServer(one.push), pull = toServer(one.pull), adding = network.workers * one.add_s;
    const computed = work.step_s + (work.spare && work.every === 1 ? 0 : one.encode_s);
    const [times, shares] = pieces(work, one.encode_s), there = served(times, shares, push);
    let end;
    if (one.summable) end = served(served(there, shares, adding), shares, pull).at(-1);
    else {
      const begin = Math.max(there.at(-1), computed) + adding, back = [...shares].reverse();
      const made = served(back.map(() => begin), back, one.encode_s);
      made[made.length - 1] += one.decode_s;
      end = served(made, back, pull).at(-1);
    }
    end = Math.max(end, computed) + one.decode_s + network.exchange_s;
    return ((work.every - 1) * work.step_s + end) / work.every;
  }

  /* Codecs of a profile side by side, and which to take, if any. asked: { params, step_s, workers, rate bit/s, every } */
  function advise(profile, asked, fixed) {
    const { params, workers } = asked, count = slots(params, fixed).length, { transport } = profile;
    const work = { step_s: asked.step_s, every: asked.every, ready: fixed.ready, spare: profile.spare };
    const network = { workers, rate: asked.rate, goodput: fixed.goodput, byte_s: transport.byte_s,
      exchange_s: transport.exchange_s + transport.slot_s * Math.max(0, count - 2) };
    const stock = Object.keys(profile.codecs).filter((spec) => !profile.codecs[spec].sums || profile.codecs[spec].sums[String(workers)]);
    const rows = [...new Set(["none", "bf16", ...stock])].map((spec) => {
      const one = message(profile, spec, params, workers, fixed), memory = 12 * params + one.memory;
      return { codec: spec, push: one.push, pull: one.pull, step_s: step(work, network, one), memory,
        fits: profile.memory === null || memory <= profile.memory };
    });
    const base = Object.fromEntries(rows.map((row) => [row.codec, row.step_s]));
    for (const row of rows) {
      row.speedup_fp32 = base.none / row.step_s;
      row.speedup_bf16 = base.bf16 / row.step_s;
    }
    return { rows, ...chosen(rows, workers, fixed) };
  }

  function chosen(rows, workers, fixed) {
    if (workers === 1) return { codec: "none", why: "one worker has nobody to exchange with" };
    const fitting = rows.filter((row) => row.fits);
    if (!fitting.length) return { codec: "none", why: "not even the model with its gradient and momentum fits into the machine's memory" };
    const best = fitting.reduce((a, b) => (b.step_s < a.step_s ? b : a));
    if (best.codec === "none") return { codec: "none", why: "no codec of this profile is faster" };
    if (best.speedup_fp32 < fixed.gain)
      return { codec: "none", why: `${best.codec}, the fastest, gains ${(100 * (best.speedup_fp32 - 1)).toFixed(1)} %, which is not worth its loss` };
    const plain = rows.find((row) => row.codec === "none");
    return { codec: best.codec, why: `${best.speedup_fp32.toFixed(2)} times as fast as float32 and ${best.speedup_bf16.toFixed(2)} times as ` +
      `bfloat16; it pushes ${Number((plain.push / best.push).toPrecision(3))} times fewer bytes` };
  }

  return { advise, beatsVanilla, crossover, homomorphic, ideal, idealS, largestH, largestRho, mostUseful, naive, oneNode,
    overOneNode, overVanilla, rMin, slope, speedUp, total, training, vanilla };
})();
