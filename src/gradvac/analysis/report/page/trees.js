"use strict";
// Differences of the sides, and the trees that the gradients draw.

const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon"];

// Largest difference of any run: colours mean the same in all maps.
function sidesLimit(runs) {
  const apart = ({ values }) => values.flatMap((row, i) => row.filter((value, j) => i !== j && value !== null));
  return Math.max(0, ...runs.filter((run) => run.difference).flatMap((run) => apart(run.difference)).map(Math.abs)) || 1;
}

function drawSides(run, n, limit) {
  if (!run.difference) return sayInstead(`sides-${n}`, "This needs components of an encoder and of a decoder.");
  const { values, labels, tasks, blocks } = run.difference;
  const others = values.map((row, i) => row.map((value, j) => (i === j ? null : value)));
  return drawMatrix(`sides-${n}`, { values: others, labels, tasks, blocks, bounds: [-limit, limit], what: "encoder minus decoder", rows: "" });
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
    return { type: "scatter", mode: "markers", x: own.map(() => leaf), y: own, name: plain(family), cliponaxis: false,
      marker: { color, symbol: mark.symbol, size: 9, line: { width: 2, color } }, hoverinfo: "skip" };
  });
  const lines = { type: "scatter", mode: "lines", x, y, line: { color: paper().quiet, width: 1.6 }, hoverinfo: "skip", showlegend: false };
  return show(`tree-${n}`, [lines, ...dots], lineLayout(`tree-${n}`, "cosine", "", {
    height: 20 * labels.length + 60, hovermode: false, showlegend: dots.length > 0,
    xaxis: titled("cosine", { range: [leaf, low - room / 2], zeroline: false }),
    yaxis: axis({ tickmode: "array", tickvals: range(labels.length), ticktext: labels.map((label) => short(label, 18)), range: [labels.length - 0.5, -0.5],
      showgrid: false, zeroline: false, layer: "below traces", tickfont: { size: 12, color: paper().ink }, ticks: "outside", ticklen: 10, tickcolor: "rgba(0,0,0,0)" }),
  }), { label: `Tree of ${labels.length} tasks: ${labels.join(", ")}` });
}
