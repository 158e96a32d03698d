"use strict";
// Reads the page's data: see _packing.py for how arrays were packed.

const UNIT = 0.001, MISSING = -32768;

async function unpack(quantity) {
  const bytes = Uint8Array.from(atob(quantity.packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const size = planes.length / 2, [, components, pairs] = quantity.shape;
  const values = new Int16Array(size), stride = components * pairs;
  for (let n = 0; n < size; n++) {
    const move = planes[n] | (planes[size + n] << 8);
    values[n] = move + (n < stride ? 0 : values[n - stride]); // Int16Array wraps, as packing did
  }
  quantity.values = values;
  delete quantity.packed;
}

// Position of a pair of tasks within a row of packed pairs; -1 on the diagonal of symmetric ones.
function pairIndex(quantity, i, j, numTasks) {
  if (!quantity.symmetric) return i * numTasks + j;
  if (i === j) return -1;
  const [low, high] = i < j ? [i, j] : [j, i];
  return (high * (high - 1)) / 2 + low;
}

// Means over components and steps (positions) of every packed pair; NaN where nothing is known.
function meanPairs(quantity, components, steps) {
  const [, numComponents, numPairs] = quantity.shape;
  const sums = new Float64Array(numPairs), counts = new Int32Array(numPairs);
  for (const s of steps) {
    for (const k of components) {
      const start = (s * numComponents + k) * numPairs;
      for (let p = 0; p < numPairs; p++) {
        const value = quantity.values[start + p];
        if (value !== MISSING) { sums[p] += value; counts[p]++; }
      }
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
function chosenComponents(source, choice) {
  if (choice in source.averages) return source.averages[choice];
  const position = source.components.indexOf(choice);
  return position < 0 ? [] : [position];
}
