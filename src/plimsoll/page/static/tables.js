// Held-out figures, seconds by phase and settings as tables; the console and pictures of a run.

import { element, fill, number, table } from "./dom.js";

export function drawHeldOut(box, data) {
  if (!data.rows.length) {
    fill(box, element("p", { class: "quiet" }, "Nothing was evaluated. Set run.eval_every and data.eval to evaluate during a run."));
    return;
  }
  const rows = data.rows.map((row) => ({ cells: [
    { text: element("code", {}, row.name), small: row.label },
    ...row.cells.map((cell) => ({ text: cell ? cell[0] : "–", small: cell ? cell[1] : "", numeric: true }))] }));
  const intervals = data.rows.some((row) => row.cells.some((cell) => cell && cell[1]));
  fill(box, table("held-out", [{ text: "metric" }, ...data.columns.map((text) => ({ text, numeric: true }))], rows),
    intervals ? element("p", { class: "quiet" }, "Under the numbers, and as bands in the curves: 95 % confidence intervals.") : null);
}

export function drawSeconds(box, data) {
  const total = Object.values(data.steps).reduce((sum, value) => sum + value, 0);
  const before = Object.entries(data.before).map(([phase, seconds]) => `${phase} ${number(seconds, 3)} s`);
  const rows = Object.entries(data.steps).map(([phase, seconds]) => ({ cells: [{ text: phase },
    { text: seconds.toFixed(1), numeric: true }, { text: total ? `${Math.round(100 * seconds / total)} %` : "", numeric: true }] }));
  fill(box,
    element("p", {}, `Before the first step, or on resuming: ${before.join(", ") || "nothing"}. Of the steps:`),
    table("time", [{ text: "phase" }, { text: "seconds", numeric: true }, { text: "share", numeric: true }], rows));
}

export function drawConsole(box, data) {
  // Keep the end in view for a reader who is at the end.
  const before = box.querySelector("pre");
  const atEnd = !before || before.scrollTop + before.clientHeight >= before.scrollHeight - 4;
  if (data.bytes === null) return fill(box, element("p", { class: "quiet" }, "No run.log in the run's directory."));
  const shown = element("pre", { class: "console", tabindex: 0, "aria-label": "console" }, data.lines.join("\n"));
  fill(box, data.cut ? element("p", { class: "quiet" }, `The last ${number(data.lines.length)} lines of run.log.`) : null, shown);
  shown.scrollTop = atEnd ? shown.scrollHeight : before.scrollTop;
}

export function drawPictures(box, data) {
  fill(box, ...data.map((picture) => element("details", {}, element("summary", {}, picture.title), element("img", { alt: picture.title, src: picture.source, loading: "lazy" }))));
}

export function makeSettings(box, rows, runs) {
  const several = runs.length > 1;
  const filter = element("input", { type: "search", placeholder: "filter keys", "aria-label": "filter keys", oninput: draw });
  const only = element("input", { type: "checkbox", onchange: draw });
  only.checked = several;
  const out = element("div", { class: "rows", tabindex: 0, "aria-label": "settings" });
  const choice = several ? element("label", {}, only, "only what differs") : null;
  fill(box, element("div", { class: "controls" }, filter, choice), out);
  function draw() {
    const shown = rows.filter((row) => row.key.includes(filter.value) && (!only.checked || row.differs));
    const cells = (row) => [{ text: element("code", {}, row.key) }, ...row.values.map((text) => ({ text: text ?? "–" }))];
    fill(out, table("settings", [{ text: "key" }, ...runs.map((text) => ({ text }))],
      shown.map((row) => ({ differs: several && row.differs && !only.checked, cells: cells(row) }))));
  }
  draw();
}
