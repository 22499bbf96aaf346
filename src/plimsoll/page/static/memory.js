// Memory: a row for each phase of each card and host, predicted above measured, beside the load
// line; and the table of all processes.

import { bytes, element, fill, table } from "./dom.js";
import { colourOf } from "./palette.js";

const MEASURES = { device: "card", host: "host", allocated: "allocated", reserved: "reserved" };

export function drawMemory(box, memory) {
  const open = opened(box);
  fill(box,
    ...memory.remarks.map((text) => element("p", {}, text)),
    ...memory.places.map((place) => placeOf(place, open)),
    memory.table.length ? comparison(memory.table) : element("p", { class: "quiet" }, "Nothing was measured yet."));
}

export function opened(box) {
  // Return the keys of the phases whose items are open.
  return new Set([...box.querySelectorAll("details[open]")].map((details) => details.dataset.key));
}

const sum = (parts) => parts.reduce((total, part) => total + part.bytes, 0);

export function placeOf(place, open) {
  const most = Math.max(...place.phases.map((phase) => Math.max(phase.likely ?? 0, sum(phase.predicted), sum(phase.measured))), 1);
  const scale = Math.max(most, place.capacity ?? 0) * 1.02;
  const names = (key, what) => [...new Set(place.phases.flatMap((phase) => phase[what].map((part) => part[key])))];
  const line = place.capacity ? `the load line is at ${bytes(place.capacity)}` : "its size is not known";
  return element("div", { class: "place" },
    element("h3", {}, `${place.name}: ${line}`),
    place.says ? element("p", { class: `says ${place.verdict.split(" ")[0]}` }, place.says) : null,
    keysOf("predicted by role:", names("role", "predicted")),
    keysOf("measured by process:", names("process", "measured")),
    ...place.phases.map((phase) => phaseOf(place, phase, scale, open)));
}

function keysOf(what, names) {
  if (!names.length) return null;
  return element("div", { class: "keys" }, what, ...names.map((name) => {
    const mark = element("i");
    mark.style.background = colourOf(name);
    return element("span", {}, mark, name);
  }));
}

function phaseOf(place, phase, scale, open) {
  const key = `${place.name}/${phase.name}`;
  const line = element("span", { class: "load-line" });
  line.style.left = `${100 * place.capacity / scale}%`;
  const texts = [phase.predicted.length ? `${bytes(sum(phase.predicted))} predicted` : "", phase.measured.length ? `${bytes(sum(phase.measured))} measured` : ""];
  const summary = element("summary", { class: "phase" }, element("span", {}, phase.name),
    element("div", { class: "bars" },
      bar("predicted", merged(phase.predicted), scale, phase.likely - sum(phase.predicted)),
      phase.likely ? null : bar("measured", phase.measured.map((part) => ({ name: part.process, bytes: part.bytes })), scale),
      place.capacity ? line : null),
    element("small", { class: "number" }, texts[0], element("br"), texts[1]));
  const rows = phase.predicted.map((item) => ({ cells: [{ text: item.role }, { text: item.item },
    { text: bytes(item.bytes), numeric: true }, { text: item.formula }] }));
  return element("details", { "data-key": key, open: open.has(key) }, summary,
    rows.length ? table("items", [{ text: "role" }, { text: "item" }, { text: "predicted", numeric: true }, { text: "how" }], rows)
      : element("p", { class: "quiet" }, "The plan has nothing for this phase."));
}

function merged(items) {
  const roles = new Map();
  for (const item of items) roles.set(item.role, (roles.get(item.role) ?? 0) + item.bytes);
  return [...roles].map(([name, size]) => ({ name, bytes: size }));
}

function bar(kind, parts, scale, unsure = 0) {
  // unsure: bytes by which the prediction may be too low.
  const node = element("div", { class: `bar ${kind}` }, ...parts.map((part) => {
    const piece = element("i", { title: `${part.name}: ${bytes(part.bytes)} ${kind}` });
    piece.style.width = `${100 * part.bytes / scale}%`;
    piece.style.background = colourOf(part.name);
    return piece;
  }));
  if (unsure > 0) {
    node.append(element("i", { class: "unsure", title: `may be ${bytes(unsure)} more` }));
    node.lastChild.style.width = `${100 * unsure / scale}%`;
  }
  return node;
}

function comparison(rows) {
  const measures = Object.keys(MEASURES).filter((name) => rows.some((row) => row.measures[name]));
  const head = [{ text: "process" }, { text: "phase" }, ...measures.flatMap((name) =>
    ["predicted", "measured", "over"].map((what) => ({ text: `${MEASURES[name]} ${what}`, numeric: true })))];
  const cells = (measure) => measure
    ? [bytes(measure[0]), bytes(measure[1]), measure[2] === null ? "" : `${measure[2] < 0 ? "−" : "+"}${Math.round(100 * Math.abs(measure[2]))} %`]
    : ["", "", ""];
  return element("details", {}, element("summary", {}, "Every kind of process and phase, predicted and measured"),
    table("memory", head, rows.map((row) => ({ cells: [
      { text: row.process, small: row.several > 1 ? `fullest of ${row.several}` : "" }, { text: row.phase },
      ...measures.flatMap((name) => cells(row.measures[name]).map((text) => ({ text, numeric: true })))] }))));
}
