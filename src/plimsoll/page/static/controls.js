// A field for each setting that can be changed, in groups.

import { element } from "./dom.js";

export function makeControls(controls, changes, onchange) {
  // changes: the texts of fields that differ from the config, by key.
  const groups = new Map();
  for (const control of controls) groups.set(control.group, [...(groups.get(control.group) ?? []), fieldOf(control, changes, onchange)]);
  return [...groups].map(([title, fields]) => element("fieldset", {}, element("legend", {}, title), ...fields));
}

function fieldOf(control, changes, onchange) {
  const text = changes.get(control.key) ?? control.value;
  const input = control.choices.length ? choiceOf(control, text) : element("input", { spellcheck: "false", autocomplete: "off", placeholder: "not set" });
  const row = element("div", { class: "field", title: `${control.key} (${control.kind}): ${control.doc}` });
  const mark = () => row.classList.toggle("changed", changes.has(control.key));
  const put = (value) => {
    input.value = value;
    if (value.trim() === control.value) changes.delete(control.key);
    else changes.set(control.key, value.trim());
    mark();
    onchange();
  };
  input.value = text;
  input.id = control.key;
  input.addEventListener("input", () => put(input.value));
  row.append(element("label", { for: control.key }, ...control.label.split(/(?<=[._])/).flatMap((text) => [text, element("wbr")])), element("span", {}, input, ...(control.choices.length ? [] : helpers(control, input, put))));
  mark();
  return row;
}

function choiceOf(control, text) {
  // An address may have a text that is no choice: it is shown, and the check refuses it.
  return element("select", {}, ...[...new Set([...control.choices, text])].map((name) => element("option", {}, name)));
}

function helpers(control, input, put) {
  const step = (up) => put(stepped(input.value, control.step, up));
  const button = (text, says, up) => element("button", { type: "button", tabindex: -1, "aria-label": `${says} ${control.key}`, onclick: () => step(up) }, text);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
    step(event.key === "ArrowUp");
    event.preventDefault();
  });
  const buttons = [button(control.step ? "−" : "÷2", "lower", false), button(control.step ? "+" : "×2", "raise", true)];
  if (control.proposals.length) buttons.push(proposalsOf(control, input, put));
  return buttons;
}

function stepped(text, step, up) {
  if (step) return String(Math.round((Number(text) + (up ? step : -step)) * 100) / 100);
  return text.replace(/^\d+/, (digits) => String(up ? 2 * digits : Math.max(1, Math.floor(digits / 2))));
}

function proposalsOf(control, input, put) {
  // Take the kind of card from the proposal, and keep the number of cards.
  const list = element("select", { class: "proposals", "aria-label": `proposals for ${control.key}` },
    element("option", { value: "?", hidden: true }, ""), ...control.proposals.map((text) => element("option", { value: text }, text || "not set")));
  list.addEventListener("change", () => {
    const count = input.value.match(/^\d+(?=x)/);
    put(count ? list.value.replace(/^\d+(?=x)/, count[0]) : list.value);
    list.value = "?";
  });
  return list;
}
