"use strict";
// Lines and points (`Plot` in plots.py), pairs over steps, trees, and maps that Python has decided on.

const WHOLE_MODEL = "whole model";

function tracesOf(series, { number_format, point_words }) {
  const { x, y, mode, marker: symbol, size, alpha, band, points } = series, color = ink(series.colour);
  const edge = { type: "scatter", mode: "lines", x, line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  if (series.is_faint) return [{ ...edge, y, line: { color: `${color}40`, width: 1 } }];
  const trace = { type: "scatter", mode, x, y, name: plain(series.name), hovertemplate: `%{y:${number_format}}`,
    line: { color, dash: DASHES[series.dash % DASHES.length], width: 2 }, marker: { size, symbol } };
  if (points?.length) {
    Object.assign(trace, { customdata: points.map(plain), cliponaxis: mode === "markers",
      marker: { color, symbol, size, opacity: alpha, line: { width: alpha < 1 ? size / 6 : 0, color } },
      hovertemplate: `%{customdata}<br>${point_words[1]} %{x:.2f}, ${point_words[2]} <b>%{y:.2f}</b><extra></extra>` });
    if (mode.includes("text")) Object.assign(trace, { text: points.map((name) => short(name, 12)), textposition: "top center", textfont: { size: 10, color: paper().quiet } });
  }
  const [low, high] = band ?? [];
  return band ? [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: `${color}26` }, trace] : [trace];
}

function drawPlot(id, plot) {
  if (!plot.series.length) return showMessage(id, plot.missing);
  const words = plot.point_words ?? [], named = words.length > 0, layout = lineLayout(id, plot.x_title, "");
  const points = plot.series.flatMap((series) => series.points ?? []).length;
  const bare = 45 * points > layout.width ? { "markers+text": "markers" } : {}; // names would lie on each other
  const traces = plot.series.flatMap((series) => tracesOf({ ...series, mode: bare[series.mode] ?? series.mode }, plot));
  const yaxis = { fixedrange: !named && !plot.zooms, ...(plot.y_range && { range: plot.y_range }), ...(plot.as_percent && { tickformat: ".0%" }) };
  layout.yaxis = plot.y_title ? titled(plain(plot.y_title), yaxis) : axis(yaxis);
  layout.xaxis = titled(plain(plot.x_title), { fixedrange: false, zeroline: named && !plot.y_range });
  if (named) Object.assign(layout, { hovermode: "closest", height: 340, legend: { ...layout.legend, itemsizing: "constant" } });
  if (plot.layers) {
    const [first, last] = plot.layers, room = Math.max(1, Math.floor(layout.width / 40)); // ticks that fit
    layout.xaxis = titled(plot.x_title, { tick0: first, dtick: Math.floor((last - first) / room) + 1, range: [first - 0.4, last + 0.4], zeroline: false });
  }
  if (typeof plot.has_legend === "boolean") layout.showlegend = plot.has_legend;
  const rows = () => plot.series.flatMap(({ points, x, y, name }) => points.map((point, n) => [point, [x[n], y[n], name]]));
  const columns = [words[1] === "distance" ? plot.x_title : words[1], words[2] === "score" ? plot.y_title : words[2], words[3]];
  return show(id, traces, layout, { label: plot.label || undefined, table: named ? () => [words[0], columns, rows()] : null });
}

function drawMetric() {
  const choice = $("metric").value;
  return drawPlot("metrics-plot", { ...(DATA.metrics[choice] ?? { series: [], missing: "This run has no metrics." }), zooms: true });
}

function drawSides(n) {
  const view = DATA.sides[n];
  return view ? drawMatrix(`sides-${n}`, view) : showMessage(`sides-${n}`, "This needs components of an encoder and of a decoder.");
}

// Row: whose loss; column: who influences it. Green would praise: blue lets a loss fall, orange lets it rise.
function drawInfluence() {
  const choice = $("influence-component").value;
  DATA.influence.forEach((maps, n) => {
    const id = `influence-${n}`, view = maps[choice];
    if (!view) return showMessage(id, "This needs a record of training, or similarities measured on halves.");
    if (view.values.flat().every((value) => value === null)) return showMessage(id, "No task is predicted to make progress.");
    return drawMatrix(id, view);
  });
}

