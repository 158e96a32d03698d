"use strict";
// Maps of pairs: square, with numbers in the cells where they have room.

const RELIABLE = 0.25; // tasks of a pair that agree with themselves by less, on average, are marked

// Frames around families, and to the right their names, where there is room for them.
function familyMarks(blocks, narrow, cell) {
  const { ink, quiet, ground } = paper(), shapes = [], annotations = [];
  let free = -Infinity; // from here on, in pixels
  for (const [family, start, stop] of blocks) {
    const [low, high, middle] = [start - 0.5, stop - 0.5, (start + stop - 1) / 2];
    for (const [color, width] of [[ground, 3.4], [ink, 1.4]]) { // a frame shows on light cells and on dark ones
      shapes.push({ type: "rect", x0: low, x1: high, y0: low, y1: high, line: { color, width } });
    }
    if (narrow) continue;
    shapes.push({ type: "line", line: { color: quiet, width: 2 }, y0: low + 0.15, y1: high - 0.15, xref: "paper", x0: 1.012, x1: 1.012 });
    if (middle * cell < free) continue;
    free = middle * cell + 14;
    annotations.push({ text: short(family, 24), showarrow: false, font: { color: ink, size: 12 }, y: middle, xref: "paper", x: 1.02, xanchor: "left" });
  }
  return { shapes, annotations };
}

// Colours for values between two bounds: centred at 0, unless all values are above it and close to
// each other. Then the blues run over them alone, lest all look the same; the first is a clear one,
// for the colour of the page means 0. They never run over less than a tenth. As in `HeatMap`. Shares
// of steps in conflict, or altered for it, are orange alone: blue means that tasks agree.
function coloursOf([low, high], is_share = false) {
  const scale = STYLE.scales[theme()];
  if (is_share) {
    const oranges = scale.filter(([at]) => at <= 0.5).map(([at, colour]) => [1 - 2 * at, colour]).reverse();
    return { zmin: 0, zmax: Math.max(high, STYLE.leastRange), colorscale: oranges };
  }
  if (isNarrow([low, high])) {
    const [first] = scale[STYLE.paleBlue], room = Math.max(0, STYLE.leastRange - (high - low)) / 2;
    return { zmin: low - room, zmax: high + room, colorscale: scale.slice(STYLE.paleBlue).map(([at, colour]) => [(at - first) / (1 - first), colour]) };
  }
  const limit = Math.max(Math.abs(low), Math.abs(high), STYLE.leastRange);
  return { zmin: -limit, zmax: limit, zmid: 0, colorscale: scale };
}

const isNarrow = ([low, high]) => low > high / 2 && low < high;

