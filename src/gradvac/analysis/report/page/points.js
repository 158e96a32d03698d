"use strict";
// Scatters, and who pushes whom.

function drawDistance(runs) {
  const traces = [], what = runs.flatMap((run) => run.distance.map((part) => part.what))[0];
  runs.forEach((run, r) => run.distance.forEach(({ name, x, y, pairs }, p) => traces.push({
    type: "scatter", mode: "markers", x, y, name: plain(name + (runs.length > 1 ? `, ${run.name}` : "")), customdata: pairs.map(plain),
    marker: { color: ink(p), symbol: ["circle", "diamond-open", "cross-thin-open", "square-open"][r % 4], size: x.length > 200 ? 5 : 8, opacity: 0.75, line: { width: 1.4, color: ink(p) } },
    hovertemplate: "%{customdata}<br>distance %{x:.2f}, cosine <b>%{y:.2f}</b><extra></extra>",
  })));
  if (!traces.length) return sayInstead("distance-plot", "This needs five tasks of one direction with different known distances (see --distances).");
  return show("distance-plot", traces, lineLayout("distance-plot", what, "cosine", { hovermode: "closest", height: 340,
    xaxis: titled(plain(what), { fixedrange: false, zeroline: false }), yaxis: titled("cosine of a pair", { range: honest(traces.flatMap(({ y }) => y)), fixedrange: false }) }),
  { label: `Similarity of every pair against ${what}`, table: () => ["pair", [what, "cosine", "in"], runs.flatMap((run) => run.distance.flatMap((part) => part.pairs.map((pair, n) => [pair, [part.x[n], part.y[n], part.name]])))] });
}

function drawScores(runs, metric) {
  const traces = runs.filter((run) => run.scores.length).map((run) => ({
    type: "scatter", mode: run.scores.length > 30 ? "markers" : "markers+text", x: run.scores.map((point) => point.x), y: run.scores.map((point) => point.y),
    text: run.scores.map((point) => short(point.task, 12)), textposition: "top center", textfont: { size: 10, color: paper().quiet },
    customdata: run.scores.map((point) => plain(point.task)), name: plain(run.name), marker: { color: ink(runs.indexOf(run)), size: 8 },
    hovertemplate: "%{customdata}<br>cosine %{x:.2f}, score <b>%{y:.2f}</b><extra></extra>", cliponaxis: false,
  }));
  if (!traces.length) return sayInstead("scores-plot", "This needs scores of tasks whose similarity is known.");
  return show("scores-plot", traces, lineLayout("scores-plot", "", "", { hovermode: "closest", height: 340, showlegend: runs.length > 1,
    xaxis: titled("mean cosine with the other tasks", { fixedrange: false }), yaxis: titled(plain(metric), { fixedrange: false }) }),
  { label: `${metric} of every task against its mean similarity with the others`, table: () => ["task", ["cosine", metric, "run"], runs.flatMap((run) => run.scores.map((point) => [point.task, [point.x, point.y, run.name]]))] });
}

const MODEL = "whole model";

// Row: whose loss; column: who pushes it. Green would praise: blue lets a loss fall, orange lets it rise.
function drawPushes(runs) {
  fill($("push-component"), [["", [MODEL]], ["components", unique(runs.flatMap((run) => Object.keys(run.pushes?.components ?? {})))]]);
  const choice = $("push-component").value;
  const valuesOf = ({ pushes }) => (choice === MODEL ? pushes.values : pushes.components[choice]);
  const known = runs.filter((run) => run.pushes && valuesOf(run));
  const bounds = hull([[0, 0], ...known.map((run) => extent(valuesOf(run), true))]);
  runs.forEach((run, n) => {
    if (!known.includes(run)) return sayInstead(`pushes-${n}`, "This needs a record of training, or similarities measured on halves.");
    const { labels, tasks, blocks } = run.pushes, values = valuesOf(run);
    if (values.flat().every((value) => value === null)) return sayInstead(`pushes-${n}`, "No task is predicted to make progress.");
    return drawMatrix(`pushes-${n}`, { values, labels, tasks, blocks, bounds, asPercent: true, what: "share of predicted progress",
      rows: "whose loss", columns: "who pushes it" });
  });
}