function drawTree(n) {
  const id = `tree-${n}`, tree = DATA.trees[n];
  if (!tree) return showMessage(id, "A tree needs three tasks.");
  const { leaf, labels, families } = tree, gaps = (corners) => corners.flatMap((own) => [...own, null]);
  const dots = Object.entries(DATA.familyMarks).filter(([family]) => families.includes(family)).map(([family, [number, symbol]]) => {
    const places = range(labels.length).filter((i) => families[i] === family), color = ink(number);
    return { type: "scatter", mode: "markers", x: places.map(() => leaf), y: places, name: plain(family), cliponaxis: false,
      marker: { color, symbol, size: 9, line: { width: 2, color } }, hoverinfo: "skip" };
  });
  const lines = { type: "scatter", mode: "lines", x: gaps(tree.cosines), y: gaps(tree.positions), line: { color: paper().quiet, width: 1.6 }, hoverinfo: "skip", showlegend: false };
  return show(id, [lines, ...dots], lineLayout(id, "cosine", "", {
    height: 20 * labels.length + 60, hovermode: false, showlegend: dots.length > 0,
    xaxis: titled("cosine", { range: tree.limits, zeroline: false }),
    yaxis: axis({ tickmode: "array", tickvals: range(labels.length), ticktext: labels.map((label) => short(label, 18)), range: [labels.length - 0.5, -0.5],
      showgrid: false, zeroline: false, layer: "below traces", tickfont: { size: 12, color: paper().ink }, ticks: "outside", ticklen: 10, tickcolor: "rgba(0,0,0,0)" }),
  }), { label: `Tree of ${labels.length} tasks: ${labels.join(", ")}` });
}

// How many neighbours a running mean takes: the slider, as a share of the steps.
function smoothing(numSteps) {
  return Math.max(1, Math.round((Number($("smooth").value) / 100) * numSteps));
}

// Pairs of tasks over steps, for what the controls of the maps choose.
class Trajectories {
  constructor(runs, heatMaps) {
    this.runs = runs;
    this.heatMaps = heatMaps;
    this.pairs = [];
    const tasks = unique(runs.flatMap((run) => run.sources.flatMap((source) => source.tasks)));
    fill($("one"), [["", tasks]]);
    fill($("other"), [["", tasks]], tasks[1]);
    $("pairs").addEventListener("submit", (event) => {
      event.preventDefault();
      this.follow($("one").value, $("other").value);
    });
    $("smooth").addEventListener("input", () => this.draw());
    heatMaps.listeners.push(() => { if (isShown($("steps-plot"))) this.draw(); });
    // Begins with the most, the middling and the least similar pair, which the sentences name.
    for (const [one, other] of runs.find((run) => run.examples.length)?.examples ?? []) this.add(one, other);
    keepDrawn("steps-plot", () => this.draw());
  }

  add(one, other) {
    const known = this.pairs.some(([a, b]) => (a === one && b === other) || (a === other && b === one));
    if (one !== other && !known) this.pairs.push([one, other]);
  }

  follow(one, other) {
    this.add(one, other);
    this.draw();
  }

  chips() {
    $("followed").replaceChildren(...this.pairs.map(([one, other], n) => {
      const button = make("button", { type: "button" }, `${one}, ${other}`);
      button.setAttribute("aria-label", `Stop following ${one} and ${other}`);
      button.style.borderColor = ink(n);
      button.addEventListener("click", () => {
        this.pairs.splice(n, 1);
        this.draw();
        ($("followed").querySelector("button") || $("one")).focus();
      });
      return make("li", {}, button);
    }));
  }

  draw() {
    this.chips();
    const series = [], shown = $("quantity").value, seen = this.runs.map(viewOf).filter(Boolean);
    this.runs.forEach((run, dash) => {
      const view = viewOf(run);
      if (!view || view.quantity.overall) return;
      const { source, quantity, components } = view, size = source.tasks.length, x = quantity.steps, window = smoothing(x.length);
      this.pairs.forEach(([one, other], colour) => {
        const [i, j] = [source.tasks.indexOf(one), source.tasks.indexOf(other)];
        if (i < 0 || j < 0) return;
        const raw = x.map((_, s) => this.meanOf(quantity, components, s, pairIndex(quantity, i, j, size)));
        const name = `${one}${quantity.symmetric ? ", " : " against "}${other}` + (this.runs.length > 1 ? ` (${run.name})` : "");
        if (window > 1) series.push({ x, y: raw, colour, is_faint: true });
        series.push({ x, y: smooth(raw, window), name, colour, dash, mode: x.length > 40 ? "lines" : "lines+markers", size: 5 });
      });
    });
    const directed = series.length && seen.some(({ quantity }) => quantity.rows);
    $("steps-note").textContent = `${shown}, ${$("component").value}, as chosen for the map${directed ? "; the first task is altered, against the second" : ""}`;
    if (seen.some(({ quantity }) => quantity.overall)) return showMessage("steps-plot", `One value for the ${WHOLE}: there are no steps to follow. Choose something else to be shown in the map.`);
    return drawPlot("steps-plot", { series, x_title: "step", y_title: `cosine: ${shown}`, y_range: honest(series.flatMap(({ y }) => y)), number_format: ".3f", zooms: true,
      missing: "Choose two different tasks above, or a cell of the map.",
      label: `${shown} of pairs over steps: ${this.pairs.map((pair) => pair.join(" and ")).join("; ")}` });
  }

  meanOf(quantity, components, step, pair) {
    const [, numComponents, numPairs] = quantity.shape;
    let sum = 0, count = 0;
    for (const k of components) {
      const value = quantity.values[(step * numComponents + k) * numPairs + pair];
      if (value !== MISSING) { sum += value; count++; }
    }
    return count ? (sum / count) * UNIT : null;
  }
}
