"use strict";
// How everything is drawn: colours of both themes, axes, names, what stands beside a picture.

const $ = (id) => document.getElementById(id);
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const CONFIG = { displaylogo: false, displayModeBar: false, responsive: false, doubleClick: "reset" };
const NARROW = 520;
const FONT = "system-ui, sans-serif";

const theme = () => document.documentElement.dataset.theme;
const ink = (n) => STYLE.inks[theme()][n % STYLE.inks[theme()].length];
const paper = () => STYLE.papers[theme()];
const drawings = new Map(); // element id -> function that draws it again

// Plotly reads names as markup; these are names.
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const asRead = (text) => text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");

// A name that has room: its beginning and its end, which tell most names apart.
function short(name, most) {
  const letters = [...name];
  if (letters.length <= most) return plain(name);
  const end = Math.floor((most - 1) / 3);
  return plain(`${letters.slice(0, most - 1 - end).join("")}…${letters.slice(letters.length - end).join("")}`);
}

// The pixels that names take: letters differ in width, and none may be cut off.
const pen = document.createElement("canvas").getContext("2d");
function widest(names, size) {
  pen.font = `${size}px ${FONT}`;
  return Math.max(0, ...names.map((name) => pen.measureText(asRead(name)).width));
}

function make(tag, attributes, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
}

const isShown = (element) => element.getClientRects().length > 0;

// Draws now, and again whenever the theme or the width changes; what is folded waits until it opens.
function keepDrawn(id, draw) {
  drawings.set(id, draw);
  if (isShown($(id))) draw();
}

function drawAll(inside = document) {
  drawings.forEach((draw, id) => { if (inside.contains($(id)) && isShown($(id))) draw(); });
}

function showMessage(id, text) {
  const element = $(id);
  Plotly.purge(element);
  element.classList.add("empty");
  element.textContent = text;
  element.removeAttribute("role");
  tools(element, null, null);
}

// Draws, and says in words what is drawn. `more`: label for those who do not see it, table of it.
function show(id, traces, layout, more = {}) {
  const element = $(id);
  const entries = traces.filter((trace) => trace.showlegend !== false && trace.name);
  if (layout.showlegend !== false && traces[0].type === "scatter" && entries.length) {
    // The legend stands above the plot, which keeps its height.
    entries.forEach((trace) => { trace.name = short(asRead(trace.name), Math.floor((layout.width - 110) / 6.6)); });
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
  const caption = element.closest("figure")?.querySelector("figcaption")?.firstChild?.textContent.trim();
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", more.label ?? caption ?? id);
  tools(element, more.table ?? null, layout);
  return Plotly.react(element, traces, layout, CONFIG);
}

// Buttons under a picture: to download it, and to read it as a table.
function tools(element, table, layout) {
  let bar = element.nextElementSibling;
  if (!bar?.classList.contains("tools")) {
    if (!layout) return;
    bar = make("div", { className: "tools" });
    element.after(bar);
  }
  bar.replaceChildren();
  if (!layout) return;
  const what = element.getAttribute("aria-label");
  for (const format of ["png", "svg"]) {
    const button = make("button", { type: "button" }, format.toUpperCase());
    button.setAttribute("aria-label", `Download as ${format.toUpperCase()}: ${what}`);
    button.addEventListener("click", () => Plotly.downloadImage(element, { format, filename: element.id, scale: format === "png" ? 2 : 1, width: layout.width, height: layout.height }));
    bar.append(button);
  }
  if (table) {
    const folded = make("details", { className: "table" }, make("summary", {}, "As a table"));
    folded.firstChild.setAttribute("aria-label", `As a table: ${what}`);
    folded.addEventListener("toggle", () => {
      if (folded.open && !folded.querySelector("table")) folded.append(tableOf(...table()));
    });
    bar.append(folded);
  }
}

// `columns`: names; `rows`: [name, values]. Numbers with two digits, unknown ones with a dash.
function tableOf(corner, columns, rows, digits = 2) {
  const head = make("tr", {}, make("th", { scope: "col" }, corner), ...columns.map((name) => make("th", { scope: "col" }, name)));
  const body = rows.map(([name, values]) => make("tr", {}, make("th", { scope: "row" }, name),
    ...values.map((value) => make("td", { className: "number" }, typeof value === "number" ? value.toFixed(digits) : value ?? "–"))));
  const region = make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
  region.setAttribute("role", "region");
  region.setAttribute("aria-label", "Table");
  return region;
}

function axis(more) {
  const { quiet, rule } = paper();
  return { gridcolor: rule, zerolinecolor: quiet, zerolinewidth: 1.6, linecolor: rule, tickfont: { color: quiet, size: 12 },
    title: { font: { color: quiet, size: 12 } }, automargin: true, fixedrange: true, ...more };
}

function titled(text, more) {
  return axis({ title: { text, standoff: 6, font: { color: paper().quiet, size: 12 } }, ...more });
}

// A range that does not make little look like much: with 0, and at least `least` long.
function honest(values, least = 0.1) {
  const known = values.filter((value) => value !== null && Number.isFinite(value));
  let [low, high] = [Math.min(0, ...known), Math.max(0, ...known)];
  if (high - low < least) [low, high] = low < 0 && high > 0 ? [low - least / 2, high + least / 2] : low < 0 ? [-least, 0] : [0, least];
  const room = 0.04 * (high - low);
  return [low < 0 ? low - room : 0, high > 0 ? high + room : 0];
}

function baseLayout(id, more) {
  const { ink, hover, rule } = paper(), width = Math.floor($(id).clientWidth);
  // Dragging zooms where there is a mouse; on a narrow screen it scrolls the page.
  return { width, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: width < NARROW ? false : "zoom",
    font: { family: FONT, color: ink, size: 12 }, margin: { l: 48, r: 12, t: 10, b: 40 },
    hoverlabel: { bgcolor: hover, bordercolor: rule, font: { color: ink } },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal", font: { size: 12 } }, ...more };
}

function lineLayout(id, xTitle, yTitle, more) {
  const height = $(id).classList.contains("low") ? 230 : 300;
  return baseLayout(id, { height, hovermode: "x", xaxis: titled(xTitle, { fixedrange: false }), yaxis: titled(yTitle), ...more });
}
