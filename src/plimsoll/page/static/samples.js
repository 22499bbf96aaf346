// What was sampled in a step: its groups in short, and one of them in full.

import { element, fill, number } from "./dom.js";
import { load } from "./source.js";
import { largestAdvantage, responseOf } from "./tokens.js";

const BETTER_IS_GREEN = "Green text was better than expected, orange worse; the stronger, the more.";
const WITHOUT_TOKENS = "No tokenizer.json of the actor is on this machine: advantages are shown by response alone.";

const ORDERS = {
  "as sampled": (a, b) => a.group - b.group,
  "worst first": (a, b) => a.reward - b.reward,
  "best first": (a, b) => b.reward - a.reward,
  "widest first": (a, b) => (b.highest - b.lowest) - (a.highest - a.lowest),
};

export function makeSamples(box, runs) {
  // Gives the function that shows a newer step, where the last one is shown.
  const state = { run: 0, step: null, group: null, found: { steps: [], groups: [] } };
  const select = (label, entries, onchange) => element("select", { "aria-label": label, onchange }, ...entries.map((text, i) => element("option", { value: i }, text)));
  const run = select("run", runs, () => show({ run: Number(run.value), step: null, group: null }));
  const step = element("select", { "aria-label": "step", onchange: () => show({ step: step.value === "" ? null : Number(step.value), group: null }) });
  const order = select("order", Object.keys(ORDERS), drawList);
  const filter = element("input", { type: "search", placeholder: "filter prompts", "aria-label": "filter prompts", oninput: drawList });
  const overview = element("button", { type: "button", onclick: () => open(null) }, "best and worst");
  const [count, list, full] = [element("span", { class: "quiet" }), element("div", { class: "groups" }), element("div", { "aria-live": "polite" })];
  fill(box, element("div", { class: "controls" }, runs.length > 1 ? run : null, element("label", {}, "step", step), overview, order, filter, count), list, full);

  async function show(changed) {
    Object.assign(state, changed);
    const found = await load("groups", { run: state.run, step: state.step });
    const newer = found.step !== state.found.step || changed.run !== undefined;
    state.found = found;
    drawSteps();
    if (!newer) return;
    if (!found.groups.length) return fill(list, "No trajectories: runs that sample write them (run.keep_trajectories).");
    drawList();
    await open(found.groups.find((one) => one.group === state.group)?.group ?? null);
  }

  function drawSteps() {
    const last = state.found.steps.at(-1);
    if (step.dataset.last === `${state.run}/${last}`) return;
    step.dataset.last = `${state.run}/${last}`;
    fill(step, element("option", { value: "" }, `last (${last ?? "none"})`), ...state.found.steps.slice().reverse().map((one) => element("option", { value: one }, one)));
    step.value = state.step ?? "";
  }

  function shown() {
    const found = state.found.groups.filter((one) => one.prompt.includes(filter.value) || one.source.includes(filter.value));
    return found.sort(Object.values(ORDERS)[order.value]);
  }

  function drawList() {
    const found = shown();
    count.textContent = `${number(found.length)} of ${number(state.found.groups.length)} groups`;
    fill(list, ...found.map((one) => element("button", { type: "button", "data-group": one.group, "aria-pressed": one.group === state.group, onclick: () => open(one.group) },
      element("span", { class: "quiet" }, one.group), element("b", {}, number(one.reward, 3)),
      element("span", { class: "quiet range" }, one.responses > 1 ? `${number(one.lowest, 3)} to ${number(one.highest, 3)}` : ""),
      element("span", { class: "prompt" }, one.prompt))));
  }

  async function open(group) {
    // null: the best and the worst responses of all groups.
    state.group = group;
    for (const one of [overview, ...list.children]) one.setAttribute("aria-pressed", one === overview ? group === null : one.dataset.group === String(group));
    const at = { run: state.run, step: state.found.step };
    const parts = group === null ? endsOf(await load("ends", at), open) : groupOf(await load("group", { ...at, group }));
    if (state.group === group) fill(full, ...parts);
  }
  return () => (state.step === null ? show({}) : load("groups", { run: state.run }).then((found) => { state.found.steps = found.steps; drawSteps(); }));
}

function endsOf(found, open) {
  const most = largestAdvantage({ responses: [...found.best, ...found.worst].map((one) => one.response) });
  const row = (what, ends) => ends.length ? [element("h3", {}, `Step ${found.step}: the ${what} responses`),
    element("div", { class: "responses", tabindex: 0, "aria-label": `${what} responses` }, ...ends.map((one) => endOf(one, most, open)))] : [];
  return [element("p", { class: "quiet" }, found.withTokens ? BETTER_IS_GREEN : WITHOUT_TOKENS), ...row("best", found.best), ...row("worst", found.worst)];
}

function endOf(one, most, open) {
  const made = responseOf(one.response, most);
  const whole = element("button", { type: "button", onclick: () => open(one.group) }, `all of group ${one.group}${one.source ? ` of ${one.source}` : ""}`);
  made.prepend(element("div", { class: "prompt-text" }, element("pre", {}, one.prompt)), one.reference === null ? "" : element("p", {}, "reference: ", element("code", {}, one.reference)));
  made.append(whole);
  return made;
}

function groupOf(found) {
  const most = largestAdvantage(found);
  const how = found.withTokens ? BETTER_IS_GREEN : WITHOUT_TOKENS;
  return [
    element("h3", {}, `Step ${found.step}, group ${found.group}${found.source ? ` of ${found.source}` : ""}`),
    element("div", { class: "prompt-text" }, element("pre", {}, found.prompt)),
    found.reference === null ? null : element("p", {}, "reference: ", element("code", {}, found.reference)),
    element("p", { class: "quiet" }, how),
    element("div", { class: "responses", tabindex: 0, "aria-label": "responses" }, ...found.responses.map((one) => responseOf(one, most))),
  ];
}
