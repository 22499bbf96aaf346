// The page of runs: its sections, their controls, and their updates.

import { element, fill } from "./dom.js";
import { live, load } from "./source.js";
import { drawChart, makeChart } from "./charts.js";
import { drawProgress } from "./progress.js";
import { drawConsole, drawHeldOut, drawPictures, drawSeconds, makeSettings } from "./tables.js";
import { drawMemory } from "./memory.js";
import { makeSamples } from "./samples.js";

const EVERY = 750; // milliseconds between two requests for progress
const main = document.getElementById("main");
const dark = matchMedia("(prefers-color-scheme: dark)");
const view = { runs: [], steps: [], seeds: [], range: null, smoothing: 0, theme: dark.matches, axis: "x", log: false, grouped: false };
const charts = new Map(); // by section and title
const drawn = new Map(); // panels by section
const filter = element("input", { type: "search", placeholder: "filter curves", "aria-label": "filter curves", oninput: applyFilter });
const smoothing = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, oninput: () => { view.smoothing = Number(smoothing.value); redraw(); } });
const AXES = { step: "x", hours: "hours", tokens: "tokens" };
const axis = element("select", { "aria-label": "horizontal axis", onchange: () => { view.axis = AXES[axis.value]; zoom(null); } }, ...Object.keys(AXES).map((name) => element("option", {}, name)));
const log = element("input", { type: "checkbox", onchange: () => { view.log = log.checked; redraw(); } });
const grouped = element("input", { type: "checkbox", onchange: () => { view.grouped = grouped.checked; redraw(); } });
const whole = element("button", { type: "button", class: "hidden", onclick: () => zoom(null) }, "show the whole run");

function section(id, title, ...children) {
  const node = element("section", { id }, element("h2", {}, title), ...children);
  document.getElementById("sections").append(element("a", { href: `#${id}` }, title));
  main.append(node);
  return node;
}

function grid(name) {
  return element("div", { class: "grid", id: `curves-${name}` });
}

function each(name) {
  // Return a box for every run, with its name if there are several.
  return view.runs.map((run) => element("div", { "data-of": name }, view.runs.length > 1 ? element("h3", {}, run) : null, element("div")));
}

async function drawCurves(name) {
  const [from, to] = view.range ?? [null, null];
  const panels = await load("curves", live && view.range && view.axis === "x" ? { section: name, from, to } : { section: name });
  if (name === "other" && !parts.other.open) return;
  drawn.set(name, panels);
  const box = document.getElementById(`curves-${name}`);
  panels.forEach((panel, place) => {
    const key = `${name}/${panel.title}`;
    if (!charts.has(key)) charts.set(key, makeChart(zoom));
    const { figure } = charts.get(key);
    if (box.children[place] !== figure) box.insertBefore(figure, box.children[place] ?? null);
  });
  while (box.children.length > panels.length) box.lastChild.remove();
  applyFilter();
  redraw([name]);
}

function redraw(names = [...drawn.keys()]) {
  for (const name of names) {
    for (const panel of drawn.get(name)) drawChart(charts.get(`${name}/${panel.title}`), panel, view);
  }
}

function applyFilter() {
  const words = filter.value.toLowerCase();
  for (const [name, panels] of drawn) {
    for (const panel of panels) {
      const text = [panel.title, ...panel.series.map((series) => series.name)].join(" ").toLowerCase();
      charts.get(`${name}/${panel.title}`).figure.classList.toggle("hidden", !text.includes(words));
    }
  }
}

async function zoom(range) {
  view.range = range;
  whole.classList.toggle("hidden", range === null);
  await Promise.all([...drawn.keys()].map(drawCurves));
}

const parts = {};

function build(runs, settings) {
  view.runs = runs.map((run) => run.name);
  section("curves", "Curves", element("div", { class: "controls" }, filter, element("label", {}, "smooth", smoothing),
    element("label", {}, "by", axis), element("label", {}, log, "log scale"),
    new Set(view.seeds).size < runs.length ? element("label", {}, grouped, "mean of seeds, with their range") : null, whole), grid("learning"));
  section("health", "Health", element("p", { class: "quiet" }, "The green band is the healthy range."), grid("health"));
  section("held-out", "Held out", ...(parts.heldOut = each("held-out")));
  const samples = section("samples", "Samples", element("div"));
  parts.samples = makeSamples(samples.lastChild, view.runs);
  section("time", "Time", grid("time"), ...(parts.seconds = each("seconds")));
  section("memory", "Memory", ...(parts.memory = each("memory")), grid("memory"), ...(parts.pictures = each("pictures")));
  section("console", "Console", ...(parts.console = each("console")));
  parts.other = element("details", { ontoggle: () => parts.other.open && drawCurves("other") }, element("summary", {}, "Every other metric"), grid("other"));
  section("other", "Other metrics", parts.other);
  makeSettings(section("config", "Config", element("div")).lastChild, settings, view.runs);
}

async function refresh() {
  const per = (boxes, name, draw) => boxes.map(async (box, run) => draw(box.lastChild, await load(name, { run })));
  await Promise.all([
    ...["learning", "health", "time", "memory", ...(parts.other.open ? ["other"] : [])].map(drawCurves),
    ...per(parts.heldOut, "held-out", drawHeldOut),
    ...per(parts.seconds, "seconds", drawSeconds),
    ...per(parts.memory, "memory", drawMemory),
    ...per(parts.pictures, "pictures", drawPictures),
    parts.samples(),
  ]);
}

let [seen, logs] = ["", null];

async function look() {
  const runs = await load("progress");
  drawProgress(document.getElementById("header"), runs);
  view.steps = runs.map((run) => run.step);
  if (!view.runs.length) {
    view.seeds = await load("seeds") ?? runs.map((_, i) => i);
    build(runs, await load("settings"));
  }
  const versions = runs.map((run) => run.version).join();
  if (versions !== seen) {
    seen = versions;
    await refresh();
  }
  const written = runs.map((run) => run.logBytes).join();
  if (written !== logs || !live) {
    logs = written;
    await Promise.all(parts.console.map(async (box, run) => drawConsole(box.lastChild, await load("console", { run }))));
  }
}

async function keepLooking() {
  try {
    if (!document.hidden || !seen) await look();
    document.getElementById("lost")?.remove();
  } catch (error) {
    if (!document.getElementById("lost")) document.body.prepend(element("p", { id: "lost", class: "problem", role: "alert" }, error.message));
    seen = "";
  }
  if (live) setTimeout(keepLooking, EVERY);
}

dark.addEventListener("change", () => { view.theme = dark.matches; redraw(); });
new ResizeObserver(() => redraw()).observe(main);
keepLooking();
