// A plan and its settings: each change is planned again, and kept in the address.

import { bytes, element, fill } from "./dom.js";
import { live, load } from "./source.js";
import { opened, placeOf } from "./memory.js";
import { makeControls } from "./controls.js";
import { whatFits } from "./answers.js";

const PAUSE = 150; // milliseconds without typing before a change is planned
const changes = new Map(new URLSearchParams(location.search));
const [header, nav] = [document.getElementById("header"), document.getElementById("sections")];
const verdict = element("strong", { role: "status" });
const undo = element("button", { type: "button", onclick: () => put(new Map()) }, "undo all");
const asking = element("button", { type: "button", onclick: askWhatFits }, "what fits?");
const fields = element("form", { autocomplete: "off" });
const about = element("p", { id: "about", class: "quiet", hidden: true });
const [refusalBox, memory, problems, copies, fitting] = [element("div", { id: "refusal" }), element("div"), element("div"), element("div"), element("div", { id: "answers", "aria-live": "polite" })];
let [requests, timer, drawn] = [0, 0, ""];

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
  // Answers change the settings of the moment of the request, so several can be tried in turn.
  const base = new Map(changes);
  asking.disabled = true;
  fill(fitting, element("p", { class: "quiet" }, "Searching: this takes some seconds."));
  const reply = await load("fits", Object.fromEntries(base)).catch((error) => ({ lost: error.message }));
  asking.disabled = false;
  if (reply.lost) return fill(fitting, element("pre", { class: "problem", role: "alert" }, reply.lost));
  fill(fitting, ...whatFits(reply, base, put));
}

async function look() {
  const mine = ++requests;
  history.replaceState(null, "", changes.size ? `?${new URLSearchParams([...changes])}` : location.pathname);
  const reply = await load("plan", Object.fromEntries(changes)).catch((error) => ({ lost: error.message }));
  if (mine !== requests) return; // another change was made meanwhile
  if (reply.lost) state("no plan", reply.lost);
  else draw(reply);
}

function draw(reply) {
  const known = JSON.stringify(reply.controls);
  if (known !== drawn) fill(fields, ...makeControls(reply.controls, changes, () => { clearTimeout(timer); timer = setTimeout(look, PAUSE); }));
  drawn = known;
  const before = changes.size && reply.before ? `; as written: ${reply.before.verdict}` : "";
  const title = [element("h1", {}, reply.config), element("div", { class: "quiet" }, `plimsoll ${reply.job}${before}`)];
  if (reply.plan) {
    state(`${reply.plan.verdict}: ${bytes(Object.values(reply.plan.peaks)[0])}`, null, ...title, element("p", {}, reply.plan.says), peaksOf(reply.plan.peaks, reply.before?.peaks));
    drawPlan(reply.plan);
  } else state("refused", reply.refusal, ...title);
  fill(copies, ...reply.copies.map(copyOf), reply.plan ? null : element("p", { class: "quiet" }, "Nothing to copy: these settings are refused."));
}

function state(text, refusal, ...children) {
  // A refusal leaves the last plan on the page, faint.
  verdict.textContent = text;
  verdict.className = `verdict ${text.split(/\W/)[0]}`;
  undo.disabled = !changes.size;
  main.classList.toggle("stale", refusal !== null);
  fill(refusalBox, refusal ? element("pre", { class: "problem", role: "alert" }, refusal) : null);
  fill(header, element("div", {}, ...children));
}

function peaksOf(now, before) {
  return element("div", { class: "figures" }, ...Object.entries(now).map(([name, size]) =>
    element("span", {}, `fullest ${name} `, element("b", {}, bytes(size)), before?.[name] && before[name] !== size ? ` (as written ${bytes(before[name])})` : null)));
}

function drawPlan(plan) {
  const open = opened(memory);
  fill(memory, ...plan.places.map((place) => placeOf(place, open)));
  fill(problems, ...plan.problems.map((problem) => element("div", { class: `problem-of ${problem.severity}` },
    element("p", {}, element("b", {}, `${problem.severity}${problem.code ? ` ${problem.code}` : ""}: `), problem.what),
    element("p", { class: "quiet" }, problem.why), element("p", {}, `→ ${problem.fix}`))));
  if (!plan.problems.length) fill(problems, element("p", { class: "quiet" }, "None."));
}

function copyOf({ title, text }) {
  const box = element("pre", { tabindex: 0, "aria-label": title }, text);
  const button = element("button", { type: "button", onclick: async () => {
    getSelection().selectAllChildren(box);
    // Browsers let only local or encrypted pages write to the clipboard.
    button.textContent = await navigator.clipboard?.writeText(text).then(() => "copied", () => null) ?? "selected: press Ctrl+C";
  } }, "copy");
  return element("div", { class: "copy" }, element("div", { class: "controls" }, element("h3", {}, title), button), box);
}

const main = document.getElementById("main");
nav.append(verdict, ...(live ? [asking, undo] : []));
fill(main, refusalBox, fitting, live ? part("settings", "Settings", fields, about) : null,
  element("div", { id: "planned" }, part("memory", "Memory", element("p", { class: "quiet" }, "Hatched: by how much the prediction may be too low."), memory),
    part("problems", "Problems", problems), part("config", "Config", copies)));
fields.addEventListener("focusin", (event) => {
  about.textContent = event.target.closest(".field").title;
  about.hidden = false;
});
fields.addEventListener("submit", (event) => event.preventDefault());
look();
