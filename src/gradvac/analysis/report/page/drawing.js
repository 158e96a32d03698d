"use strict";
// How everything is drawn: colours of both themes, axes, heat maps with family frames.

// Okabe and Ito's colours, which people with any colour vision tell apart.
const INKS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#aa4499", "#8c6d00", "#3d9bd1", "#5b5b5b"],
  dark: ["#5ab4f0", "#ff9248", "#3fd0a4", "#e59ad0", "#f0d350", "#a3d8ff", "#c4c4c4"],
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
// Orange below 0, blue above; 0 is the colour of the page, so that nothing looks like something.
const SCALES = {
  light: [[0, "#7f3b08"], [0.15, "#b35806"], [0.32, "#f1a340"], [0.44, "#fddcb0"], [0.5, "#fafafa"],
    [0.56, "#cfe3f1"], [0.68, "#67a9cf"], [0.85, "#2166ac"], [1, "#08306b"]],
  dark: [[0, "#ffe0a8"], [0.15, "#f5a142"], [0.32, "#b3661a"], [0.44, "#4a3220"], [0.5, "#1c222a"],
    [0.56, "#1f3a55"], [0.68, "#2f75b5"], [0.85, "#6cb6f5"], [1, "#d5ecff"]],
};
const PALE_BLUE = 5; // position in both scales
const PAPER = { light: { ink: "#1c2128", quiet: "#59636e", rule: "#e1e5ea", hover: "#ffffff", ground: "#ffffff" },
  dark: { ink: "#e6eaef", quiet: "#9aa5b1", rule: "#2c343e", hover: "#232b35", ground: "#11161c" } };
const CONFIG = { displaylogo: false, displayModeBar: false, responsive: false, doubleClick: "reset" };

const theme = () => document.documentElement.dataset.theme;
const ink = (n) => INKS[theme()][n % INKS[theme()].length];
const paper = () => PAPER[theme()];
const drawings = new Map(); // element id -> function that draws it again

// Draws now, and again whenever the theme or the width changes.
function keepDrawn(id, draw) {
  drawings.set(id, draw);
  draw();
}

function sayInstead(id, text) {
  const element = document.getElementById(id);
  Plotly.purge(element);
  element.classList.add("empty");
  element.textContent = text;
}

function show(id, traces, layout) {
  const element = document.getElementById(id);
  const entries = traces.filter((trace) => trace.showlegend !== false && trace.name);
  if (layout.showlegend !== false && traces[0].type === "scatter" && entries.length) {
    // The legend stands above the plot, which keeps its height.
    const longest = Math.max(...entries.map((trace) => trace.name.length));
    const columns = Math.max(1, Math.floor((layout.width - 60) / (52 + 6.6 * longest)));
    const above = 10 + 19 * Math.ceil(entries.length / columns);
    layout.height += above;
    layout.margin = { ...layout.margin, t: above };
    element.style.height = `${layout.height}px`;
  }
  if (element.layout && element.layout.width !== layout.width) Plotly.purge(element); // else the legend stays where it was
  if (element.classList.contains("empty")) {
    element.classList.remove("empty");
    element.textContent = "";
  }
  return Plotly.react(element, traces, layout, CONFIG);
}

function axis(more) {
  const { quiet, rule } = paper();
  return { gridcolor: rule, zerolinecolor: quiet, linecolor: rule, tickfont: { color: quiet, size: 12 },
    title: { font: { color: quiet, size: 12 } }, automargin: true, fixedrange: true, ...more };
}

function titled(text, more) {
  return axis({ title: { text, standoff: 6, font: { color: paper().quiet, size: 12 } }, ...more });
}

