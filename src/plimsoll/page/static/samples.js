// What was sampled in a step: a summary of its groups, and one group in full.

import { element, fill, number } from "./dom.js";
import { load } from "./source.js";
import { largestAdvantage, responseOf } from "./tokens.js";

const BETTER_IS_GREEN = "Green text was better than expected, orange text worse; a stronger colour means more.";
const WITHOUT_TOKENS = "No tokenizer.json of the actor is on this machine: advantages are shown for whole responses only.";

const ORDERS = {
  "as sampled": (a, b) => a.group - b.group,
  "worst first": (a, b) => a.reward - b.reward,
  "best first": (a, b) => b.reward - a.reward,
  "widest first": (a, b) => (b.highest - b.lowest) - (a.highest - a.lowest),
};

export function makeSamples(box, runs) {
  // Return the function that shows a newer step if the last step is shown.
  const state = { run: 0, step: null, group: null, overview: { steps: [], groups: [] } };
  const select = (label, entries, onchange) => element("select", { "aria-label": label, onchange }, ...entries.map((text, i) => element("option", { value: i }, text)));
  const run = select("run", runs, () => show({ run: Number(run.value), step: null, group: null }));
  const step = element("select", { "aria-label": "step", onchange: () => show({ step: step.value === "" ? null : Number(step.value), group: null }) });
  const order = select("order", Object.keys(ORDERS), drawList);
  const filter = element("input", { type: "search", placeholder: "filter prompts", "aria-label": "filter prompts", oninput: drawList });
  const endsButton = element("button", { type: "button", onclick: () => open(null) }, "best and worst");
  const [count, list, full] = [element("span", { class: "quiet" }), element("div", { class: "groups" }), element("div", { "aria-live": "polite" })];
  fill(box, element("div", { class: "controls" }, runs.length > 1 ? run : null, element("label", {}, "step", step), endsButton, order, filter, count), list, full);

  async function show(changed) {
    Object.assign(state, changed);
    const overview = await load("groups", { run: state.run, step: state.step });
    const newer = overview.step !== state.overview.step || changed.run !== undefined;
    state.overview = overview;
    drawSteps();
    if (!newer) return;
    if (!overview.groups.length) return fill(list, "No trajectories: runs that sample write them (run.keep_trajectories).");
    drawList();
    await open(overview.groups.find((item) => item.group === state.group)?.group ?? null);
  }

  function drawSteps() {
    const last = state.overview.steps.at(-1);
    if (step.dataset.last === `${state.run}/${last}`) return;
    step.dataset.last = `${state.run}/${last}`;
    fill(step, element("option", { value: "" }, `last (${last ?? "none"})`), ...state.overview.steps.slice().reverse().map((item) => element("option", { value: item }, item)));
    step.value = state.step ?? "";
  }

  function matchingGroups() {
    const matching = state.overview.groups.filter((item) => item.prompt.includes(filter.value) || item.source.includes(filter.value));
    return matching.sort(Object.values(ORDERS)[order.value]);
  }

  function drawList() {
    const matching = matchingGroups();
    count.textContent = `${number(matching.length)} of ${number(state.overview.groups.length)} groups`;
    fill(list, ...matching.map((item) => element("button", { type: "button", "data-group": item.group, "aria-pressed": item.group === state.group, onclick: () => open(item.group) },
      element("span", { class: "quiet" }, item.group), element("b", {}, number(item.reward, 3)),
      element("span", { class: "quiet range" }, item.responses > 1 ? `${number(item.lowest, 3)} to ${number(item.highest, 3)}` : ""),
      element("span", { class: "prompt" }, item.prompt))));
  }

  async function open(group) {
    // null shows the best and the worst responses of all groups.
    state.group = group;
    for (const item of [endsButton, ...list.children]) item.setAttribute("aria-pressed", item === endsButton ? group === null : item.dataset.group === String(group));
    const at = { run: state.run, step: state.overview.step };
    const parts = group === null ? endsOf(await load("ends", at), open) : groupOf(await load("group", { ...at, group }));
    if (state.group === group) fill(full, ...parts);
  }
  return () => (state.step === null ? show({}) : load("groups", { run: state.run }).then((newer) => { state.overview.steps = newer.steps; drawSteps(); }));
}

function referenceOf(text) {
  return element("div", { class: "reference" }, "reference: ", element("pre", {}, text));
}

function endsOf(ends, open) {
  const most = largestAdvantage({ responses: [...ends.best, ...ends.worst].map((item) => item.response) });
  const row = (what, responses) => responses.length ? [element("h3", {}, `Step ${ends.step}: the ${what} responses`),
    element("div", { class: "responses", tabindex: 0, "aria-label": `${what} responses` }, ...responses.map((item) => endOf(item, most, open)))] : [];
  return [element("p", { class: "quiet" }, ends.withTokens ? BETTER_IS_GREEN : WITHOUT_TOKENS), ...row("best", ends.best), ...row("worst", ends.worst)];
}

function endOf(item, most, open) {
  const article = responseOf(item.response, most);
  const whole = element("button", { type: "button", onclick: () => open(item.group) }, `all of group ${item.group}${item.source ? ` of ${item.source}` : ""}`);
  article.prepend(element("div", { class: "prompt-text" }, element("pre", {}, item.prompt)), item.reference === null ? "" : referenceOf(item.reference));
  article.append(whole);
  return article;
}

function groupOf(group) {
  const most = largestAdvantage(group);
  const how = group.withTokens ? BETTER_IS_GREEN : WITHOUT_TOKENS;
  return [
    element("h3", {}, `Step ${group.step}, group ${group.group}${group.source ? ` of ${group.source}` : ""}`),
    element("div", { class: "prompt-text" }, element("pre", {}, group.prompt)),
    group.reference === null ? null : referenceOf(group.reference),
    element("p", { class: "quiet" }, how),
    element("div", { class: "responses", tabindex: 0, "aria-label": "responses" }, ...group.responses.map((item) => responseOf(item, most))),
  ];
}
