"use strict";
/* Charts in SVG: lines, points and bars; hover, touch and keyboard; a legend that switches; their rows as table and CSV. */

(() => {
  const { COLOURS, DASHES, SHAPES, colour, download, html, labelled, numbered, precise, scale, short, svg, wrapped } = laconic;
  const SHOWN_ROWS = 300;

  class Chart {
    constructor(figure, plot, table) {
      this.figure = figure; this.plot = plot; this.table = table;
      this.hidden = new Set();
      this.log = { x: plot.log.includes("x"), y: plot.log.includes("y") };
      this.picked = plot.pick ? plot.begin ?? this.values(plot.pick)[0] : null;
      this.whole = false;
      this.cursor = null;
      this.box = html("div", { className: "chart" });
      this.tip = html("div", { className: "tip", hidden: true });
      this.spoken = html("div", { className: "spoken" });
      this.spoken.setAttribute("aria-live", "polite");
      this.legend = html("ul", { className: "legend" });
      this.legend.setAttribute("aria-label", "Series");
      this.rowsBox = html("div", { className: "wide tall", hidden: true, tabIndex: 0 });
      this.rowsBox.setAttribute("role", "region");
      this.rowsBox.setAttribute("aria-label", `${plot.title}: rows`);
      this.figure.append(this.box, this.legend, this.tools(), this.rowsBox, this.spoken);
      laconic.charts.set(plot.id, this);
      this.width = 0;
      new ResizeObserver(() => {
        const width = this.box.clientWidth;
        if (width && width !== this.width) this.draw();
      }).observe(this.box);
      this.draw();
    }

    values(column) { return [...new Set(this.table.column(column).filter((x) => x !== null))]; }

    update(table, marks) {
      this.table = table;
      if (marks) this.plot.marks = marks;
      this.draw();
      if (!this.rowsBox.hidden) this.fillRows();
    }

    tools() {
      const { plot } = this, bar = html("div", { className: "tools" });
      if (plot.pick && this.values(plot.pick).length > 1) {
        const select = html("select", {});
        for (const one of this.values(plot.pick)) select.append(html("option", { textContent: one, value: one, selected: one === this.picked }));
        select.addEventListener("change", () => { this.picked = this.values(plot.pick)[select.selectedIndex]; this.draw(); });
        bar.append(html("label", {}, plot.pick, select));
      }
      const toggle = (words, on, change, label) => {
        const button = html("button", { type: "button", textContent: words });
        button.setAttribute("aria-pressed", on);
        if (label) button.setAttribute("aria-label", `${plot.title}: ${label}`);
        button.addEventListener("click", () => {
          const now = button.getAttribute("aria-pressed") !== "true";
          button.setAttribute("aria-pressed", now);
          change(now);
        });
        bar.append(button);
      };
      for (const axis of plot.kind === "bars" ? ["x"] : ["x", "y"]) {
        if (plot.stacked || !this.table.column(plot[axis]).every((x) => x === null || x >= 0)) continue;
        if (!this.table.column(plot[axis]).some((x) => x > 0)) continue;
        toggle(`log ${axis}`, this.log[axis], (on) => { this.log[axis] = on; this.draw(); }, `logarithmic ${axis} axis`);
      }
      if (plot.kind === "line") toggle("whole y", false, (on) => { this.whole = on; this.draw(); }, "y axis with all values");
      this.wholeButton = plot.kind === "line" ? bar.lastChild : null;
      toggle("Table", false, (on) => { this.rowsBox.hidden = !on; if (on) this.fillRows(); }, "show rows");
      const csv = html("button", { type: "button", textContent: "CSV" });
      csv.setAttribute("aria-label", `${plot.title}: download rows as CSV`);
      csv.addEventListener("click", () => download(`${plot.id}.csv`, this.table.csv()));
      bar.append(csv);
      return bar;
    }

    fillRows() {
      const { table } = this;
      const numeric = table.cells.map((cells) => cells.every((x) => typeof x !== "string"));
      const cell = (tag, text, column) => html(tag, { textContent: text, className: numeric[column] ? "figure" : "" });
      const head = html("thead", {}, html("tr", {}, ...table.columns.map((name, i) => cell("th", name, i))));
      const body = html("tbody");
      for (let r = 0; r < Math.min(table.rows, SHOWN_ROWS); r++)
        body.append(html("tr", {}, ...table.cells.map((cells, i) => cell("td", precise(cells[r]), i))));
      const rest = table.rows - SHOWN_ROWS;
      const note = rest > 0 ? [html("p", { className: "note", textContent: `and ${rest} more in the CSV` })] : [];
      this.rowsBox.replaceChildren(html("table", {}, head, body), ...note);
    }

    /* Rows that are shown, as series of groups of points. */
    series() {
      const { plot, table } = this;
      const names = plot.series ? this.values(plot.series) : [plot.title];
      const numbers = plot.series ? numbered(names) : new Map([[plot.title, null]]);
      const found = new Map(names.map((name) => [name, { name, index: numbers.get(name), groups: new Map(), points: [] }]));
      const [xs, ys] = [table.column(plot.x), table.column(plot.y)];
      const [by, group, pick] = ["series", "group", "pick"].map((key) => (plot[key] ? table.column(plot[key]) : null));
      this.dropped = 0;
      for (let row = 0; row < table.rows; row++) {
        if (pick && pick[row] !== this.picked) continue;
        const one = found.get(by ? by[row] : plot.title), x = xs[row], y = ys[row];
        if (!one || x === null || y === null) continue;
        if ((this.log.x && typeof x === "number" && x <= 0) || (this.log.y && typeof y === "number" && y <= 0)) {
          this.dropped++;
          continue;
        }
        const key = group ? group[row] : "";
        if (!one.groups.has(key)) one.groups.set(key, []);
        const point = { row, x, y, series: one };
        one.groups.get(key).push(point);
        one.points.push(point);
      }
      return [...found.values()].filter((one) => one.points.length);
    }

    draw() {
      this.width = this.box.clientWidth || 320;
      const all = this.series();
      this.drawLegend(all);
      this.shown = all.filter((one) => !this.hidden.has(one.name));
      this.canvas = svg("svg", { role: "group", tabindex: 0, "aria-roledescription": "chart", "data-chart": this.plot.id });
      this.canvas.setAttribute("aria-label", this.described());
      if (this.plot.kind === "bars") this.drawBars(); else this.drawPlane();
      this.canvas.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
      this.canvas.setAttribute("height", this.height);
      this.ring = svg("path", { class: "cursor", visibility: "hidden" });
      this.canvas.append(this.ring);
      this.cursor = null;
      this.tip.hidden = true;
      const focused = this.box.contains(document.activeElement);
      this.box.replaceChildren(this.canvas, this.tip);
      if (focused) this.canvas.focus();
      this.listen();
    }

    described() {
      const { plot } = this, names = this.shown.map((one) => one.name);
      const what = plot.kind === "bars" ? `${plot.x} by ${plot.y}` : `${plot.y} against ${plot.x}`;
      const who = plot.series ? ` ${names.length} series: ${names.slice(0, 8).join(", ")}${names.length > 8 ? ", …" : ""}.` : "";
      const claims = this.marks.map((mark) => `${mark.label} ${precise(mark.value)}`).join(", ");
      const best = plot.better ? ` Pareto line: ${[...new Set(this.pareto().map((p) => p.series.name))].join(", ")}.` : "";
      return `${plot.title}. ${what}.${who}${claims ? ` Lines: ${claims}.` : ""}${best} Arrow keys read points.`;
    }

    drawLegend(all) {
      if (!this.plot.series || all.length < 2) { this.legend.replaceChildren(); return; }
      this.legend.replaceChildren(...all.map((one) => {
        const sample = svg("svg", { width: 18, height: 12, "aria-hidden": "true" });
        if (this.plot.kind === "line") {
          const line = svg("line", { x1: 0, x2: 18, y1: 6, y2: 6, "stroke-width": 2.5, "stroke-dasharray": this.dash(one) });
          sample.append(colour(line, one.index));
        } else {
          const shape = this.plot.kind === "bars" ? SHAPES[1] : this.shape(one);
          sample.append(colour(svg("path", { d: shape(9, 6) }), one.index, true));
        }
        const button = html("button", { type: "button", title: "Click: on or off. Shift and click: alone." }, sample, one.name);
        button.setAttribute("aria-pressed", !this.hidden.has(one.name));
        button.addEventListener("click", (event) => {
          if (event.shiftKey) this.hidden = new Set(all.filter((other) => other !== one).map((other) => other.name));
          else if (!this.hidden.delete(one.name)) this.hidden.add(one.name);
          const place = [...this.legend.querySelectorAll("button")].indexOf(button);
          this.draw();
          this.legend.querySelectorAll("button")[place]?.focus();
        });
        return html("li", {}, button);
      }));
      if (!this.plot.better) return;
      const sample = svg("svg", { width: 18, height: 12, "aria-hidden": "true" });
      sample.append(svg("line", { class: "pareto", x1: 0, x2: 18, y1: 6, y2: 6 }));
      this.legend.append(html("li", { className: "words" }, sample, "Pareto line: none is better in both"));
    }

    /* Points that no other shown point beats in both directions, by x. */
    pareto() {
      const [right, up] = this.plot.better, points = this.shown.flatMap((one) => one.points);
      const sorted = points.sort((a, b) => right * (b.x - a.x) || up * (b.y - a.y)), found = [];
      for (const point of sorted) if (!found.length || up * (point.y - found.at(-1).y) > 0) found.push(point);
      return found;
    }

    get marks() { return this.plot.marks.filter((m) => !m.pick || m.pick === this.picked); }
    dash(one) { return DASHES[Math.floor(one.index / COLOURS) % DASHES.length]; }
    shape(one) { return SHAPES[Math.floor(one.index / COLOURS) % SHAPES.length]; }
    drawPlane() {
      const { plot, width } = this, small = width < 480;
      this.height = small ? 270 : 310;
      const points = this.shown.flatMap((one) => one.points);
      const marksOf = (axis) => this.marks.filter((m) => m.axis === axis && (!this.log[axis] || m.value > 0)).map((m) => m.value);
      const bottom = this.height - 42, top = 8;
      const errorBars = plot.low ? [this.table.column(plot.low), this.table.column(plot.high)] : null;
      const ends = errorBars ? points.flatMap((p) => errorBars.map((column) => column[p.row])) : [];
      const ys = scale(this.focused([...points.map((p) => p.y), ...ends, ...marksOf("y")], marksOf("y"), errorBars), this.log.y, bottom, top);
      const yTicks = ys.ticks(6), yTexts = labelled(yTicks);
      const left = 14 + 7 * Math.max(...yTexts.map((text) => text.length), 2) + 12;
      const xs = scale([...points.map((p) => p.x), ...marksOf("x")], this.log.x, left, width - 12);
      for (const [i, tick] of yTicks.entries()) {
        const y = ys.at(tick);
        this.canvas.append(svg("line", { class: "grid", x1: left, x2: width - 12, y1: y, y2: y }));
        this.canvas.append(svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, yTexts[i]));
      }
      this.xAxis(xs, bottom, left, plot.x, small ? 4 : 7);
      this.canvas.append(svg("text", { transform: `translate(10,${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, plot.y));
      for (const slope of plot.diagonals) this.diagonal(slope, xs, ys);
      if (plot.better) {
        const d = this.pareto().map((p, i) => `${i ? `H${xs.at(p.x)}V` : `M${xs.at(p.x)},`}${ys.at(p.y)}`).join("");
        if (d) this.canvas.append(svg("path", { class: "pareto", d }));
      }
      const marks = this.drawMarks(xs, ys, left, top, bottom);
      /* Lines that leave the y axis end at the edge of an inner drawing. */
      const inner = svg("svg", { x: left, y: top - 4, width: width - 12 - left + 4, height: bottom - top + 4, class: "inner" });
      inner.setAttribute("viewBox", `${left} ${top - 4} ${width - 12 - left + 4} ${bottom - top + 4}`);
      this.canvas.append(inner);
      const many = points.length > 60 * this.shown.length || points.length > 1500;
      for (const one of this.shown) {
        if (plot.kind === "line")
          for (const group of one.groups.values()) {
            const d = group.map((p, i) => `${i ? "L" : "M"}${xs.at(p.x).toFixed(1)},${ys.at(p.y).toFixed(1)}`).join("");
            const line = svg("path", { d, fill: "none", "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-dasharray": this.dash(one), "data-series": one.name });
            inner.append(colour(line, one.index));
          }
        for (const point of one.points) {
          point.px = xs.at(point.x); point.py = Math.max(top, Math.min(bottom, ys.at(point.y)));
          if (point.y < ys.low || point.y > ys.high) continue;
          if (errorBars) this.errorBar(inner, one, point, ...errorBars.map((column) => ys.at(column[point.row])));
          if (plot.kind === "line" && (many || one.points.length > 40)) continue;
          const dot = svg("path", { d: this.shape(one)(point.px, point.py), "data-series": one.name });
          if (plot.kind === "line") dot.setAttribute("transform", `translate(${point.px},${point.py}) scale(.6) translate(${-point.px},${-point.py})`);
          this.canvas.append(colour(dot, one.index, true));
        }
      }
      const taken = this.labelMarks(marks, points, left, top);
      if (plot.kind === "points" && plot.series && points.length <= 14) this.name(points, taken, marks, left, bottom);
    }

    /* Values for the y axis of lines. Most lines begin far from where they end: where the later halves of all lines need
       less than half of the axis, and the earlier ones lie on one side of them, the later ones get all of it. */
    focused(values, marks, errorBars) {
      this.focus = false;
      if (this.plot.kind !== "line") return values;
      const late = this.shown.flatMap((one) => [...one.groups.values()].flatMap((group) => group.slice(Math.floor(group.length / 2))));
      const ends = [...late.flatMap((p) => [p.y, ...(errorBars ?? []).map((column) => column[p.row])]), ...marks].filter((y) => y !== null);
      const range = (some) => some.map((y) => (this.log.y ? Math.log(y) : y)).reduce(([low, high], y) => [Math.min(low, y), Math.max(high, y)], [Infinity, -Infinity]);
      const [low, high] = range(ends), [least, most] = range(values), span = high - low;
      const near = [least, most].filter((y) => y > low - span / 4 && y < high + span / 4).map((y) => (this.log.y ? Math.exp(y) : y));
      const useful = late.length > 1 && span > 0 && span < (most - least) / 2 && near.length > 0;
      this.wholeButton.hidden = !useful;
      this.focus = useful && !this.whole;
      return this.focus ? [...ends, ...near] : values;
    }

    errorBar(inner, one, point, low, high) {
      const d = `M${point.px},${low}V${high}M${point.px - 3},${low}h6M${point.px - 3},${high}h6`;
      inner.append(colour(svg("path", { d, fill: "none", "stroke-width": 1 }), one.index));
    }

    /* Names beside points, where there is room for them: clear of points, other texts and, if possible, of lines. */
    name(points, texts, marks, left, bottom) {
      const taken = [...points.map((p) => [p.px - 5, p.py - 5, p.px + 5, p.py + 5]), ...texts];
      const lines = marks.map(({ x, y }) => (x === undefined ? [0, y - 1, this.width, y + 1] : [x - 1, 0, x + 1, bottom]));
      const clear = ([x, y], wide) => ([x1, y1, x2, y2]) => x + wide < x1 || x > x2 || y < y1 || y - 10 > y2;
      for (const point of [...points].sort((a, b) => a.py - b.py)) {
        const wide = 6.6 * String(point.series.name).length + 4;
        if (wide > 140) continue;
        const places = [[8, 4], [-wide - 4, 4], [-wide / 2, -9], [-wide / 2, 17], [8, -5], [8, 15]].map(([dx, dy]) => [point.px + dx, point.py + dy])
          .filter((place) => place[0] > left && place[0] + wide < this.width && place[1] > 10 && place[1] < bottom && taken.every(clear(place, wide)));
        const free = places.find((place) => lines.every(clear(place, wide))) ?? places[0];
        if (!free) continue;
        taken.push([free[0], free[1] - 10, free[0] + wide, free[1]]);
        this.canvas.append(svg("text", { class: "strong halo", x: free[0], y: free[1] }, point.series.name));
      }
    }

    diagonal(slope, xs, ys) {
      const from = Math.max(xs.low, ys.low / slope), to = Math.min(xs.high, ys.high / slope);
      if (from >= to) return;
      const line = svg("line", { class: "diagonal", x1: xs.at(from), y1: ys.at(from * slope), x2: xs.at(to), y2: ys.at(to * slope) });
      this.canvas.append(line);
    }

    xAxis(xs, bottom, left, words, most) {
      let last = -Infinity;
      const ticks = xs.ticks(most), texts = labelled(ticks);
      for (const [i, tick] of ticks.entries()) {
        const x = xs.at(tick), text = texts[i];
        this.canvas.append(svg("line", { class: "grid", x1: x, x2: x, y1: 8, y2: bottom }));
        if (x - last < 7 * text.length + 8) continue;
        last = x;
        this.canvas.append(svg("text", { x, y: bottom + 16, "text-anchor": "middle" }, text));
      }
      this.canvas.append(svg("line", { class: "axis", x1: left, x2: this.width - 12, y1: bottom, y2: bottom }));
      this.canvas.append(svg("text", { x: (left + this.width - 12) / 2, y: bottom + 34, "text-anchor": "middle" }, words));
    }

    /* Draw the lines of marks; return where they are. */
    drawMarks(xs, ys, left, top, bottom) {
      const shown = this.marks.filter((m) => !this.log[m.axis] || m.value > 0).sort((a, b) => a.value - b.value);
      return shown.map(({ axis, value, label }) => {
        const at = axis === "y" ? { y: ys.at(value) } : { x: xs.at(value) };
        const ends = axis === "y" ? { x1: left, x2: this.width - 12, y1: at.y, y2: at.y } : { x1: at.x, x2: at.x, y1: top, y2: bottom };
        this.canvas.append(svg("line", { class: "mark", ...ends, "data-mark": label }));
        return { ...at, label };
      });
    }

    /* Write beside the lines of marks what they are, at the end where fewer points are; return the boxes of the texts. */
    labelMarks(marks, points, left, top) {
      const boxes = [];
      let above = Infinity, below = this.plot.kind === "bars" ? 12 : top + 10;
      const write = (x, y, wide, anchor, label) => {
        this.canvas.append(svg("text", { class: "claim halo", x, y, "text-anchor": anchor }, label));
        boxes.push(anchor === "end" ? [x - wide, y - 10, x, y + 2] : [x, y - 10, x + wide, y + 2]);
      };
      for (const { x, y, label } of marks) {
        const wide = 6.8 * label.length;
        if (x !== undefined) {
          const right = x + 4 + wide > this.width;
          write(x + (right ? -4 : 4), below, wide, right ? "end" : "start", label);
          below += 14;
          continue;
        }
        above = Math.max(Math.min(y - 4, above - 14), top + 4);
        const met = (from) => points.filter((p) => p.px > from - 5 && p.px < from + wide + 5 && p.py > above - 15 && p.py < above + 7).length;
        if (met(this.width - 14 - wide) > met(left + 4)) write(left + 4, above, wide, "start", label);
        else write(this.width - 14, above, wide, "end", label);
      }
      return boxes;
    }

    drawBars() {
      const { plot, width } = this, small = width < 480;
      const words = [...new Set(this.shown.flatMap((one) => one.points.map((p) => p.y)))];
      const thick = plot.stacked || this.shown.length < 2 ? 16 : Math.max(5, Math.min(12, 36 / this.shown.length));
      const room = Math.floor(Math.min(width * 0.42, 270) / 6.9), labels = new Map(words.map((word) => [word, wrapped(word, room)]));
      const lines = Math.max(...words.map((word) => labels.get(word).length), 1);
      const tall = Math.max(plot.stacked || this.shown.length < 2 ? 24 : thick * this.shown.length + 10, 13 * lines + 8);
      const left = 14 + 6.9 * Math.max(...words.flatMap((word) => labels.get(word).map((line) => line.length)), 3), top = this.marks.length ? 20 : 6;
      const bottom = top + tall * words.length + 4;
      this.height = bottom + 42;
      const lengths = new Map(words.map((word) => [word, 0]));
      for (const one of this.shown) for (const p of one.points) lengths.set(p.y, plot.stacked ? lengths.get(p.y) + p.x : Math.max(lengths.get(p.y), p.x));
      const marks = this.marks.filter((m) => m.axis === "x" && (!this.log.x || m.value > 0)).map((m) => m.value);
      const values = plot.stacked ? [...lengths.values()] : this.shown.flatMap((one) => one.points.map((p) => p.x));
      const low = this.log.x && plot.zero ? [Math.min(...values.filter((x) => x > 0)) / 3] : [];
      const spare = 12 + (plot.stacked ? 0 : 46);
      const xs = scale([...values, ...marks, ...low], this.log.x, left, width - spare, { zero: plot.zero && !this.log.x });
      const start = this.log.x || !plot.zero ? left : xs.at(0);
      this.xAxis(xs, bottom, left, plot.x, small ? 3 : 6);
      const marked = this.drawMarks(xs, null, left, top, bottom);
      const ends = new Map(words.map((word) => [word, 0]));
      words.forEach((word, i) => {
        const text = svg("text", { class: "strong", "text-anchor": "end" }), broken = labels.get(word);
        broken.forEach((line, k) => text.append(svg("tspan", { x: left - 8, y: top + tall * i + tall / 2 + 4 + 13 * (k - (broken.length - 1) / 2) }, line)));
        text.append(svg("title", {}, String(word)));
        this.canvas.append(text);
      });
      this.shown.forEach((one, s) => {
        for (const point of one.points) {
          const i = words.indexOf(point.y);
          const from = plot.stacked ? xs.at(ends.get(point.y)) : start;
          if (plot.stacked) ends.set(point.y, ends.get(point.y) + point.x);
          const to = plot.stacked ? xs.at(ends.get(point.y)) : xs.at(point.x);
          const bars = plot.stacked ? 1 : this.shown.length, y = top + tall * i + (tall - thick * bars) / 2 + (plot.stacked ? 0 : s * thick);
          const index = plot.series ? one.index : laconic.colours.get(String(point.y)) ?? null;
          point.px = to; point.py = y + thick / 2;
          if (plot.zero) {
            const bar = svg("rect", { x: Math.min(from, to), y, width: Math.max(Math.abs(to - from), 0.5), height: thick - (bars > 1 ? 1 : 0), "data-series": one.name });
            this.canvas.append(colour(bar, index, true));
          } else {
            this.canvas.append(svg("line", { class: "grid", x1: left, x2: to, y1: point.py, y2: point.py }));
            this.canvas.append(colour(svg("path", { d: SHAPES[0](to, point.py), "data-series": one.name }), index, true));
          }
          if (!plot.stacked && thick >= 9)
            this.canvas.append(svg("text", { class: "halo", x: Math.max(to, from) + (plot.zero ? 4 : 8), y: y + thick / 2 + 4 }, short(point.x)));
        }
      });
      this.labelMarks(marked, [], left, top);
    }

    /* ------------------------------------------------------------------------------------------- pointer, keys */

    listen() {
      const near = (event) => {
        const box = this.canvas.getBoundingClientRect();
        const [x, y] = [event.clientX - box.left, event.clientY - box.top];
        let best = null, least = Infinity;
        for (const one of this.shown)
          for (const p of one.points) {
            const d = (p.px - x) ** 2 + (p.py - y) ** 2 * (this.plot.kind === "bars" ? 30 : 1);
            if (d < least) { least = d; best = p; }
          }
        this.show(best, false);
      };
      this.canvas.addEventListener("pointermove", near);
      this.canvas.addEventListener("pointerdown", near);
      this.canvas.addEventListener("pointerleave", () => this.show(null));
      this.canvas.addEventListener("blur", () => this.show(null));
      this.canvas.addEventListener("keydown", (event) => {
        const next = this.moved(event.key);
        if (next === undefined) return;
        event.preventDefault();
        this.show(next, true);
      });
    }

    moved(key) {
      if (key === "Escape") return null;
      const series = this.shown, steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity] };
      if (!(key in steps) || !series.length) return undefined;
      if (!this.cursor) return this.ordered(series[0])[0];
      let [down, along] = steps[key];
      if (this.plot.kind === "bars") {
        const every = series.flatMap((one) => one.points).sort((a, b) => a.py - b.py || a.px - b.px);
        const place = every.indexOf(this.cursor) + down + along;
        return every[Math.max(0, Math.min(every.length - 1, place))];
      }
      const here = series.indexOf(this.cursor.series);
      if (along) {
        const points = this.ordered(this.cursor.series);
        return points[Math.max(0, Math.min(points.length - 1, points.indexOf(this.cursor) + along))];
      }
      const other = series[Math.max(0, Math.min(series.length - 1, here + down))];
      return other.points.reduce((best, p) => (Math.abs(p.px - this.cursor.px) < Math.abs(best.px - this.cursor.px) ? p : best));
    }

    ordered(one) { return [...one.points].sort((a, b) => a.px - b.px); }

    show(point, speak) {
      this.cursor = point;
      this.tip.hidden = !point;
      this.ring.setAttribute("visibility", point ? "visible" : "hidden");
      if (!point) return;
      this.ring.setAttribute("d", `M${point.px - 7},${point.py}a7,7 0 1,0 14,0a7,7 0 1,0 -14,0Z`);
      const { plot, table } = this;
      const head = plot.kind === "bars" ? String(point.y) : point.series.name;
      const told = [[plot.x, point.x]];
      if (plot.kind !== "bars") told.push([plot.y, point.y]);
      else if (plot.series) told.unshift([plot.series, point.series.name]);
      if (plot.group) told.push([plot.group, table.column(plot.group)[point.row]]);
      for (const column of plot.detail) told.push([column, table.column(column)[point.row]]);
      this.tip.replaceChildren(html("b", { textContent: head }), ...told.map(([name, value]) => html("span", { textContent: `${name}: ${precise(value)}` })));
      const wide = this.tip.offsetWidth, right = point.px + 14 + wide > this.width;
      this.tip.style.left = `${Math.max(0, right ? point.px - wide - 12 : point.px + 14)}px`;
      this.tip.style.top = `${Math.max(0, Math.min(point.py - 10, this.height - this.tip.offsetHeight))}px`;
      if (speak) this.spoken.textContent = `${head}; ${told.map(([name, value]) => `${name} ${precise(value)}`).join("; ")}`;
    }
  }

  Object.assign(laconic, { Chart });
})();
