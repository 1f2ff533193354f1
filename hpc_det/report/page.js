"use strict";
// One trial is highlighted in all pictures: under the pointer, or pinned by a click or by #trial-7 in the URL. In a
// comparison of experiments, 12/3 is trial 3 of experiment 12.
const root = document.documentElement;
const shown = document.getElementById("shown");
const parts = new Map();
for (const part of document.querySelectorAll("[data-t]")) {
  const its = parts.get(part.dataset.t);
  if (its) its.push(part);
  else parts.set(part.dataset.t, [part]);
}
let highlighted = null;
let pinned = null;

function highlight(trial) {
  if (trial === highlighted) return;
  for (const part of parts.get(highlighted) ?? []) part.classList.remove("on");
  for (const part of parts.get(trial) ?? []) part.classList.add("on");
  highlighted = trial;
  root.classList.toggle("chosen", trial !== null);
  shown.textContent = trial === null ? "" : rowText(trial);
}

// Returns the cells of the trial in the table of trials, each after its heading.
function rowText(trial) {
  const row = parts.get(trial)?.find((part) => part.matches("#trials tr"));
  if (!row) return "";
  const headings = [...document.querySelectorAll("#trials th")];
  return headings.map((heading, i) => `${heading.textContent} ${row.cells[i].textContent}`).join(" · ");
}

function pin(trial) {
  pinned = trial === pinned ? null : trial;
  for (const button of document.querySelectorAll(".pin")) {
    button.setAttribute("aria-pressed", String(button.closest("[data-t]").dataset.t === pinned));
  }
  highlight(pinned);
}

// Lines are thin, so an element up to 5 pixels from the pointer counts as under it. Nearer ones come first.
const NEAR = [[0, 0], [0, -2], [0, 2], [-2, 0], [2, 0], [0, -5], [0, 5], [-5, 0], [5, 0]];

function trialAt(event) {
  for (const [x, y] of event.target.closest?.("svg") ? NEAR : [[0, 0]]) {
    const part = document.elementFromPoint(event.clientX + x, event.clientY + y)?.closest("[data-t]");
    if (part) return part.dataset.t;
  }
  return null;
}

document.addEventListener("pointermove", (event) => highlight(trialAt(event) ?? pinned));
document.addEventListener("click", (event) => {
  const trial = trialAt(event);
  if (trial !== null) pin(trial);
});

// --- tables

function key(cell) {
  const text = cell.textContent.trim();
  const number = parseFloat(text);
  return Number.isNaN(number) || /^\d+-\d+-/.test(text) ? text : number;
}

function sort(table, heading) {
  const column = heading.cellIndex;
  const descending = heading.getAttribute("aria-sort") === "ascending";
  for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].map((row) => [key(row.cells[column]), row]);
  const compare = (a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);
  rows.sort(([a], [b]) => (descending ? compare(b, a) : compare(a, b)));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const heading of table.tHead.rows[0].cells) {
    heading.firstElementChild.addEventListener("click", () => sort(table, heading));
  }
}

// --- smoothing

// Returns the exponential moving average of the values, divided by the sum of its weights, so that it does not start
// with a bias towards 0. This is TensorBoard's rule: classicSmoothing in
// tensorboard/webapp/widgets/line_chart_v2/data_transformer.ts. A constant curve stays exactly constant.
function smoothed(values, weight) {
  if (values.every((value) => value === values[0])) return values;
  let average = 0;
  return values.map((value, i) => {
    average = weight * average + (1 - weight) * value;
    return average / (1 - weight ** (i + 1));
  });
}

// The scale of a logarithmic axis as two functions: from pixels to values and back. On a linear axis, pixels are
// proportional to values, and averages of both are the same.
function axis(log) {
  if (!log) return [(y) => y, (y) => y];
  const [low, high, begin, end] = log.split(" ").map(Number);
  const span = Math.log(high / low) / (end - begin);
  return [(y) => low * Math.exp((y - begin) * span), (value) => begin + Math.log(value / low) / span];
}

// A path is parts that begin with M, between which there are gaps; a part with an arc is a single point, 2 pixels left.
function smoothedPath(path, weight, [valueAt, pixelOf]) {
  if (!path) return path; // a curve without a finite value
  const points = path.slice(1).split("M").map((part) => {
    const arc = part.indexOf("a");
    const pairs = (arc < 0 ? part : part.slice(0, arc)).split(" ").map((pair) => pair.split(",").map(Number));
    return { pairs, arc: arc < 0 ? "" : part.slice(arc) };
  });
  const values = smoothed(points.flatMap(({ pairs }) => pairs.map(([, y]) => valueAt(y))), weight);
  let i = 0;
  const part = ({ pairs, arc }) => "M" + pairs.map(([x]) => `${x},${pixelOf(values[i++]).toFixed(1)}`).join(" ") + arc;
  return points.map(part).join("");
}

const MOST_WITH_TRACE = 12; // curves of a picture that show their values behind the smoothed line

function smooth(weight) {
  for (const picture of document.querySelectorAll("svg.lines")) {
    const scale = axis(picture.dataset.log);
    const curves = [...picture.querySelectorAll("path.curve")];
    for (const curve of curves) {
      if (curve.dataset.d === undefined) {
        curve.dataset.d = curve.getAttribute("d");
        if (curves.length <= MOST_WITH_TRACE) {
          const trace = curve.cloneNode(false);
          trace.setAttribute("class", curve.getAttribute("class").replace("curve", "trace"));
          curve.before(trace);
          parts.get(curve.dataset.t).push(trace);
        }
      }
      curve.setAttribute("d", weight ? smoothedPath(curve.dataset.d, weight, scale) : curve.dataset.d);
    }
  }
  root.classList.toggle("smoothed", weight > 0);
}

const slider = document.querySelector(".smoothing input");

function slide(value) {
  slider.value = value;
  document.querySelector(".smoothing output").textContent = slider.value;
  smooth(Number(slider.value));
}

if (slider) {
  slider.closest("[hidden]").hidden = false;
  slider.addEventListener("input", () => slide(slider.value));
  if (Number(slider.value)) slide(slider.value);
}

// --- reload

// `hpc-det report --watch` replaces the file, and the page reads it again. What the reader has chosen stays.
const KEPT = `hpc-det report ${location.pathname}`;

function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(KEPT)) ?? {};
  } catch {
    return {}; // a browser may forbid storage to files
  }
}

addEventListener("pagehide", () => {
  try {
    const opened = [...document.querySelectorAll("details")].map((part) => part.open);
    sessionStorage.setItem(KEPT, JSON.stringify({ top: scrollY, smoothing: slider?.value, pinned, opened }));
  } catch {
    // as above
  }
});

if (performance.getEntriesByType("navigation")[0]?.type === "reload") {
  const before = kept();
  if (slider && before.smoothing) slide(before.smoothing);
  if (parts.has(before.pinned)) pin(before.pinned);
  document.querySelectorAll("details").forEach((part, i) => (part.open = before.opened?.[i] ?? part.open));
  history.scrollRestoration = "manual";
  scrollTo(0, before.top ?? 0);
}

const refresh = Number(document.body.dataset.refresh);
if (refresh) {
  setInterval(() => {
    if (!document.hidden) location.reload();
  }, 1000 * refresh);
}

// A name may have a path with characters that the browser encodes, as in /home/ada/hpc_det:12/3.
const isNamed = (line) => new URL(`#trial-${line}`, location).hash === location.hash;
const named = location.hash ? [...parts.keys()].find(isNamed) : undefined;
if (named !== undefined && named !== pinned) pin(named);
