"use strict";
// Puts the page together: theme, folds, data, drawings, printing, live.

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Use the ${name === "dark" ? "light" : "dark"} theme`);
  $("theme").setAttribute("aria-pressed", String(name === "dark"));
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
}

const folds = () => [...document.querySelectorAll("details.question")];

// What is folded is drawn when it opens: a drawing needs to know its width.
function watchFolds() {
  folds().forEach((fold) => fold.addEventListener("toggle", () => { if (fold.open) drawAll(fold); }));
  $("open-all").addEventListener("click", () => {
    const open = !folds().every((fold) => fold.open);
    folds().forEach((fold) => { fold.open = open; });
    $("open-all").textContent = open ? "Fold all" : "Open all";
  });
  const follow = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target?.matches("details.question")) { target.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", follow);
  addEventListener("click", (event) => { if (event.target.closest?.("a")) setTimeout(follow); }); // also where one has been before
  follow();
}

function watchPrinting() {
  let onScreen = null, open = [];
  const print = (on) => { document.documentElement.classList.toggle("printing", on); setTheme(on ? "light" : onScreen); drawAll(); };
  addEventListener("beforeprint", () => {
    onScreen = theme();
    open = folds().filter((fold) => fold.open);
    folds().forEach((fold) => { fold.open = true; });
    print(true);
  });
  addEventListener("afterprint", () => { folds().forEach((fold) => { fold.open = open.includes(fold); }); print(false); });
}

function watchWidth() {
  let width = document.documentElement.clientWidth, waiting = 0;
  addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => drawAll(), 120);
  });
}

// Controls and folds as they were before the page was loaded anew.
function keepState() {
  const key = "gradvac-report", controls = () => [...document.querySelectorAll("select[id], input[id]")];
  addEventListener("beforeunload", () => {
    const state = controls().map((one) => [one.id, one.type === "checkbox" ? one.checked : one.value]);
    sessionStorage.setItem(key, JSON.stringify({ state, open: folds().map((fold) => fold.open), top: scrollY, theme: theme() }));
  });
  const before = JSON.parse(sessionStorage.getItem(key) ?? "null");
  if (!before) return;
  if (before.theme !== theme()) $("theme").click();
  for (const [id, value] of before.state) {
    if (!$(id) || $(id).value === value || $(id).checked === value) continue;
    if ($(id).type === "checkbox") $(id).checked = value; else $(id).value = value;
    $(id).dispatchEvent(new Event($(id).tagName === "SELECT" || $(id).type === "checkbox" ? "change" : "input"));
  }
  folds().forEach((fold, n) => { fold.open = before.open[n] ?? fold.open; });
  requestAnimationFrame(() => scrollTo(0, before.top));
}

// A live page asks its server now and then whether there is something new.
function watchServer({ version, seconds }) {
  keepState();
  const ask = async () => {
    try {
      const answer = await fetch("version", { cache: "no-store" });
      const now = await answer.text();
      $("live").textContent = `live, as of ${new Date().toLocaleTimeString()}`;
      if (answer.ok && now !== version) location.reload();
    } catch { $("live").textContent = "no longer live: the server has stopped"; }
  };
  setInterval(ask, 1000 * seconds);
}

// The drawing library travels compressed: a third of its size.
async function loadPlotly() {
  const bytes = Uint8Array.from(atob($("plotly").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(make("script", { textContent: await new Response(stream).text() }));
}

async function start() {
  const { runs } = DATA;
  await loadPlotly();
  watchTheme();
  watchFolds();
  await Promise.all(runs.flatMap((run) => run.sources.flatMap((source) => source.quantities.map(unpack))));
  if (runs.some((run) => run.sources.length)) {
    let trajectories = null;
    const heatMaps = new HeatMaps(runs, (one, other) => trajectories.follow(one, other));
    trajectories = new Trajectories(runs, heatMaps);
    runs.forEach((_, n) => keepDrawn(`sides-${n}`, () => drawSides(n)));
    runs.forEach((_, n) => keepDrawn(`tree-${n}`, () => drawTree(n)));
    DATA.differences.forEach((view, n) => keepDrawn(`difference-${n + 1}`, () => drawMatrix(`difference-${n + 1}`, view)));
  }
  for (const id of Object.keys(DATA.plots)) if ($(id)) keepDrawn(id, () => drawPlot(id, DATA.plots[id]));
  fill($("influence-component"), [["", [WHOLE_MODEL]], ["components", unique(DATA.influence.flatMap(Object.keys)).filter((name) => name !== WHOLE_MODEL)]]);
  $("influence-component").addEventListener("change", drawInfluence);
  keepDrawn("influence-0", drawInfluence);
  fill($("metric"), [["", Object.keys(DATA.metrics)]]);
  $("metric").addEventListener("change", drawMetric);
  keepDrawn("metrics-plot", drawMetric);
  watchPrinting();
  watchWidth();
  if (DATA.live) watchServer(DATA.live);
  document.documentElement.dataset.ready = "yes";
}

start().catch((mistake) => {
  $("trouble").hidden = false;
  $("trouble").textContent = `The drawings could not be made: ${mistake.message}`;
  console.error(mistake);
});
