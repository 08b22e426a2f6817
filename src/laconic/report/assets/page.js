"use strict";
/* Puts the page together: theme, charts, downloads, and the what-if part where there is one. */

(() => {
  const { plots, tables, colours, whatIf } = JSON.parse(document.getElementById("data").textContent);
  const found = new Map(Object.entries(tables).map(([name, one]) => [name, new laconic.Table(one)]));
  laconic.tables = found;
  laconic.colours = new Map(Object.entries(colours));

  const theme = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const say = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  try { const kept = localStorage.getItem("laconic-theme"); if (kept) root.dataset.theme = kept; } catch { /* not kept */ }
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("laconic-theme", root.dataset.theme); } catch { /* not kept */ }
    say();
  });
  say();

  for (const plot of plots) {
    const figure = [...document.querySelectorAll("figure[data-plot]")].find((one) => one.dataset.plot === plot.id);
    new laconic.Chart(figure, plot, found.get(plot.data));
  }
  for (const button of document.querySelectorAll("button[data-csv]")) {
    button.setAttribute("aria-label", `${button.dataset.name}: download rows as CSV`);
    button.addEventListener("click", () => laconic.download(`${button.dataset.name}.csv`, found.get(button.dataset.csv).csv()));
  }
  if (whatIf) laconic.whatIf(whatIf);

  /* A table that is wider than the screen says so, until it has been scrolled. */
  for (const box of document.querySelectorAll("div.wide")) {
    const hint = laconic.html("p", { className: "hint", textContent: "Scroll sideways for more columns →", hidden: true });
    box.before(hint);
    const check = () => { hint.hidden = box.scrollWidth <= box.clientWidth + 1 || box.scrollLeft > 8; };
    box.addEventListener("scroll", check, { passive: true });
    new ResizeObserver(check).observe(box);
    check();
  }
  laconic.ready = true;
})();
