"use strict";
// Everything drawn over steps or layers, the differences of the sides, and the trees.

const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon"];

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
    heatMaps.listeners.push(() => this.draw());
    this.start();
    keepDrawn("steps-plot", () => this.draw());
  }

  // Begins with the most, the middling and the least similar pair.
  start() {
    const view = this.runs.map(viewOf).find(Boolean);
    if (!view) return;
    const { source, quantity } = view;
    const means = meanPairs(quantity, range(source.components.length), range(quantity.steps.length));
    const found = [];
    range(source.tasks.length).forEach((i) => range(i).forEach((j) => {
      const value = means[pairIndex(quantity, i, j, source.tasks.length)];
      if (!Number.isNaN(value)) found.push([value, source.tasks[j], source.tasks[i]]);
    }));
    found.sort((a, b) => b[0] - a[0]);
    const places = unique([0, Math.floor(found.length / 2), found.length - 1]).filter((n) => n >= 0);
    for (const n of places) if (found[n]) this.add(found[n][1], found[n][2]);
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
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: `${one}, ${other}` });
      button.setAttribute("aria-label", `Stop following ${one} and ${other}`);
      button.style.borderColor = ink(n);
      button.addEventListener("click", () => {
        this.pairs.splice(n, 1);
        this.draw();
        ($("followed").querySelector("button") || $("one")).focus();
      });
      const item = document.createElement("li");
      item.append(button);
      return item;
    }));
  }

  draw() {
    this.chips();
    const traces = [];
    this.runs.forEach((run, r) => {
      const view = viewOf(run);
      if (!view || view.quantity.whole) return;
      const { source, quantity, components } = view, size = source.tasks.length;
      this.pairs.forEach(([one, other], n) => {
        const [i, j] = [source.tasks.indexOf(one), source.tasks.indexOf(other)];
        if (i < 0 || j < 0) return;
        const y = quantity.steps.map((_, s) => this.meanOf(quantity, components, s, pairIndex(quantity, i, j, size)));
        const name = `${one}, ${other}` + (this.runs.length > 1 ? ` (${run.name})` : "");
        traces.push({ type: "scatter", mode: quantity.steps.length > 40 ? "lines" : "lines+markers", x: quantity.steps, y, name,
          line: { color: ink(n), dash: DASHES[r % DASHES.length], width: 2 }, marker: { size: 5 }, hovertemplate: "%{y:.3f}" });
      });
    });
    $("steps-note").textContent = `${$("quantity").value}, ${$("component").value}: as chosen above.`;
    const stepless = this.runs.map(viewOf).some((view) => view && view.quantity.whole);
    if (stepless) sayInstead("steps-plot", `One value for the ${WHOLE}: there are no steps to follow. Choose something else to be shown above.`);
    else if (!traces.length) sayInstead("steps-plot", "Choose two different tasks above, or a cell of the heat map.");
    else show("steps-plot", traces, lineLayout("steps-plot", "step", $("quantity").value));
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

function drawLayers(runs) {
  const sides = ["encoder", "decoder", "shared"], traces = [];
  runs.forEach((run, r) => run.layers.forEach(({ name, side, direction, layers, means }) => traces.push({
    type: "scatter", mode: "lines+markers", x: layers, y: means, hovertemplate: "%{y:.3f}",
    name: name + (runs.length > 1 ? `, ${run.name}` : ""),
    line: { color: ink(sides.indexOf(side)), dash: DASHES[r % DASHES.length], width: 2 },
    marker: { size: 8, symbol: direction === "xx-en" ? "square-open" : "circle" },
  })));
  if (!traces.length) return sayInstead("layers-plot", "No component carries the number of a layer.");
  const numbers = traces.flatMap(({ x }) => x), first = Math.min(...numbers), last = Math.max(...numbers);
  const layout = lineLayout("layers-plot", "layer", "similarity");
  const room = Math.max(1, Math.floor(layout.width / 40)); // ticks that fit
  const ticks = { tick0: first, dtick: Math.floor((last - first) / room) + 1, range: [first - 0.4, last + 0.4], zeroline: false };
  return show("layers-plot", traces, { ...layout, xaxis: titled("layer", ticks) });
}

// Largest difference of any run: colours mean the same in all maps.
function sidesLimit(runs) {
  const apart = ({ values }) => values.flatMap((row, i) => row.filter((value, j) => i !== j && value !== null));
  return Math.max(0, ...runs.filter((run) => run.difference).flatMap((run) => apart(run.difference)).map(Math.abs)) || 1;
}

function drawSides(run, n, limit) {
  if (!run.difference) return sayInstead(`sides-${n}`, "This needs components of an encoder and of a decoder.");
  const { values, labels, tasks, blocks } = run.difference;
  const others = values.map((row, i) => row.map((value, j) => (i === j ? null : value)));
  return drawMatrix(`sides-${n}`, { values: others, labels, tasks, blocks, bounds: [-limit, limit], what: "encoder minus decoder" });
}

// Family -> its mark in all trees; colours and symbols meet anew in every round.
function familyDots(runs) {
  const names = unique(runs.flatMap((run) => (run.tree ? run.tree.families : [])).filter(Boolean));
  return new Map(names.map((family, f) => {
    const round = Math.floor(f / SYMBOLS.length);
    return [family, { ink: f + round, symbol: SYMBOLS[f % SYMBOLS.length] + (round % 2 ? "-open" : "") }];
  }));
}

function drawTree(run, n, marks) {
  if (!run.tree) return sayInstead(`tree-${n}`, "A tree needs three tasks.");
  const { places, heights, labels, families } = run.tree, x = [], y = [];
  const joins = heights.flat().filter((height) => height > 0).map((height) => 1 - height);
  const [low, high] = [Math.min(...joins), Math.max(...joins)], room = (high - low) * 0.2 || 0.05;
  const leaf = high + room; // a task alone would be at 1, far from where anything happens
  places.forEach((own, p) => {
    x.push(...heights[p].map((height) => (height > 0 ? 1 - height : leaf)), null);
    y.push(...own, null);
  });
  const dots = [...marks].filter(([family]) => families.includes(family)).map(([family, mark]) => {
    const own = range(labels.length).filter((i) => families[i] === family), color = ink(mark.ink);
    return { type: "scatter", mode: "markers", x: own.map(() => leaf), y: own, name: family, cliponaxis: false,
      marker: { color, symbol: mark.symbol, size: 9, line: { width: 2, color } }, hoverinfo: "skip" };
  });
  const lines = { type: "scatter", mode: "lines", x, y, line: { color: paper().quiet, width: 1.6 }, hoverinfo: "skip", showlegend: false };
  return show(`tree-${n}`, [lines, ...dots], lineLayout(`tree-${n}`, "cosine", "", {
    height: 20 * labels.length + 60, hovermode: false, showlegend: dots.length > 0,
    xaxis: titled("cosine", { range: [leaf, low - room / 2], zeroline: false }),
    yaxis: axis({ tickmode: "array", tickvals: range(labels.length), ticktext: labels, range: [labels.length - 0.5, -0.5],
      showgrid: false, zeroline: false, layer: "below traces", tickfont: { size: 12, color: paper().ink }, ticks: "outside", ticklen: 10, tickcolor: "rgba(0,0,0,0)" }),
  }));
}

function drawRule(runs) {
  const recorded = runs.map((run, r) => [run, r]).filter(([run]) => run.rule);
  const line = (run, r, x, y, name, more) => ({ type: "scatter", mode: "lines", x, y, hovertemplate: "%{y:.4~g}",
    name: name + (runs.length > 1 ? (name ? ` (${run.name})` : run.name) : ""), line: { color: ink(r), width: 2, ...more } });
  const plots = { "active-plot": [], "target-plot": [], "cosine-plot": [], "ratio-plot": [] };
  for (const [run, r] of recorded) {
    const { steps, active, conflicts, pairs, similarity, target, cosine, ratio } = run.rule;
    const share = (counts) => counts.map((count, s) => (pairs[s] ? count / pairs[s] : null));
    if (active.some((count) => count > 0)) plots["active-plot"].push(line(run, r, steps, share(active), "altered"));
    plots["active-plot"].push(line(run, r, steps, share(conflicts), "in conflict", { dash: "dot" }));
    plots["target-plot"].push(line(run, r, steps, similarity, "similarity"));
    if (target.some((value) => value !== null)) plots["target-plot"].push(line(run, r, steps, target, "target", { dash: "dot" }));
    for (const [id, band] of [["cosine-plot", cosine], ["ratio-plot", ratio]]) {
      const edge = { type: "scatter", mode: "lines", x: steps, line: { width: 0 }, hoverinfo: "skip", showlegend: false };
      plots[id].push({ ...edge, y: band.least }, { ...edge, y: band.most, fill: "tonexty", fillcolor: `${ink(r)}26` });
      plots[id].push(line(run, r, steps, band.mean, runs.length > 1 ? "" : "mean"));
    }
  }
  for (const [id, traces] of Object.entries(plots)) {
    if (!traces.length) { sayInstead(id, "Nothing was recorded in training."); continue; }
    const form = id === "active-plot" ? { tickformat: ".0%", rangemode: "tozero" } : {};
    show(id, traces, lineLayout(id, "step", "", { yaxis: axis(form), showlegend: runs.length > 1 || id < "c" || id === "target-plot" }));
  }
}

const BOTH_LOSSES = "loss, training and validation", TASK_LOSSES = "validation loss of each task";

function metricChoices(runs) {
  const names = unique(runs.flatMap((run) => Object.keys(run.metrics))).sort();
  const choices = [];
  if (names.includes("train/loss") || names.includes("dev/loss")) choices.push(BOTH_LOSSES);
  if (names.some((name) => name.startsWith("dev/loss/"))) choices.push(TASK_LOSSES);
  return [...choices, ...names];
}

function drawMetric(runs) {
  const choice = $("metric").value, traces = [];
  const wanted = (name) => (choice === BOTH_LOSSES ? ["train/loss", "dev/loss"].includes(name)
    : choice === TASK_LOSSES ? name.startsWith("dev/loss/") : name === choice);
  const names = unique(runs.flatMap((run) => Object.keys(run.metrics))).filter(wanted);
  runs.forEach((run, r) => names.filter((name) => name in run.metrics).forEach((name) => {
    const { steps, values } = run.metrics[name], several = runs.length > 1;
    // Few names: a colour for each run. Many names: a colour for each name.
    const [color, dash] = choice === TASK_LOSSES ? [ink(names.indexOf(name)), DASHES[r % 5]] : [ink(r), DASHES[names.length > 1 && name === "dev/loss" ? 1 : 0]];
    const short = choice === TASK_LOSSES ? name.slice("dev/loss/".length) : name;
    traces.push({ type: "scatter", mode: steps.length > 40 ? "lines" : "lines+markers", x: steps, y: values,
      name: short + (several ? ` (${run.name})` : ""), line: { color, dash, width: 2 }, marker: { size: 5 }, hovertemplate: "%{y:.4~g}" });
  }));
  if (!traces.length) return sayInstead("metrics-plot", "This run has no metrics.");
  return show("metrics-plot", traces, lineLayout("metrics-plot", "step", "", { yaxis: axis({}), showlegend: true }));
}
