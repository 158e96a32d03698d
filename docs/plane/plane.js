"use strict";
// The method in the plane: PCGrad and GradVac for two gradients, drawn as they are dragged.
// A browser cannot run the rules; tests/theory/test_plane.py holds `alter` and all shown to them.
(() => {
  const TARGET_LIMIT = 1 - 1e-6; // |target| inside Eq. 3
  const CANCELLED = 1e-6; // a length at or below this share of what it was made of is rounding noise
  const OTHER = [1.15, 0]; // g_j lies on the axis: only angle and ratio of lengths matter
  const UNIT = 100; // SVG units for a length of 1
  const REASONS = {
    active: "similarity below the target", idle: "similarity meets the target", inert: "a gradient is zero",
  };

  const dot = (a, b) => a[0] * b[0] + a[1] * b[1];
  const norm = (a) => Math.sqrt(dot(a, a));
  const add = (a, b, by = 1) => [a[0] + by * b[0], a[1] + by * b[1]];
  const within = (value, low, high) => Math.min(Math.max(value, low), high);

  // One visit of Algorithm 1: what g_i becomes against g_j. PCGrad's target is 0.
  function alter(first, second, target) {
    const own = norm(first);
    const theirs = norm(second);
    if (!(own > 0 && theirs > 0)) return { state: "inert", altered: first };
    const phi = within(dot(first, second) / (own * theirs), -1, 1);
    if (!(phi < Math.min(target, TARGET_LIMIT))) return { state: "idle", altered: first };
    const goal = within(target, -TARGET_LIMIT, TARGET_LIMIT);
    const sine = Math.sqrt(1 - goal * goal);
    const step = own * (goal * Math.sqrt(1 - phi * phi) - phi * sine); // Eq. 3
    return { state: "active", altered: add(first, second, step / (theirs * sine)) };
  }

  // All that is shown of a rule; null where a gradient vanished and has no direction.
  function measure(first, second, target) {
    const { state, altered } = alter(first, second, target);
    const plain = add(first, second);
    const update = add(altered, second);
    const scale = Math.max(norm(first), norm(second));
    const vanished = (vector, of) => !(norm(vector) > CANCELLED * of);
    const cosine = (a, b, of) =>
      vanished(a, of) || vanished(b, scale) ? null : within(dot(a, b) / norm(a) / norm(b), -1, 1);
    return {
      state, altered, plain, update, target,
      before: cosine(first, second, norm(first)),
      after: cosine(altered, second, norm(first)),
      length: norm(first) > 0 ? norm(altered) / norm(first) : null,
      turned: cosine(update, plain, scale),
      stretched: vanished(plain, scale) ? null : norm(update) / norm(plain),
    };
  }

  globalThis.gradvacPlane = { alter };
  const root = document.getElementById("plane");
  if (!root) return; // another page

  const OWN = "<i>g<sub>i</sub></i>";
  const ALTERED = "<i>g′<sub>i</sub></i>";
  const THEIRS = "<i>g<sub>j</sub></i>";
  const SLIDERS = [ // id, name, least, most, step, value
    ["angle", `Angle of ${OWN}`, "0", "180", "1", "120"],
    ["length", `Length of ${OWN}`, "0", "1.2", "0.01", "1"],
    ["target", "Target of GradVac", "-1", "1", "0.01", "0.7"],
  ];
  root.innerHTML = `
    <div class="plane-controls"></div>
    <div class="plane-panels"></div>
    <p class="plane-key"><span class="update">update, ${ALTERED} + ${THEIRS}</span>
      <span class="plain">plain sum, ${OWN} + ${THEIRS}, where it differs</span></p>
    <table class="plane-numbers">
      <thead><tr><td></td><th scope="col">PCGrad</th><th scope="col">GradVac</th></tr></thead>
      <tbody></tbody>
    </table>`;
  const find = (selector) => root.querySelector(selector);
  find(".plane-controls").innerHTML = SLIDERS.map(([id, name, min, max, step, value]) => `
    <div><label for="plane-${id}">${name}</label> <output for="plane-${id}" aria-live="off"></output>
      <input id="plane-${id}" type="range" min="${min}" max="${max}" step="${step}" value="${value}">
    </div>`).join("");
  const [angle, length, target] = SLIDERS.map(([id]) => find(`#plane-${id}`));
  const ROWS = [
    ["target", "target"],
    ["state", "pair"],
    ["before", `cos(${OWN}, ${THEIRS}), before`],
    ["after", `cos(${ALTERED}, ${THEIRS}), after`],
    ["length", `‖${ALTERED}‖ / ‖${OWN}‖`],
    ["turned", "cos(update, plain sum)"],
    ["stretched", "‖update‖ / ‖plain sum‖"],
  ];
  find("tbody").innerHTML = ROWS.map(([key, name]) =>
    `<tr data-row="${key}"><th scope="row">${name}</th><td></td><td></td></tr>`).join("");

  function make(parent, tag, attributes = {}) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return parent.appendChild(element);
  }

  const at = (vector) => [UNIT * vector[0], -UNIT * vector[1]]; // up is up

  // An arrow from the origin; a name such as "g′_i" stands beyond its tip.
  function arrow(parent, kind, vector, name = "", lower = 3) {
    const group = make(parent, "g", { class: kind });
    const [x, y] = at(vector);
    const far = Math.hypot(x, y);
    if (far < 0.5) return;
    const [ux, uy] = [x / far, y / far];
    const head = Math.min(9, far);
    const [bx, by] = [x - head * ux, y - head * uy];
    make(group, "line", { x2: bx, y2: by });
    make(group, "path", {
      d: `M${x} ${y}L${bx - 0.42 * head * uy} ${by + 0.42 * head * ux}` +
        `L${bx + 0.42 * head * uy} ${by - 0.42 * head * ux}Z`,
    });
    if (!name) return;
    const [letter, index] = name.split("_");
    const text = make(group, "text", { x: x + 26 * ux, y: y + 26 * uy + lower });
    text.textContent = letter;
    make(text, "tspan", { dy: 4 }).textContent = index;
  }

  const panels = ["PCGrad", "GradVac"].map((name) => {
    const figure = document.createElement("figure");
    figure.innerHTML = "<figcaption></figcaption>";
    find(".plane-panels").append(figure);
    const svg = make(figure, "svg", { viewBox: "-165 -162 445 192", role: "img",
      "aria-label": `${name}: gradients, altered gradient and update; numbers in the table below` });
    const handle = make(svg, "circle", { class: "handle", r: 16 });
    const drawn = make(svg, "g", { "pointer-events": "none" });
    handle.addEventListener("pointerdown", (event) => handle.setPointerCapture(event.pointerId));
    handle.addEventListener("pointermove", (event) => {
      if (handle.hasPointerCapture(event.pointerId)) drag(svg, event);
    });
    return { name, caption: figure.firstChild, drawn, handle };
  });

  function drag(svg, event) {
    const { x, y } = new DOMPoint(event.clientX, event.clientY)
      .matrixTransform(svg.getScreenCTM().inverse());
    const up = Math.max(-y, 0); // below the axis all is the mirror image
    length.value = Math.hypot(x, up) / UNIT;
    angle.value = (Math.atan2(up, x) * 180) / Math.PI;
    show();
  }

  function write(value) {
    if (value === null) return "none";
    if (typeof value === "string") return value;
    return value.toFixed(2).replace(/^-0\.00$/, "0.00").replace("-", "−");
  }

  function draw({ name, caption, drawn, handle }, first, found) {
    caption.textContent = `${name}: ${found.state}, ${REASONS[found.state]}`;
    drawn.replaceChildren();
    make(drawn, "line", { class: "axis", x1: -165, x2: 280 });
    arrow(drawn, "update", found.update);
    arrow(drawn, "second", OTHER, "g_j", 22);
    if (found.state === "active") {
      arrow(drawn, "plain", found.plain);
      const [[x1, y1], [x2, y2]] = [at(first), at(found.altered)];
      make(drawn, "line", { class: "moved", x1, y1, x2, y2 });
      arrow(drawn, "altered", found.altered, "g′_i");
    }
    arrow(drawn, "first", first, "g_i");
    const [cx, cy] = at(first);
    handle.setAttribute("cx", cx);
    handle.setAttribute("cy", cy);
  }

  function show() {
    const turn = (angle.valueAsNumber * Math.PI) / 180;
    const first = [length.valueAsNumber * Math.cos(turn), length.valueAsNumber * Math.sin(turn)];
    const outputs = [`${angle.value}°`, write(length.valueAsNumber), write(target.valueAsNumber)];
    root.querySelectorAll("output").forEach((output, n) => { output.value = outputs[n]; });
    const found = [0, target.valueAsNumber].map((wanted) => measure(first, OTHER, wanted));
    panels.forEach((panel, n) => draw(panel, first, found[n]));
    for (const [key] of ROWS) {
      root.querySelectorAll(`[data-row=${key}] td`).forEach((cell, n) => {
        cell.textContent = write(found[n][key]);
      });
    }
  }

  for (const input of [angle, length, target]) input.addEventListener("input", show);
  show();
})();
