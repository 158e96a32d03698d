"use strict";
// The maps of similarity, one for each run, and layers by pairs beside each, under one set of controls.

function unique(values) {
  return [...new Set(values)];
}

function fill(select, groups, keep) {
  const before = keep === undefined ? select.value : keep;
  select.replaceChildren();
  for (const [name, options] of groups) {
    const parent = name ? select.appendChild(make("optgroup", { label: name })) : select;
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
  const components = chosenComponents(source, quantity, $("component").value);
  return components.length ? { source, quantity, components } : null;
}

// Lowest and highest value, but for a few outliers that would pale the rest; while one moves through the steps, of all steps.
function boundsOf({ quantity }) {
  if ($("colours").value === "all") return [-quantity.limit, quantity.limit];
  const size = Math.round(Math.sqrt(quantity.shape[2])), onDiagonal = (p) => !quantity.symmetric && p % (size + 1) === 0;
  // Of all components: the map of layers beside it has the same colours.
  const of = (values) => {
    const known = values.filter((value, n) => value !== MISSING && !onDiagonal(n % quantity.shape[2])).sort(), last = known.length - 1;
    return last < 0 ? [0, 0] : [known[Math.floor(0.0025 * last)] * UNIT, known[Math.ceil(0.9975 * last)] * UNIT];
  };
  if ($("mean").checked) return (quantity.boundsOfMeans ??= of(quantity.means));
  return (quantity.bounds ??= of(quantity.values));
}

const WHOLE = "whole training"; // what a quantity with one value for all steps is of
const MOST_PAIR_NAMES = 30, MOST_CELLS_WITH_NUMBERS = 150;

class HeatMaps {
  constructor(runs, follow) {
    this.runs = runs;
    this.follow = follow;
    this.listeners = [];
    const sources = runs.flatMap((run) => run.sources);
    fill($("source"), [["", unique(sources.map((source) => source.name))]]);
    for (const id of ["source", "quantity", "component", "order", "colours", "mean", "mark"]) {
      $(id).addEventListener("change", () => this.refresh());
    }
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
    $("step").disabled = $("mean").disabled = steps.length < 2;
    $("mark").disabled = !sources.some((source) => source.reliability);
    const count = Math.max(0, ...quantities.map((quantity) => quantity.numSteps));
    const many = `${count.toLocaleString("en")} ${count === 1 ? "step" : "steps"}`;
    const shown = quantities.some((quantity) => quantity.overall) ? WHOLE
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
    if (!view) {
      showMessage(`heat-${n}`, "This run has nothing of the kind; choose another source or component.");
      showMessage(`layers-pairs-${n}`, "");
      return;
    }
    const { source, quantity, components } = view, size = source.tasks.length;
    const position = $("mean").checked ? null : nearest(quantity.steps, this.step());
    const pairs = meanPairs(quantity, components, position);
    const byFamily = $("order").value === "family";
    const order = byFamily ? source.order : range(size);
    const at = (i, j) => {
      const value = i === j ? NaN : pairs[pairIndex(quantity, i, j, size)];
      return Number.isNaN(value) ? null : value;
    };
    const values = order.map((i) => order.map((j) => at(i, j)));
    if (values.flat().every((value) => value === null)) {
      showMessage(`heat-${n}`, quantity.key === "without noise" ? "Not reliable enough to show without noise: measure on more lines." : "Nothing is known here: no two tasks were seen together.");
      this.drawLayers(n, view, position);
      return;
    }
    const bounds = this.bounds(n), is_share = quantity.key.startsWith("share");
    const when = quantity.overall ? WHOLE : position === null ? "mean of all steps" : `step ${quantity.steps[position].toLocaleString("en")}`;
    const { zmin, zmax } = coloursOf(bounds);
    const stretch = !is_share && isNarrow(bounds) ? `; colours from ${[zmin, zmax].map((bound) => bound.toFixed(2)).join(" to ")}` : "";
    const unknown = values.some((row, i) => row.some((value, j) => i !== j && value === null));
    const hatched = unknown ? `; hatched: ${quantity.key === "without noise" ? "not reliable enough" : "unknown"}` : "";
    $(`heat-note-${n}`).textContent = `${quantity.key}, ${$("component").value}, ${when}${stretch}${hatched}`;
    drawMatrix(`heat-${n}`, {
      values, bounds, labels: order.map((i) => source.labels[i]), tasks: order.map((i) => source.tasks[i]), as_percent: is_share, is_share,
      blocks: byFamily ? source.blocks : [], what: quantity.key, rows: quantity.rows, columns: quantity.columns,
      reliability: $("mark").checked ? this.reliabilityOf(source, components, order) : null,
    });
    this.listen(n, order, source);
    this.drawLayers(n, view, position);
  }

  // Of all maps that are compared, or of one run's alone.
  bounds(n) {
    const shown = $("colours").value === "own" ? [viewOf(this.runs[n])] : this.runs.map(viewOf).filter(Boolean);
    return hull(shown.map(boundsOf));
  }

  // Of every cell, the geometric mean of its tasks' reliabilities; null where none was measured.
  reliabilityOf(source, components, order) {
    if (!source.reliability) return null;
    const own = components.filter((k) => k < source.components.length);
    const chosen = own.length ? own : range(source.components.length);
    const mean = (task) => {
      const known = chosen.map((k) => source.reliability[k][task]).filter((value) => value !== null);
      return known.length ? Math.max(0, known.reduce((sum, value) => sum + value, 0) / known.length) : null;
    };
    const means = order.map(mean);
    return means.map((one) => means.map((other) => (one === null || other === null ? null : Math.sqrt(one * other))));
  }

  listen(n, order, source) {
    const element = $(`heat-${n}`);
    element.removeAllListeners("plotly_click");
    element.on("plotly_click", (event) => {
      const { x, y } = event.points[0];
      if (x === y) return;
      this.follow(source.tasks[order[y]], source.tasks[order[x]]);
      const note = $(`heat-note-${n}`);
      note.querySelector("a")?.remove();
      note.append(make("a", { href: "#steps" }, ` ${source.labels[order[y]]}, ${source.labels[order[x]]} over steps`));
    });
  }

  // Components from first to last against pairs from the highest to the lowest value.
  drawLayers(n, { source, quantity, components }, position) {
    const id = `layers-pairs-${n}`, size = source.tasks.length, found = [];
    const means = meanPairs(quantity, components, position);
    range(size).forEach((i) => range(quantity.symmetric ? i : size).forEach((j) => {
      const p = pairIndex(quantity, i, j, size);
      if (i !== j && !Number.isNaN(means[p])) found.push([means[p], p, quantity.symmetric ? [j, i] : [i, j]]);
    }));
    found.sort((a, b) => b[0] - a[0]);
    const names = found.map(([, , [i, j]]) => `${source.labels[i]} ${quantity.symmetric ? "and" : "against"} ${source.labels[j]}`);
    const rows = range(source.components.length).map((k) => {
      const values = meanPairs(quantity, [k], position);
      return found.map(([, p]) => (Number.isNaN(values[p]) ? null : values[p]));
    });
    if (rows.length < 2 || rows.flat().every((value) => value === null)) return showMessage(id, "Layers by pairs need two components in which pairs are known.");
    const width = $(id).clientWidth, narrow = width < NARROW, named = found.length <= MOST_PAIR_NAMES;
    const labels = source.components.map((name) => short(name, narrow ? 16 : 20));
    const bounds = this.bounds(n);
    const letters = named ? Math.min(18, Math.max(...names.map((name) => name.length))) : 0;
    const room = Math.max(180, ($(`heat-${n}`).layout?.height ?? 420) - 54 - 7 * letters);
    const height = Math.max(14 * rows.length, Math.min(room, Math.max(180, 46 * rows.length))), below = named ? 12 + Math.max(6.6 * letters, widest(names.map((name) => short(name, 18)), 11)) : 26;
    const left = 16 + Math.max(6.6 * Math.max(...labels.map((label) => label.length)), widest(labels, 12));
    const share = quantity.key.startsWith("share"), form = share ? percent : cosine;
    const trace = { type: "heatmap", z: rows, x: range(names.length), y: range(rows.length), ...coloursOf(bounds, share), hoverongaps: false,
      xgap: names.length > 80 ? 0 : 0.6, ygap: 0.6,
      customdata: rows.map((row, k) => row.map((value, p) => [plain(names[p]), plain(source.components[k]), value === null ? "" : form(value)])),
      hovertemplate: `%{customdata[0]}<br>%{customdata[1]}: <b>%{customdata[2]}</b><extra></extra>`,
      colorbar: colourBar(-below / height, share) };
    const wide = (width - left - 8) / names.length;
    if (rows.length * names.length <= MOST_CELLS_WITH_NUMBERS && wide > 22) Object.assign(trace, { text: rows.map((row) => row.map((value) => (value === null ? "" : form(value)))), texttemplate: "%{text}", textfont: { size: Math.min(12, wide / 2.8, height / rows.length / 1.6) } });
    const bare = { showgrid: false, zeroline: false, ticks: "", automargin: false, tickmode: "array" };
    const between = "pairs, from the highest to the lowest value";
    return show(id, [trace], baseLayout(id, {
      height: Math.ceil(height + 8 + below + 30), margin: { l: left, r: 8, t: 8, b: below + 30 }, images: groundOf(rows, false),
      xaxis: axis({ ...bare, tickvals: named ? range(names.length) : [], ticktext: names.map((name) => short(name, 18)), tickangle: -90, tickfont: { size: Math.max(8, Math.min(11, wide)), color: paper().ink },
        range: [-0.5, names.length - 0.5], fixedrange: named, title: { text: named ? "" : between, standoff: 4, font: { size: 11, color: paper().quiet } } }),
      yaxis: axis({ ...bare, tickvals: range(rows.length), ticktext: spaced(labels, height / rows.length), tickfont: { size: Math.max(8, Math.min(12, (height / rows.length) * 0.8)), color: paper().ink }, range: [rows.length - 0.5, -0.5] }),
    }), { label: `${quantity.key} by component, ${between}`,
      table: () => ["pair", source.components, names.map((name, p) => [name, rows.map((row) => (row[p] === null ? null : form(row[p])))])] });
  }
}
