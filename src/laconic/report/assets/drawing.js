"use strict";
/* Elements, tables of rows, numbers, scales and colours, which charts are made of. */

const laconic = { charts: new Map(), colours: new Map() };

(() => {
  const NS = "http://www.w3.org/2000/svg";
  const COLOURS = 10, DASHES = ["", "7 3", "2 3", "8 3 2 3"];

  function html(tag, properties = {}, ...children) {
    const found = Object.assign(document.createElement(tag), properties);
    found.append(...children);
    return found;
  }

  function svg(tag, attributes = {}, text) {
    const found = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
    if (text !== undefined) found.textContent = text;
    return found;
  }

  /* ----------------------------------------------------------------------------------------------------- rows */

  class Table {
    constructor({ columns, cells }) {
      this.columns = columns;
      this.cells = cells.map((one) => one.numbers ?? one.at.map((i) => (i === null ? null : one.words[i])));
      this.rows = this.cells.length ? this.cells[0].length : 0;
    }
    column(name) { return this.cells[this.columns.indexOf(name)]; }
    csv() {
      const field = (x) => {
        let text = x === null || x === undefined ? "" : String(x);
        /* A spreadsheet runs a text that begins like this as a formula. */
        if (typeof x === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
        return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
      };
      const lines = [this.columns.map(field).join(",")];
      for (let i = 0; i < this.rows; i++) lines.push(this.cells.map((column) => field(column[i])).join(","));
      return lines.join("\n") + "\n";
    }
  }

  function download(name, text) {
    const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    html("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  /* -------------------------------------------------------------------------------------------------- numbers */

  function trimmed(x, digits) { return String(Number(x.toPrecision(digits))); }

  function short(x, digits = 3) {
    const size = Math.abs(x);
    if (size === 0) return "0";
    if (size >= 1e12 || size < 1e-3) return x.toExponential(1).replace(".0e", "e").replace("e+", "e");
    if (size >= 1e9) return `${trimmed(x / 1e9, digits)}G`;
    if (size >= 1e6) return `${trimmed(x / 1e6, digits)}M`;
    if (size >= 1e4) return `${trimmed(x / 1e3, digits)}k`;
    return trimmed(x, digits);
  }

  /* Texts of ticks, with as many digits as tell them apart. */
  function labelled(ticks) {
    const texts = (digits) => ticks.map((tick) => short(tick, digits));
    let digits = 3;
    while (digits < 8 && new Set(texts(digits)).size < ticks.length) digits++;
    return texts(digits);
  }

  function precise(x) {
    if (typeof x !== "number") return x ?? "–";
    const size = Math.abs(x);
    if (size !== 0 && (size < 1e-3 || size >= 1e12)) return x.toExponential(3);
    return x.toLocaleString("en-US", { maximumSignificantDigits: 5 });
  }

  function ticks(low, high, log, most) {
    if (log) {
      const found = [], from = Math.floor(Math.log10(low) + 1e-9), to = Math.ceil(Math.log10(high) - 1e-9);
      const step = Math.max(1, Math.ceil((to - from) / most)), decades = Math.log10(high / low);
      const inner = decades <= 1 ? [1, 2, 3, 5, 7] : decades <= 2.3 ? [1, 2, 5] : [1];
      for (let e = from; e <= to; e += step)
        for (const m of inner) if (m * 10 ** e >= low * 0.999 && m * 10 ** e <= high * 1.001) found.push(m * 10 ** e);
      if (found.length > 2 || decades > 1) return found.length > 1 ? found : [low, high];
    }
    const rough = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((one) => one >= rough * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
    return found;
  }

  function scale(values, log, from, to, { zero = false } = {}) {
    let low = Infinity, high = -Infinity;
    for (const x of values) { if (x < low) low = x; if (x > high) high = x; }
    if (!Number.isFinite(low)) { low = log ? 1 : 0; high = log ? 10 : 1; }
    if (log) {
      if (low === high) { low /= 2; high *= 2; }
      const room = (Math.log(high) - Math.log(low)) * 0.04;
      low = Math.exp(Math.log(low) - room); high = Math.exp(Math.log(high) + room);
    } else {
      if (zero) { low = Math.min(0, low); high = Math.max(0, high) || (low ? 0 : 1); }
      if (low === high) { low -= Math.abs(low) / 10 || 0.5; high += Math.abs(high) / 10 || 0.5; }
      const room = (high - low) * 0.04;
      if (!(zero && low === 0)) low = low >= 0 && low - room < 0 ? 0 : low - room;
      high += room;
    }
    const at = log
      ? (x) => from + ((Math.log(x) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from)
      : (x) => from + ((x - low) / (high - low)) * (to - from);
    return { low, high, log, at, ticks: (most) => ticks(low, high, log, most) };
  }

  const SHAPES = [
    (x, y) => `M${x - 4},${y}a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z`,
    (x, y) => `M${x - 3.5},${y - 3.5}h7v7h-7Z`,
    (x, y) => `M${x},${y - 4.8}l4.6,8.2h-9.2Z`,
    (x, y) => `M${x},${y - 5}l5,5l-5,5l-5,-5Z`,
  ];

  /* A colour of the style; bars of names that no plot draws as a series have none of their own. */
  function colour(element, index, fill) {
    const paint = index === null ? "var(--bar)" : `var(--c${index % COLOURS})`;
    element.style[fill ? "fill" : "stroke"] = paint;
    // Bars have neither dashes nor shapes: the second name of a colour is pale with an outline.
    if (element.tagName === "rect" && index >= COLOURS) Object.assign(element.style, { fillOpacity: 0.35, stroke: paint });
    return element;
  }

  /* Numbers of names: the page's, and for other names the first that these do not use. */
  function numbered(names) {
    const found = new Map(names.map((name) => [name, laconic.colours.get(String(name))]));
    const taken = new Set(found.values());
    for (const [name, number] of found) {
      if (number !== undefined) continue;
      let free = 0;
      while (taken.has(free)) free++;
      taken.add(free);
      found.set(name, free);
    }
    return found;
  }

  /* A text in lines of at most `room` characters, broken after spaces, commas and bars. */
  function wrapped(text, room, most = 3) {
    const lines = [""];
    for (const part of String(text).match(/[^\s,|/]*[\s,|/]*/g)) {
      if (lines.at(-1) && (lines.at(-1) + part).trimEnd().length > room && lines.length < most) lines.push("");
      lines[lines.length - 1] += part;
    }
    return lines.map((line) => line.trimEnd()).map((line) => (line.length > room + 2 ? `${line.slice(0, room)}…` : line));
  }

  Object.assign(laconic, { COLOURS, DASHES, SHAPES, Table, colour, download, html, labelled, numbered, precise, scale, short, svg, wrapped });
})();
