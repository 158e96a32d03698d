"use strict";
// Puts the page together: theme, data, drawings, printing.

const DATA = JSON.parse($("data").textContent);

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Use the ${name === "dark" ? "light" : "dark"} theme`);
  $("theme").setAttribute("aria-pressed", String(name === "dark"));
}

function drawAll() {
  drawings.forEach((draw) => draw());
}

function watchTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = false;
  setTheme(system.matches ? "dark" : "light");
  system.addEventListener("change", () => {
    if (!chosen) { setTheme(system.matches ? "dark" : "light"); drawAll(); }
  });
  $("theme").addEventListener("click", () => {
    chosen = true;
    setTheme(theme() === "dark" ? "light" : "dark");
    drawAll();
  });
  let onScreen = null;
  const print = (on) => { document.documentElement.classList.toggle("printing", on); setTheme(on ? "light" : onScreen); drawAll(); };
  addEventListener("beforeprint", () => { onScreen = theme(); print(true); });
  addEventListener("afterprint", () => print(false));
}

function watchWidth() {
  let width = document.documentElement.clientWidth, waiting = 0;
  addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 120);
  });
}

async function start() {
  const { runs } = DATA;
  watchTheme();
  await Promise.all(runs.flatMap((run) => run.sources.flatMap((source) => source.quantities.map(unpack))));
  if (runs.some((run) => run.sources.length)) {
    let trajectories = null;
    const heatMaps = new HeatMaps(runs, (one, other) => trajectories.follow(one, other));
    trajectories = new Trajectories(runs, heatMaps);
    keepDrawn("layers-plot", () => drawLayers(runs));
    const limit = sidesLimit(runs), marks = familyDots(runs);
    runs.forEach((run, n) => keepDrawn(`sides-${n}`, () => drawSides(run, n, limit)));
    runs.forEach((run, n) => keepDrawn(`tree-${n}`, () => drawTree(run, n, marks)));
  }
  keepDrawn("active-plot", () => drawRule(runs));
  fill($("metric"), [["", metricChoices(runs)]]);
  $("metric").addEventListener("change", () => drawMetric(runs));
  keepDrawn("metrics-plot", () => drawMetric(runs));
  watchWidth();
  document.documentElement.dataset.ready = "yes";
}

start().catch((mistake) => {
  $("trouble").hidden = false;
  $("trouble").textContent = `The drawings could not be made: ${mistake.message}`;
  console.error(mistake);
});