function baseLayout(id, more) {
  const { ink, hover, rule } = paper();
  return { width: Math.floor(document.getElementById(id).clientWidth), paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", color: ink, size: 12 }, margin: { l: 48, r: 12, t: 10, b: 40 },
    hoverlabel: { bgcolor: hover, bordercolor: rule, font: { color: ink } },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal", font: { size: 12 } }, ...more };
}

function lineLayout(id, xTitle, yTitle, more) {
  const height = document.getElementById(id).classList.contains("low") ? 230 : 300;
  return baseLayout(id, { height, hovermode: "x", xaxis: titled(xTitle), yaxis: titled(yTitle), ...more });
}

// Frames around families, and their names: to the right where there is room, else above.
function familyMarks(blocks, size, narrow) {
  const { ink, quiet, ground } = paper(), shapes = [], annotations = [];
  for (const [family, start, stop] of blocks) {
    const [low, high, middle] = [start - 0.5, stop - 0.5, (start + stop - 1) / 2];
    for (const [color, width] of [[ground, 3.4], [ink, 1.4]]) { // a frame shows on light cells and on dark ones
      shapes.push({ type: "rect", x0: low, x1: high, y0: low, y1: high, line: { color, width } });
    }
    const bracket = { type: "line", line: { color: quiet, width: 2 } };
    const name = { text: family, showarrow: false, font: { color: ink, size: narrow ? 10 : 12 } };
    if (narrow) {
      shapes.push({ ...bracket, x0: low + 0.15, x1: high - 0.15, yref: "paper", y0: 1.012, y1: 1.012 });
      annotations.push({ ...name, x: middle, yref: "paper", y: 1.02, yanchor: "bottom", textangle: -90 });
    } else {
      shapes.push({ ...bracket, y0: low + 0.15, y1: high - 0.15, xref: "paper", x0: 1.012, x1: 1.012 });
      annotations.push({ ...name, y: middle, xref: "paper", x: 1.02, xanchor: "left" });
    }
  }
  return { shapes, annotations };
}

// Colours for values between two bounds: centred at 0, unless all values are above it and close to
// each other. Then the blues run over them alone, lest all look the same; the first is a clear one,
// for the colour of the page means 0, or nothing.
function coloursOf([low, high]) {
  const scale = SCALES[theme()];
  if (isNarrow([low, high])) {
    const [first] = scale[PALE_BLUE];
    return { zmin: low, zmax: high, colorscale: scale.slice(PALE_BLUE).map(([at, colour]) => [(at - first) / (1 - first), colour]) };
  }
  const limit = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return { zmin: -limit, zmax: limit, zmid: 0, colorscale: scale };
}

const isNarrow = ([low, high]) => low > high / 2 && low < high;

// A square matrix of pairs. `view`: values, labels, tasks, blocks, bounds, what.
function drawMatrix(id, view) {
  const width = document.getElementById(id).clientWidth, narrow = width < 520;
  const longest = Math.max(0, ...view.blocks.map(([family]) => family.length));
  const letters = Math.max(...view.labels.map((label) => label.length));
  const side = narrow ? 0 : Math.min(180, 16 + 7 * longest), top = narrow ? 14 + 6.6 * longest : 8;
  const left = 14 + 7 * letters, bottom = 14 + 7 * letters;
  const size = view.labels.length, cells = Math.min(width - left - side - 6, 620, 80 * size);
  const font = { size: Math.max(8, Math.min(13, (cells / size) * 0.85)), color: paper().ink };
  const ticks = { tickmode: "array", tickvals: range(size), ticktext: view.labels, tickfont: font, showgrid: false,
    zeroline: false, ticks: "", constrain: "domain", automargin: false, title: undefined };
  const trace = {
    type: "heatmap", z: view.values, x: range(size), y: range(size), ...coloursOf(view.bounds),
    hoverongaps: false, xgap: 0.6, ygap: 0.6,
    customdata: view.tasks.map((one) => view.tasks.map((other) => `${one} and ${other}`)),
    hovertemplate: `%{customdata}<br>${view.what}: <b>%{z:.3f}</b><extra></extra>`,
    colorbar: { orientation: "h", thickness: 9, len: 1, x: 0.5, xanchor: "center", y: 0, yanchor: "top", ypad: bottom, outlinewidth: 0,
      nticks: 5, tickfont: { size: 11, color: paper().quiet } },
  };
  const marks = familyMarks(view.blocks, size, narrow);
  const layout = baseLayout(id, {
    height: Math.ceil(cells + top + bottom + 30), margin: { l: left, r: width - left - cells, t: top, b: bottom + 30 },
    xaxis: axis({ ...ticks, range: [-0.5, size - 0.5], tickangle: cells / size < 7 * letters + 5 ? -90 : 0 }),
    yaxis: axis({ ...ticks, range: [size - 0.5, -0.5] }), ...marks,
  });
  return show(id, [trace], layout);
}
