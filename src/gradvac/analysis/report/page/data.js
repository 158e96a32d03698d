"use strict";
// Reads the page's data: see payload.py for how arrays were packed.

const DATA = JSON.parse(document.getElementById("data").textContent);
const STYLE = DATA.style; // colours and limits, as in plots.py
const UNIT = 0.001, MISSING = -32768;

async function unpackArray(packed, stride) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = planes.length / 2, values = new Int16Array(size);
  for (let n = 0; n < size; n++) {
    const move = planes[n] | (planes[size + n] << 8);
    values[n] = move + (n < stride ? 0 : values[n - stride]); // Int16Array wraps, as packing did
  }
  return values;
}

async function unpack(quantity) {
  const [, components, pairs] = quantity.shape;
  quantity.values = await unpackArray(quantity.packed, components * pairs);
  quantity.means = await unpackArray(quantity.mean, components * pairs);
  delete quantity.packed;
  delete quantity.mean;
}

// Position of a pair of tasks within a row of packed pairs; -1 on the diagonal of symmetric ones.
function pairIndex(quantity, i, j, numTasks) {
  if (!quantity.symmetric) return i * numTasks + j;
  if (i === j) return -1;
  const [low, high] = i < j ? [i, j] : [j, i];
  return (high * (high - 1)) / 2 + low;
}

// Means of every packed pair over components at a step (its position; null: the mean of all steps,
// also of those that the page does not hold); NaN where nothing is known.
function meanPairs(quantity, components, step) {
  const [, numComponents, numPairs] = quantity.shape;
  const values = step === null ? quantity.means : quantity.values;
  const sums = new Float64Array(numPairs), counts = new Int32Array(numPairs);
  for (const k of components) {
    const start = ((step ?? 0) * numComponents + k) * numPairs;
    for (let p = 0; p < numPairs; p++) {
      const value = values[start + p];
      if (value !== MISSING) { sums[p] += value; counts[p]++; }
    }
  }
  return sums.map((sum, p) => (counts[p] ? (sum / counts[p]) * UNIT : NaN));
}

function range(length) {
  return Array.from({ length }, (_, n) => n);
}

// Position of the step nearest to the one asked for.
function nearest(steps, step) {
  let best = 0;
  steps.forEach((candidate, n) => {
    if (Math.abs(candidate - step) < Math.abs(steps[best] - step)) best = n;
  });
  return best;
}

// Positions of the components a choice stands for: one by name, or those of a mean.
function chosenComponents(source, quantity, choice) {
  if (choice in quantity.averages) return [quantity.averages[choice]];
  if (choice in source.averages) return source.averages[choice];
  const position = source.components.indexOf(choice);
  return position < 0 ? [] : [position];
}

// Mean of some values over a window of this many neighbours; unknown values do not count.
function smooth(values, window) {
  if (window < 2) return values;
  const half = Math.floor(window / 2);
  return values.map((value, n) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, n - half), n + half + 1).filter((other) => other !== null);
    return near.reduce((sum, other) => sum + other, 0) / near.length;
  });
}