// What lies behind the cells: hatching where a pair is unknown, grey on the diagonal of a symmetric map.
function groundOf(values, diagonal) {
  const { blank, hatch } = paper(), cells = [];
  values.forEach((row, i) => row.forEach((value, j) => {
    if (value !== null) return;
    const fill = i === j && diagonal ? blank : "url(#h)";
    cells.push(`<rect x="${j * 10}" y="${i * 10}" width="10" height="10" fill="${fill}"/>`);
  }));
  const size = `${values[0].length * 10} ${values.length * 10}`;
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${size}" preserveAspectRatio="none"><pattern id="h" width="2.5" height="2.5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="0.8" height="2.5" fill="${hatch}"/></pattern>${cells.join("")}</svg>`;
  return cells.length ? [{ source: `data:image/svg+xml;utf8,${encodeURIComponent(svg)}`, xref: "paper", yref: "paper", x: 0, y: 1, sizex: 1, sizey: 1, sizing: "stretch", layer: "below" }] : [];
}

const percent = (value) => `${Math.round(100 * value)}%`.replace("-0%", "0%");
const cosine = (value) => value.toFixed(2).replace("-0.00", "0.00").replace("0.", ".");

// Dots in the corners of cells that are not reliable: colours mean values, and nothing else.
function marks(reliability, room) {
  const cells = reliability.flatMap((row, i) => row.map((value, j) => (i !== j && value !== null && value < RELIABLE ? [j, i] : null))).filter(Boolean);
  const size = Math.max(1.5, Math.min(5, room / 5));
  return { type: "scatter", mode: "markers", x: cells.map(([j]) => j + 0.34), y: cells.map(([, i]) => i + 0.34), hoverinfo: "skip", showlegend: false,
    marker: { size, color: paper().ink, line: { color: paper().ground, width: room > 14 ? 1 : 0 } } };
}

// Arrow keys move over the cells of a map and say what they hold; Enter does what a click does.
function walkCells(element, view, form) {
  const size = view.tasks.length;
  element.tabIndex = 0;
  element.cell ??= [0, Math.min(1, size - 1)];
  if (element.walks) { element.walks = [view, form]; return; }
  element.walks = [view, form];
  const said = element.parentElement.appendChild(make("div", { className: "said" }));
  said.setAttribute("aria-live", "polite");
  element.addEventListener("keydown", (event) => {
    const [now, write] = element.walks, last = now.tasks.length - 1;
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }, move = moves[event.key];
    if (!move && event.key !== "Enter") return;
    event.preventDefault();
    const [i, j] = element.cell.map((at, axis) => Math.max(0, Math.min(last, at + (move ? move[axis] : 0))));
    element.cell = [i, j];
    if (!move) return void element.emit("plotly_click", { points: [{ x: j, y: i }] });
    const value = now.values[i][j];
    said.textContent = `${now.tasks[i]}, ${now.tasks[j]}: ${value !== null ? write(value) : i === j ? "the same task" : "unknown"}`;
    const { ink } = paper(), frames = (element.layout.shapes ?? []).filter((shape) => shape.name !== "cell");
    Plotly.relayout(element, { shapes: [...frames, { name: "cell", type: "rect", x0: j - 0.5, x1: j + 0.5, y0: i - 0.5, y1: i + 0.5, line: { color: ink, width: 3 } }] })
      .then(() => Plotly.Fx.hover(element, { xval: j, yval: i })); // as long as it is drawn anew, nothing hovers
  });
}

// The bar that explains the colours, below the names: `y` in heights of the plot.
function colourBar(y, as_percent) {
  return { orientation: "h", thickness: 9, len: 1, x: 0.5, xanchor: "center", y, yanchor: "top", xpad: 0, ypad: 0, outlinewidth: 0,
    nticks: 5, tickformat: as_percent ? ".0%" : ".2~f", tickfont: { size: 11, color: paper().quiet } };
}

// Every n-th name, so that they do not overlap.
function spaced(labels, room) {
  const every = Math.ceil(9 / room);
  return labels.map((label, n) => (n % every ? "" : label));
}

// A square map. `view`: values, labels, tasks, blocks, bounds, what; rows and columns in words where
// (i, j) is not (j, i); as_percent; is_share; reliability of every cell.
function drawMatrix(id, view) {
  const width = $(id).clientWidth, narrow = width < NARROW, size = view.labels.length;
  const most = narrow ? 10 : 22, labels = view.labels.map((label) => short(label, most));
  const letters = Math.min(most, Math.max(...view.labels.map((label) => [...label].length)));
  const longest = Math.min(24, Math.max(0, ...view.blocks.map(([family]) => family.length)));
  const side = narrow || !longest ? 8 : 22 + 7 * longest, edge = 14 + Math.max(7 * letters, widest(labels, 13)), named = view.rows ? 18 : 0;
  const tall = 110 + edge + named; // everything of the height but cells: the whole map fits a screen
  const cells = Math.max(120, Math.min(width - edge - named - side, Math.max(360, innerHeight - 290 - tall + 110, 11 * size), 96 * size)); // 11 pixels: every name can be read
  const font = { size: Math.max(8, Math.min(13, (cells / size) * 0.85)), color: paper().ink };
  const ticks = { tickmode: "array", tickvals: range(size), ticktext: spaced(labels, cells / size), tickfont: font, showgrid: false,
    zeroline: false, ticks: "", automargin: false, fixedrange: size <= STYLE.mostNumbers };
  const form = view.as_percent ? percent : cosine, several = size <= STYLE.mostNumbers && cells / size > 21;
  const trace = {
    type: "heatmap", z: view.values, x: range(size), y: range(size), ...coloursOf(view.bounds, view.is_share), hoverongaps: false, xgap: 0.6, ygap: 0.6,
    customdata: view.values.map((row, i) => row.map((value, j) => [plain(view.tasks[i]), plain(view.tasks[j]), value === null ? "" : form(value)])),
    hovertemplate: view.rows ? `${view.rows}: %{customdata[0]}<br>${view.columns}: %{customdata[1]}<br>${view.what}: <b>%{customdata[2]}</b><extra></extra>`
      : `%{customdata[0]} and %{customdata[1]}<br>${view.what}: <b>%{customdata[2]}</b><extra></extra>`,
    colorbar: colourBar(-(edge + named) / cells, view.as_percent),
  };
  if (several) Object.assign(trace, { text: view.values.map((row) => row.map((value) => (value === null ? "" : form(value)))), texttemplate: "%{text}", textfont: { size: Math.min(15, cells / size / 3.2) } });
  const heading = (text) => ({ text, standoff: 2, font: { size: 11, color: paper().quiet } });
  const layout = baseLayout(id, {
    height: Math.ceil(cells + 8 + edge + named + 30), margin: { l: edge + named, r: width - edge - named - cells, t: 8, b: edge + named + 30 },
    images: groundOf(view.values, true), dragmode: narrow || size <= STYLE.mostNumbers ? false : "zoom",
    xaxis: axis({ ...ticks, range: [-0.5, size - 0.5], tickangle: cells / size < 7 * letters + 5 ? -90 : 0, title: heading(view.rows ? view.columns : "") }),
    yaxis: axis({ ...ticks, range: [size - 0.5, -0.5], title: heading(view.rows) }), ...familyMarks(view.blocks, narrow, cells / size),
  });
  const traces = view.reliability ? [trace, marks(view.reliability, cells / size)] : [trace];
  walkCells($(id), view, form);
  const corner = view.rows ? `${view.rows}, ${view.columns}` : "";
  return show(id, traces, layout, {
    label: `${view.what} of ${size} tasks, as a map${view.rows ? `. Rows: ${view.rows}; columns: ${view.columns}` : ""}`,
    table: () => [corner, view.tasks, view.tasks.map((task, i) => [task, view.values[i].map((value) => (value === null ? null : form(value)))])],
  });
}

// Lowest and highest known value of a matrix but its diagonal.
function extent(values, withDiagonal = false) {
  const known = values.flatMap((row, i) => row.filter((value, j) => value !== null && (withDiagonal || i !== j)));
  return known.length ? [Math.min(...known), Math.max(...known)] : [0, 0];
}

function hull(bounds) {
  return [Math.min(...bounds.map(([low]) => low)), Math.max(...bounds.map(([, high]) => high))];
}
