"use strict";
// One trial is highlighted in all pictures: under the pointer, or pinned by a click or by #trial-7 in the URL.
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
  const row = document.querySelector(`#trials tr[data-t="${trial}"]`);
  const headings = [...document.querySelectorAll("#trials th")];
  return headings.map((heading, i) => `${heading.textContent} ${row.cells[i].textContent}`).join(" · ");
}

function pin(trial) {
  pinned = trial === pinned ? null : trial;
  for (const button of document.querySelectorAll(".pin")) {
    button.setAttribute("aria-pressed", String(button.textContent === pinned));
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

const named = /^#trial-(\d+)$/.exec(location.hash)?.[1];
if (parts.has(named)) pin(named);
