// A plan and the settings that decide it: each change is planned anew, and kept in the address.

import { bytes, element, fill } from "./dom.js";
import { live, load } from "./source.js";
import { opened, placeOf } from "./memory.js";
import { makeControls } from "./controls.js";
import { whatFits } from "./answers.js";

const PAUSE = 150; // milliseconds without typing before it is planned
const changes = new Map(new URLSearchParams(location.search));
const [header, nav] = [document.getElementById("header"), document.getElementById("sections")];
const verdict = element("strong", { role: "status" });
const undo = element("button", { type: "button", onclick: () => put(new Map()) }, "undo all");
const asking = element("button", { type: "button", onclick: askWhatFits }, "what fits?");
const fields = element("form", { autocomplete: "off" });
const about = element("p", { id: "about", class: "quiet", hidden: true });
const [told, memory, problems, copies, fitting] = [element("div", { id: "told" }), element("div"), element("div"), element("div"), element("div", { id: "answers", "aria-live": "polite" })];
let [asked, timer, drawn] = [0, 0, ""];

function part(id, title, ...children) {
  nav.append(element("a", { href: `#${id}` }, title));
  return element("section", { id }, element("h2", {}, title), ...children);
}

function put(texts) {
  changes.clear();
  for (const [key, text] of texts) changes.set(key, text);
  drawn = "";
  look();
}

async function askWhatFits() {
  // Answers are changes to the settings as they were when asked; each can be tried, and another.
  const base = new Map(changes);
  asking.disabled = true;
  fill(fitting, element("p", { class: "quiet" }, "Searching: this takes some seconds."));
  const found = await load("fits", Object.fromEntries(base)).catch((error) => ({ lost: error.message }));
  asking.disabled = false;
  if (found.lost) return fill(fitting, element("pre", { class: "problem", role: "alert" }, found.lost));
  fill(fitting, ...whatFits(found, base, put));
}

async function look() {
  const mine = ++asked;
  history.replaceState(null, "", changes.size ? `?${new URLSearchParams([...changes])}` : location.pathname);
  const found = await load("plan", Object.fromEntries(changes)).catch((error) => ({ lost: error.message }));
  if (mine !== asked) return; // something was changed meanwhile
  if (found.lost) state("no plan", found.lost);
  else draw(found);
}

function draw(found) {
  const known = JSON.stringify(found.controls);
  if (known !== drawn) fill(fields, ...makeControls(found.controls, changes, () => { clearTimeout(timer); timer = setTimeout(look, PAUSE); }));
  drawn = known;
  const before = changes.size && found.before ? `; as written: ${found.before.verdict}` : "";
  const title = [element("h1", {}, found.config), element("div", { class: "quiet" }, `plimsoll ${found.job}${before}`)];
  if (found.plan) {
    state(`${found.plan.verdict}: ${bytes(Object.values(found.plan.peaks)[0])}`, null, ...title, element("p", {}, found.plan.says), peaksOf(found.plan.peaks, found.before?.peaks));
    drawPlan(found.plan);
  } else state("refused", found.refusal, ...title);
  fill(copies, ...found.copies.map(copyOf), found.plan ? null : element("p", { class: "quiet" }, "Nothing to copy: these settings are refused."));
}

function state(text, refusal, ...children) {
  // A refusal leaves the last plan there, faint.
  verdict.textContent = text;
  verdict.className = `verdict ${text.split(/\W/)[0]}`;
  undo.disabled = !changes.size;
  main.classList.toggle("stale", refusal !== null);
  fill(told, refusal ? element("pre", { class: "problem", role: "alert" }, refusal) : null);
  fill(header, element("div", {}, ...children));
}

function peaksOf(now, before) {
  return element("div", { class: "figures" }, ...Object.entries(now).map(([name, size]) =>
    element("span", {}, `fullest ${name} `, element("b", {}, bytes(size)), before?.[name] && before[name] !== size ? ` (as written ${bytes(before[name])})` : null)));
}

function drawPlan(plan) {
  const open = opened(memory);
  fill(memory, ...plan.places.map((place) => placeOf(place, open)));
  fill(problems, ...plan.problems.map((one) => element("div", { class: `problem-of ${one.severity}` },
    element("p", {}, element("b", {}, `${one.severity}${one.code ? ` ${one.code}` : ""}: `), one.what),
    element("p", { class: "quiet" }, one.why), element("p", {}, `→ ${one.fix}`))));
  if (!plan.problems.length) fill(problems, element("p", { class: "quiet" }, "None."));
}

function copyOf({ title, text }) {
  const box = element("pre", { tabindex: 0, "aria-label": title }, text);
  const button = element("button", { type: "button", onclick: async () => {
    getSelection().selectAllChildren(box);
    // Browsers let only pages of this machine, or encrypted ones, write to the clipboard.
    button.textContent = await navigator.clipboard?.writeText(text).then(() => "copied", () => null) ?? "selected: press Ctrl+C";
  } }, "copy");
  return element("div", { class: "copy" }, element("div", { class: "controls" }, element("h3", {}, title), button), box);
}

const main = document.getElementById("main");
nav.append(verdict, ...(live ? [asking, undo] : []));
fill(main, told, fitting, live ? part("settings", "Settings", fields, about) : null,
  element("div", { id: "planned" }, part("memory", "Memory", element("p", { class: "quiet" }, "Hatched: by how much the prediction may be too low."), memory),
    part("problems", "Problems", problems), part("config", "Config", copies)));
fields.addEventListener("focusin", (event) => {
  about.textContent = event.target.closest(".field").title;
  about.hidden = false;
});
fields.addEventListener("submit", (event) => event.preventDefault());
look();
