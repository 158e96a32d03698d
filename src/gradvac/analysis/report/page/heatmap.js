"use strict";
// The heat maps of similarity, one for each run, under one set of controls.

const $ = (id) => document.getElementById(id);

function unique(values) {
  return [...new Set(values)];
}

function fill(select, groups, keep) {
  const before = keep === undefined ? select.value : keep;
  select.replaceChildren();
  for (const [name, options] of groups) {
    const parent = name ? select.appendChild(Object.assign(document.createElement("optgroup"), { label: name })) : select;
    for (const value of options) parent.append(new Option(value, value));
  }
  const values = [...select.options].map((option) => option.value);
  if (values.includes(before)) select.value = before;
}

// What the controls say, for one run: null where the run has nothing of the kind.
function viewOf(run) {
  const source = run.sources.find((candidate) => candidate.name === $("source").value);
  const quantity = source && source.quantities.find((candidate) => candidate.key === $("quantity").value);
  if (!quantity) return null;
  const components = chosenComponents(source, $("component").value);
  return components.length ? { source, quantity, components } : null;
}

// Lowest and highest value; while one moves through the steps, those of all steps.
function boundsOf({ quantity, components }) {
  if ($("colours").value === "all") return [-quantity.limit, quantity.limit];
  const all = range(quantity.steps.length);
  const size = Math.round(Math.sqrt(quantity.shape[2])), onDiagonal = (p) => !quantity.symmetric && p % (size + 1) === 0;
  const bounds = (steps) => meanPairs(quantity, components, steps).reduce(
    ([low, high], value, p) => (onDiagonal(p) || Number.isNaN(value) ? [low, high] : [Math.min(low, value), Math.max(high, value)]),
    [Infinity, -Infinity]);
  if ($("mean").checked) return bounds(all);
  const key = components.join();
  quantity.bounds ??= new Map();
  if (!quantity.bounds.has(key)) quantity.bounds.set(key, hull(all.map((step) => bounds([step]))));
  return quantity.bounds.get(key);
}

function hull(bounds) {
  return [Math.min(...bounds.map(([low]) => low)), Math.max(...bounds.map(([, high]) => high))];
}

const WHOLE = "whole training"; // what a quantity with one value for all steps is of

class HeatMaps {
  constructor(runs, follow) {
    this.runs = runs;
    this.follow = follow;
    this.listeners = [];
    const sources = runs.flatMap((run) => run.sources);
    fill($("source"), [["", unique(sources.map((source) => source.name))]]);
    for (const id of ["source", "quantity", "component", "order", "colours"]) {
      $(id).addEventListener("change", () => this.refresh());
    }
    $("mean").addEventListener("change", () => this.refresh());
    $("step").addEventListener("input", () => { $("mean").checked = false; this.refresh(); });
    $("view").addEventListener("submit", (event) => event.preventDefault());
    this.refresh();
    runs.forEach((run, n) => drawings.set(`heat-${n}`, () => this.draw(n)));
  }

  refresh() {
    const sources = this.runs.flatMap((run) => run.sources).filter((source) => source.name === $("source").value);
    fill($("quantity"), [["", unique(sources.flatMap((source) => source.quantities.map((q) => q.key)))]]);
    const averages = unique(sources.flatMap((source) => Object.keys(source.averages)));
    const single = unique(sources.flatMap((source) => source.components));
    fill($("component"), [["averages", averages], ["components", single]]);
    const quantities = this.runs.map(viewOf).filter(Boolean).map((view) => view.quantity);
    const steps = unique(quantities.flatMap((quantity) => quantity.steps)).sort((a, b) => a - b);
    const moved = this.steps && this.steps.length !== steps.length;
    this.steps = steps;
    $("step").max = Math.max(0, steps.length - 1);
    if (moved || this.first === undefined) $("step").value = $("step").max;
    this.first = false;
    $("step").disabled = steps.length < 2;
    const many = `${steps.length.toLocaleString("en")} ${steps.length === 1 ? "step" : "steps"}`;
    const shown = quantities.some((quantity) => quantity.whole) ? WHOLE
      : $("mean").checked ? many : `step ${this.step().toLocaleString("en")}`;
    $("step-shown").textContent = shown;
    $("step").setAttribute("aria-valuetext", shown);
    this.runs.forEach((run, n) => this.draw(n));
    this.listeners.forEach((listen) => listen());
  }

  step() {
    return this.steps[Number($("step").value)] ?? 0;
  }

  draw(n) {
    const view = viewOf(this.runs[n]);
    $(`heat-note-${n}`).textContent = "";
    $(`extremes-${n}`).textContent = "";
    if (!view) {
      sayInstead(`heat-${n}`, "This run has nothing of the kind; choose another source or component.");
      return;
    }
    const { source, quantity, components } = view, size = source.tasks.length;
    const position = nearest(quantity.steps, this.step());
    const steps = $("mean").checked ? range(quantity.steps.length) : [position];
    const pairs = meanPairs(quantity, components, steps);
    const byFamily = $("order").value === "family";
    const order = byFamily ? source.order : range(size);
    const at = (i, j) => {
      const value = i === j ? NaN : pairs[pairIndex(quantity, i, j, size)];
      return Number.isNaN(value) ? null : value;
    };
    const values = order.map((i) => order.map((j) => at(i, j)));
    const sizes = values.flat().filter((value) => value !== null).map(Math.abs);
    if (!sizes.length) {
      sayInstead(`heat-${n}`, "Nothing is known here: no two tasks were seen together.");
      return;
    }
    const shown = $("colours").value === "own" ? [view] : this.runs.map(viewOf).filter(Boolean);
    const bounds = hull(shown.map(boundsOf));
    const when = quantity.whole ? WHOLE : $("mean").checked ? "mean of all steps" : `step ${quantity.steps[position].toLocaleString("en")}`;
    const stretch = isNarrow(bounds) ? `; colours from ${bounds.map((bound) => bound.toFixed(2)).join(" to ")}` : "";
    $(`heat-note-${n}`).textContent = `${quantity.key}, ${$("component").value}, ${when}${stretch}`;
    drawMatrix(`heat-${n}`, {
      values, bounds, labels: order.map((i) => source.labels[i]), tasks: order.map((i) => source.tasks[i]),
      blocks: byFamily ? source.blocks : [], what: quantity.key,
    });
    this.listen(n, order, source);
    this.sayExtremes(n, at, source, quantity.symmetric);
  }

  listen(n, order, source) {
    const element = $(`heat-${n}`);
    element.removeAllListeners("plotly_click");
    element.on("plotly_click", (event) => {
      const { x, y } = event.points[0];
      if (x !== y) this.follow(source.tasks[order[y]], source.tasks[order[x]]);
    });
  }

  sayExtremes(n, at, source, symmetric) {
    const found = [];
    range(source.tasks.length).forEach((i) => range(symmetric ? i : source.tasks.length).forEach((j) => {
      if (at(i, j) !== null) found.push([at(i, j), `${source.labels[j]} and ${source.labels[i]}`]);
    }));
    found.sort((a, b) => b[0] - a[0]);
    const few = Math.min(5, Math.floor(found.length / 2));
    const make = (tag, ...children) => { const made = document.createElement(tag); made.append(...children); return made; };
    const list = (title, items) => make("div", make("p", title), make("ol", ...items.map(([value, name]) =>
      make("li", make("span", name), make("span", value.toFixed(2))))));
    if (few) $(`extremes-${n}`).append(list("Highest", found.slice(0, few)), list("Lowest", found.slice(-few).reverse()));
  }
}
