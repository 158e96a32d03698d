"use strict";
// Everything drawn over steps or layers.

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
    this.start();
    keepDrawn("steps-plot", () => this.draw());
  }

  // Begins with the most, the middling and the least similar pair, which the sentences name.
  start() {
    for (const [one, other] of (this.runs.find((run) => run.telling.length) ?? { telling: [] }).telling) this.add(one, other);
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
      const { source, quantity, components } = view, size = source.tasks.length, window = smoothing(quantity.steps.length);
      this.pairs.forEach(([one, other], n) => {
        const [i, j] = [source.tasks.indexOf(one), source.tasks.indexOf(other)];
        if (i < 0 || j < 0) return;
        const raw = quantity.steps.map((_, s) => this.meanOf(quantity, components, s, pairIndex(quantity, i, j, size)));
        const between = quantity.symmetric ? ", " : " against ";
        const name = plain(`${one}${between}${other}` + (this.runs.length > 1 ? ` (${run.name})` : ""));
        const y = smooth(raw, window);
        if (window > 1) traces.push({ type: "scatter", mode: "lines", x: quantity.steps, y: raw, showlegend: false, hoverinfo: "skip", line: { color: `${ink(n)}40`, width: 1 } });
        traces.push({ type: "scatter", mode: quantity.steps.length > 40 ? "lines" : "lines+markers", x: quantity.steps, y, name,
          line: { color: ink(n), dash: DASHES[r % DASHES.length], width: 2 }, marker: { size: 5 }, hovertemplate: "%{y:.3f}" });
      });
    });
    $("steps-note").textContent = `${$("quantity").value}, ${$("component").value}: as chosen above.`;
    const stepless = this.runs.map(viewOf).some((view) => view && view.quantity.whole);
    if (stepless) sayInstead("steps-plot", `One value for the ${WHOLE}: there are no steps to follow. Choose something else to be shown above.`);
    else if (!traces.length) sayInstead("steps-plot", "Choose two different tasks above, or a cell of the heat map.");
    else {
      const between = this.runs.map(viewOf).some((view) => view && view.quantity.rows) ? ": the first task is altered, against the second" : "";
      $("steps-note").textContent += between;
      show("steps-plot", traces, lineLayout("steps-plot", "step", `cosine: ${$("quantity").value}`, {
        yaxis: titled(`cosine: ${$("quantity").value}`, { range: honest(traces.flatMap(({ y }) => y)), fixedrange: false }) }), { label: `${$("quantity").value} of pairs over steps: ${this.pairs.map((pair) => pair.join(" and ")).join("; ")}` });
    }
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
    name: plain(name + (runs.length > 1 ? `, ${run.name}` : "")),
    line: { color: ink(sides.indexOf(side)), dash: DASHES[r % DASHES.length], width: 2 },
    marker: { size: 8, symbol: direction.startsWith("xx-") ? "square-open" : "circle" },
  })));
  if (!traces.length) return sayInstead("layers-plot", "No component carries the number of a layer.");
  const numbers = traces.flatMap(({ x }) => x), first = Math.min(...numbers), last = Math.max(...numbers);
  const layout = lineLayout("layers-plot", "layer", "similarity");
  const room = Math.max(1, Math.floor(layout.width / 40)); // ticks that fit
  const ticks = { tick0: first, dtick: Math.floor((last - first) / room) + 1, range: [first - 0.4, last + 0.4], zeroline: false };
  const yaxis = titled("cosine, mean of pairs", { range: honest(traces.flatMap(({ y }) => y)) });
  return show("layers-plot", traces, { ...layout, xaxis: titled("layer", ticks), yaxis }, { label: "Mean similarity by layer" });
}

// How many neighbours a running mean takes: the slider, as a share of the steps.
function smoothing(numSteps) {
  return Math.max(1, Math.round((Number($("smooth").value) / 100) * numSteps));
}

function drawReliability(runs) {
  const sides = ["encoder", "decoder"], traces = [];
  runs.forEach((run, r) => run.reliability.forEach(({ name, steps, values }) => traces.push({
    type: "scatter", mode: "lines+markers", x: steps, y: values, hovertemplate: "%{y:.3f}", marker: { size: 6 },
    name: plain(name + (runs.length > 1 ? `, ${run.name}` : "")),
    line: { color: ink(Math.max(0, sides.indexOf(name))), dash: DASHES[r % DASHES.length], width: 2 },
  })));
  if (!traces.length) return sayInstead("reliability-plot", "Nothing was measured on halves of an aligned set: run gradvac similarity.");
  return show("reliability-plot", traces, lineLayout("reliability-plot", "step", "cosine of two halves", { yaxis: titled("cosine of two halves", { range: honest(traces.flatMap(({ y }) => y)) }) }),
    { label: "Agreement of tasks with themselves on other lines, by step" });
}

function drawRule(runs) {
  const recorded = runs.map((run, r) => [run, r]).filter(([run]) => run.rule);
  const line = (run, r, x, y, name, more) => ({ type: "scatter", mode: "lines", x, y, hovertemplate: "%{y:.4~g}",
    name: plain(name + (runs.length > 1 ? (name ? ` (${run.name})` : run.name) : "")), line: { color: ink(r), width: 2, ...more } });
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
    const values = traces.flatMap(({ y }) => y);
    const form = id === "active-plot" ? { tickformat: ".0%", range: honest(values) } : { range: id === "target-plot" ? honest(values) : aroundOne(values) };
    show(id, traces, lineLayout(id, "step", "", { yaxis: axis(form), showlegend: runs.length > 1 || id < "c" || id === "target-plot" }));
  }
}

// Cosines and ratios of updates are near 1: at least a tenth is shown, with 1 in it.
function aroundOne(values) {
  const known = values.filter((value) => value !== null);
  const [low, high] = [Math.min(1, ...known), Math.max(1, ...known)], room = Math.max(0.1 - (high - low), 0) / 2 + 0.01;
  return [low - room, high + room];
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
    const task = choice === TASK_LOSSES ? name.slice("dev/loss/".length) : name;
    traces.push({ type: "scatter", mode: steps.length > 40 ? "lines" : "lines+markers", x: steps, y: values,
      name: plain(task + (several ? ` (${run.name})` : "")), line: { color, dash, width: 2 }, marker: { size: 5 }, hovertemplate: "%{y:.4~g}" });
  }));
  if (!traces.length) return sayInstead("metrics-plot", "This run has no metrics.");
  return show("metrics-plot", traces, lineLayout("metrics-plot", "step", "", { yaxis: axis({ fixedrange: false }), showlegend: true }), { label: choice });
}
